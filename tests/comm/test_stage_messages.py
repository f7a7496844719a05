"""Pipelines over lines as strict as any: threads for ranks, no process group. What NCCL relies on is seen here."""

import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rotorch.comm.stage_messages import StageMessages
from rotorch.core.errors import HeardFailure
from rotorch.models.stages import StageOutput
from rotorch.parallel_model import Holding
from rotorch.pipeline_step import PipelineStep
from rotorch.pipelining.baselines import make_schedule
from rotorch.pipelining.lower import lower
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule

PATIENCE_S = 120


class Wires:
    """What all ranks share."""

    def __init__(self):
        self.changed = threading.Condition()
        self.headers = defaultdict(deque)
        self.posted = defaultdict(list)
        self.sent = defaultdict(int)

    def until(self, holds):
        assert self.changed.wait_for(holds, PATIENCE_S), "stuck"


class StrictLines:
    """Tensors go in order of posting, whatever their tags, and a send stands still until its receive is posted."""

    def __init__(self, wires, rank):
        self.wires, self.rank = wires, rank

    def send_header(self, header, *, to, tag):
        with self.wires.changed:
            self.wires.headers[self.rank, to, tag].append(header.clone())
            self.wires.changed.notify_all()
        return lambda: None

    def receive_header(self, header, *, source, tag):
        came = []

        def wait():
            with self.wires.changed:
                queue = self.wires.headers[source, self.rank, tag]
                if not came:
                    self.wires.until(lambda: queue)
                    came.append(header.copy_(queue.popleft()))

        return wait

    def send(self, tensor, *, to, tag):
        wires, way = self.wires, (self.rank, to)
        with wires.changed:
            number = wires.sent[way]
            wires.sent[way] += 1
            wires.until(lambda: len(wires.posted[way]) > number)
            place, came = wires.posted[way][number]
            assert (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
            place.copy_(tensor)
            came.set()
            wires.changed.notify_all()
        return lambda: None

    def receive(self, tensor, *, source, tag):
        came = threading.Event()
        with self.wires.changed:
            self.wires.posted[source, self.rank].append((tensor, came))
            self.wires.changed.notify_all()

        def wait():
            assert came.wait(PATIENCE_S), "stuck"

        return wait


class NothingHeld(Holding):
    def lend(self):
        raise NotImplementedError


class Chain:
    """A model of one small layer per stage; `rows` of its hidden states go on."""

    def __init__(self, num_stages):
        generator = torch.Generator().manual_seed(0)
        size = (num_stages, 3, 3)
        self.weights = [w.clone().requires_grad_() for w in torch.randn(size, generator=generator).double()]
        self.rows = 5
        self.breaks_at = None

    def output(self, stage, x):
        y = torch.tanh(x @ self.weights[stage])[: self.rows]
        return y if stage + 1 < len(self.weights) else y.sum()

    def dense(self, batch):
        x = batch["x"]
        for stage in range(len(self.weights)):
            x = self.output(stage, x)
        return x


class Part:
    """What one rank runs of a chain."""

    def __init__(self, chain):
        self.chain, self.now = chain, None

    @contextmanager
    def stage(self, number, *, received):
        self.now = number, received
        yield

    def run(self, batch):
        stage, received = self.now
        if (stage, batch["number"]) == self.chain.breaks_at:
            raise ZeroDivisionError
        output = self.chain.output(stage, batch["x"] if received is None else received)
        if stage + 1 < len(self.chain.weights):
            raise StageOutput(output)
        return output


class Pipeline:
    """All ranks of a table, step after step."""

    def __init__(self, schedule):
        self.table = lower(schedule)
        self.chain = Chain(schedule.num_stages)
        wires = Wires()
        places = [SimpleNamespace(size=lambda: schedule.num_ranks, get_local_rank=lambda r=r: r) for r in range(8)]
        self.messages = [
            StageMessages(places[rank], device=torch.device("cpu"), lines=StrictLines(wires, rank))
            for rank in range(schedule.num_ranks)
        ]
        generator = torch.Generator().manual_seed(1)
        xs = torch.randn(schedule.num_micro_batches, 5, 3, generator=generator).double()
        self.batches = [{"x": x, "number": number} for number, x in enumerate(xs)]

    def step(self):
        """What each rank raised, or None."""
        raised = [None] * len(self.messages)

        def row(rank):
            part = Part(self.chain)
            step = PipelineStep(
                NothingHeld(), staged=part, messages=self.messages[rank], run=part.run, micro_batches=self.batches
            )
            try:
                step.run(self.table.rows[rank], self.table)
            except (Exception, AssertionError) as error:
                raised[rank] = error

        threads = [threading.Thread(target=row, args=(rank,), daemon=True) for rank in range(len(raised))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive()
        return raised

    def is_exact(self):
        """Whether a step leaves the gradients of the whole model."""
        for weight in self.chain.weights:
            weight.grad = None
        assert self.step() == [None] * len(self.messages)
        found = [w.grad.clone() for w in self.chain.weights]
        for weight in self.chain.weights:
            weight.grad = None
        for batch in self.batches:
            self.chain.dense(batch).backward()
        return all(torch.allclose(mine, w.grad) for mine, w in zip(found, self.chain.weights, strict=True))


def zeropp(ranks, chunks, unit, micro_batches):
    return make_zeropp_schedule(num_ranks=ranks, num_chunks=chunks, num_micro_batches=micro_batches, unit=unit)


TABLES = [
    make_schedule("gpipe", num_ranks=2, num_micro_batches=3),
    make_schedule("1f1b", num_ranks=4, num_micro_batches=7),
    make_schedule("zb_h1", num_ranks=3, num_micro_batches=5),
    make_schedule("zbv", num_ranks=2, num_chunks=2, num_micro_batches=4),
    make_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_micro_batches=4),
    zeropp(2, 1, 3, 6),
    zeropp(2, 2, 2, 5),
    zeropp(3, 2, 3, 7),
]


@pytest.mark.parametrize("schedule", TABLES, ids=[f"{t.name}-{t.num_ranks}x{t.num_chunks}" for t in TABLES])
def test_in_order_and_with_sends_that_wait_for_their_receives(schedule):
    pipeline = Pipeline(schedule)
    assert pipeline.is_exact()  # shapes are not known yet
    assert pipeline.is_exact()  # receives are posted ahead
    pipeline.chain.rows = 4  # not what both ends know
    assert pipeline.is_exact()
    assert pipeline.is_exact()


def test_receives_are_posted_where_the_row_says_so():
    """In the second step a rank posts what its row has before a computation that needs none of it."""
    pipeline = Pipeline(make_schedule("1f1b", num_ranks=2, num_micro_batches=4))
    assert pipeline.is_exact()
    messages, posted = pipeline.messages[1], []
    for tag in (100, 101):
        messages.expect(source=0, tag=tag, like=next(iter(messages._known)))
        posted.append(messages._expected[0, tag].tensor_came is not None)
    assert posted == [True, True]


@pytest.mark.parametrize("at", [(0, 1), (2, 0), (3, 3)])
def test_all_ranks_raise_and_the_next_step_is_exact_again(at):
    pipeline = Pipeline(zeropp(2, 2, 2, 4))
    for _ in range(2):  # shapes unknown, then known
        pipeline.chain.breaks_at = at
        raised = pipeline.step()
        assert {type(error) for error in raised} == {ZeroDivisionError, HeardFailure}
        assert isinstance(raised[at[0] % 2], ZeroDivisionError)
        pipeline.chain.breaks_at = None
        assert pipeline.is_exact()


def test_few_gradients_are_under_way():
    waited = []

    class Slow(StrictLines):
        def send(self, tensor, *, to, tag):
            return lambda: waited.append(tag)

    messages = StageMessages(SimpleNamespace(), device=torch.device("cpu"), lines=Slow(Wires(), 0))
    for tag in range(5):
        messages.send(torch.ones(2), to=1, tag=tag, like="gradients", unclaimed=True)
    assert len(waited) == 3 and len(messages._under_way) == 2
    messages.settle()
    assert len(waited) == 5 and not messages._under_way

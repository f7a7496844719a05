"""Pipelines over strict connections: threads for ranks, no process group. What NCCL relies on is seen here."""

import threading
from collections import defaultdict, deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.stage_messages import GroupConnections, StageMessages
from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.hold.pipeline_step import PipelineStep
from rotorch.hold.sharded_model import ShardedStages
from rotorch.models.stages import StageOutput
from rotorch.pipelining.baselines import make_schedule
from rotorch.pipelining.lower import lower
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule
from rotorch.testing.ranks import run_ranks

PATIENCE_S = 120


class Wires:
    """State that all ranks share."""

    def __init__(self):
        self.changed = threading.Condition()
        self.headers = defaultdict(deque)
        self.posted = defaultdict(list)
        self.sent = defaultdict(int)

    def until(self, holds):
        assert self.changed.wait_for(holds, PATIENCE_S), "stuck"


class StrictConnections:
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


class NothingHeld(ShardedStages):
    def unsharded(self):
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
    """One rank's part of a chain."""

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
            StageMessages(places[rank], device=torch.device("cpu"), connections=StrictConnections(wires, rank))
            for rank in range(schedule.num_ranks)
        ]
        generator = torch.Generator().manual_seed(1)
        xs = torch.randn(schedule.num_micro_batches, 5, 3, generator=generator).double()
        self.batches = [{"x": x, "number": number} for number, x in enumerate(xs)]

    def step(self):
        """Each rank's exception, or None."""
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
        """True if a step leaves the gradients of the whole model."""
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


def two_ends():
    wires = Wires()
    meshes = [SimpleNamespace(size=lambda: 2, get_local_rank=lambda r=r: r) for r in range(2)]
    return [
        StageMessages(mesh, device=torch.device("cpu"), connections=StrictConnections(wires, r))
        for r, mesh in enumerate(meshes)
    ]


@pytest.mark.parametrize("taken", [(0, 1, 2), (2, 0, 1), (1,), ()])
def test_both_ends_know_alike_in_whatever_order_tensors_are_taken(taken):
    """Tensors that were to be alike and are not; a receiver that breaks off takes the rest when its step ends."""
    sender, receiver = two_ends()
    given = [torch.full((rows, 3), float(rows)) for rows in (2, 4, 1)]
    for step in range(3):
        failed = []

        def send(given=given, failed=failed):
            try:
                for tag, tensor in enumerate(given):
                    sender.send(tensor, to=1, tag=tag, like="hidden states")
                sender.settle()
            except BaseException as error:  # of a thread, which nobody else sees
                failed.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        for tag in range(3):
            receiver.expect(source=0, tag=tag, like="hidden states")
        for tag in taken:
            assert torch.equal(receiver.receive(source=0, tag=tag), given[tag])
        receiver.settle()
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and not failed
        assert sender._known == receiver._known == {"hidden states": (torch.float32, (2 + 2 * (step == 2), 3))}
        if step == 1:
            given = [given[1], given[0], given[2]]
    assert not sender._learned and not receiver._learned


def test_a_step_that_was_left_in_the_middle_is_the_last():
    pipeline = Pipeline(make_schedule("gpipe", num_ranks=2, num_micro_batches=2))
    assert pipeline.is_exact()

    @contextmanager
    def interrupted(action):
        raise KeyboardInterrupt
        yield

    def step(watch=None):
        messages, batches = pipeline.messages[0], pipeline.batches
        part = Part(pipeline.chain)
        step = PipelineStep(
            NothingHeld(), staged=part, messages=messages, run=part.run, micro_batches=batches, watch=watch
        )
        step.run(pipeline.table.rows[0], pipeline.table)

    with pytest.raises(KeyboardInterrupt):
        step(interrupted)
    for again in (step, lambda: pipeline.messages[0].exchange([], [])):
        with pytest.raises(RankFailure, match="an earlier step was left in the middle"):
            again()


def test_a_result_comes_to_the_other_ranks():
    giver, taker = two_ends()
    for result in ([{"loss": 1.5, "targets": 7}, {"loss": 2.5, "targets": 6}], []):
        giver.to_all(result)
        assert taker.from_one(source=0) == result


def over_connections_made_ahead():
    """Messages of the rank before, over connections that were made as those of GPUs are."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    connections = GroupConnections(mesh, device=torch.device("cpu"))
    connections._connect(torch.device("cpu"))
    rank, size = mesh.get_local_rank(), mesh.size()
    came = torch.zeros(1)
    wait = connections.receive(came, source=(rank - 1) % size, tag=0)
    connections.send(torch.full((1,), 10.0 + rank), to=(rank + 1) % size, tag=0)()
    wait()
    return came.item()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_making_connections_ahead_leaves_no_message_behind(num_ranks):
    found = run_ranks(over_connections_made_ahead, num_ranks=num_ranks, timeout_s=PATIENCE_S)
    assert found == [10 + (rank - 1) % num_ranks for rank in range(num_ranks)]


def with_a_result_left_behind():
    """Values of a borrowed weight, received by a rank that has broken off a forward and awaits no result."""
    mesh = init_device_mesh("cpu", (2,))
    messages = StageMessages(mesh, device=torch.device("cpu"))
    value = torch.arange(1.0, 8.0, dtype=torch.float64)  # as many bytes as a header
    mine = torch.zeros_like(value)
    if mesh.get_local_rank() == 0:
        messages.exchange([(1, value)], [])
    else:
        messages.no_value(source=0)
        messages.exchange([], [(0, mine)])
        value = mine
    if mesh.get_local_rank() == 0:
        messages.no_value(source=0)
    return value.tolist()


def test_a_result_that_was_left_behind_takes_no_values_of_borrowed_weights():
    assert run_ranks(with_a_result_left_behind, num_ranks=2) == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * 2


def test_few_gradients_are_under_way():
    waited = []

    class Slow(StrictConnections):
        def send(self, tensor, *, to, tag):
            return lambda: waited.append(tag)

    messages = StageMessages(SimpleNamespace(), device=torch.device("cpu"), connections=Slow(Wires(), 0))
    for tag in range(5):
        messages.send(torch.ones(2), to=1, tag=tag, like="gradients", unclaimed=True)
    assert len(waited) == 3 and len(messages._under_way) == 2
    messages.settle()
    assert len(waited) == 5 and not messages._under_way

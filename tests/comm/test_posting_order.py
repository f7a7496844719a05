"""Receives are posted before the sends of the same exchange: over gloo both directions then run at the same time.

A send that finds no receive at the other end waits for word of one, and the two messages of a pair follow each other.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from rotorch.comm.direct_collectives import gather_each, sum_each
from rotorch.comm.stage_messages import StageMessages
from rotorch.comm.transports import make_ring, messages
from rotorch.testing.fake import as_rank

RANKS = 4


class Posted(TorchDispatchMode):
    """Writes down "send" and "recv_" in the order in which a rank posts them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def ring_of_all(n=RANKS, **options):
    mesh = init_device_mesh("cpu", (n,))
    numels = [[8] * n, [4] * n]
    return make_ring(
        "send_receive", mesh=mesh, numels=numels, dtype=torch.float32, device=torch.device("cpu"), **options
    )


@pytest.mark.parametrize("buffering", ["out_of_place", "in_place"])
def test_a_ring_posts_its_receive_before_its_send(buffering):
    with as_rank(1, num_ranks=RANKS):
        ring = ring_of_all(buffering=buffering)
        ring.start(fresh=[True, True])
        with Posted() as posted:
            for backward in (False, True):
                for visit in ring.visits(0, backward=backward):
                    if backward:
                        ring.gradient(0, visit, wait=True)
                        ring.pass_on(0, visit)
    assert len(posted.names) >= 2 * 3 * (RANKS - 1)  # weights twice, gradients once
    assert posted.names == ["recv_", "send"] * (len(posted.names) // 2)


def test_gathers_and_sums_post_receives_before_sends():
    with as_rank(1, num_ranks=RANKS):
        part, whole = torch.ones(4), torch.ones(4 * RANKS)
        with Posted() as gathering:
            gather_each([whole], [part], group=dist.group.WORLD)()
        with Posted() as summing:
            end = sum_each([part], [whole], group=dist.group.WORLD)
            begun = list(summing.names)
            end()
    assert gathering.names == ["recv_"] * (RANKS - 1) + ["send"] * (RANKS - 1)
    assert begun == ["recv_"] * 2 + ["send"] * (RANKS - 1)  # memory for two parts, see `sum_each`
    assert sorted(summing.names) == ["recv_"] * (RANKS - 1) + ["send"] * (RANKS - 1)


def test_stages_that_trade_weights_post_receives_before_sends():
    with as_rank(1, num_ranks=RANKS):
        messages = StageMessages(init_device_mesh("cpu", (RANKS,)), device=torch.device("cpu"))
        with Posted() as posted:
            messages.exchange([(0, torch.ones(2)), (2, torch.ones(2))], [(0, torch.ones(2)), (3, torch.ones(2))])
    assert posted.names == ["recv_", "recv_", "send", "send"]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_last_slice_of_backward_waits_for_nobody(n, monkeypatch):
    """A rank's own part is written home while the others' sum is under way; the next item's backward waits for that."""
    waits = []
    monkeypatch.setattr(messages, "_wait", lambda works: waits.extend(["wait"] * len(works)))
    for name, works in (("has_sent", "_sent"), ("has_received", "_received")):  # as over gloo, which never knows
        monkeypatch.setattr(messages.Exchange, name, lambda self, works=works: not getattr(self, works))

    def number_of_waits(call):
        before = len(waits)
        call()
        return len(waits) - before

    with as_rank(1, num_ranks=n):
        ring = ring_of_all(n)
        ring.start(fresh=[True, True])
        for item in (0, 1):
            for visit in ring.visits(item, backward=True, fetch=False):
                if visit.number == 0:
                    assert (ring.gradient(item, visit, wait=False) is None) == (item == 1)
                found = number_of_waits(lambda visit=visit, item=item: ring.gradient(item, visit, wait=True))
                found += number_of_waits(lambda visit=visit, item=item: ring.pass_on(item, visit))
                assert (found > 0) == ((item, visit.number) != (0, 0) and visit.number != n - 1)
        assert number_of_waits(ring.finish) == 2  # the last one has come, and the last one has left


def test_one_handle_for_a_whole_batch_is_waited_for_by_whoever_waits(monkeypatch):
    """NCCL gives one: a buffer must not be written again before it has left."""
    monkeypatch.setattr(messages, "_wait", lambda works: waited.extend(works))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: ["handle"])
    for wait in (messages.Exchange.wait_sent, messages.Exchange.wait_received):
        waited = []
        with as_rank(1, num_ranks=2):
            exchange = messages.Exchange(send=torch.ones(1), to=0, receive=torch.ones(1), source=0, group=None)
            wait(exchange)
        assert waited == ["handle"]

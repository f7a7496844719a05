"""The meter sees every operation, whoever issues it, and counts what a ring algorithm sends."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from rotorch.comm.meter import Meter
from rotorch.core.traffic import Kind
from rotorch.testing.ranks import run_ranks


def metered(function, **options):
    with Meter(**options) as meter:
        function()
    by_kind = Counter()
    for (kind, _), sent in meter.sent_by_group.items():
        by_kind[kind] += sent
    assert by_kind == meter.sent_bytes
    return dict(meter.sent_bytes), dict(meter.num_messages), dict(meter.not_counted), meter.total_sent_bytes


def collectives():
    n = dist.get_world_size()
    rows = torch.ones(100, 4)
    return {
        "all_reduce": metered(lambda: dist.all_reduce(rows.clone())),
        "all_gather": metered(lambda: dist.all_gather_single(torch.empty(100 * n, 4), rows)),
        "reduce_scatter": metered(lambda: dist.reduce_scatter_single(rows.clone()[: 100 // n], rows[: 100 // n * n])),
        "list": metered(lambda: dist.all_gather([torch.empty(100, 4) for _ in range(n)], rows)),
    }


@pytest.mark.parametrize("n", [2, 4])
def test_collectives_by_the_ring_algorithm(n):
    for found in run_ranks(collectives, num_ranks=n):
        assert found["all_reduce"][0] == {Kind.ALL_REDUCE: 2 * 1600 * (n - 1) // n}
        assert found["all_gather"][0] == {Kind.ALL_GATHER: 1600 * (n - 1)}
        assert found["list"][0] == {Kind.ALL_GATHER: 1600 * (n - 1)}
        assert found["reduce_scatter"][0] == {Kind.REDUCE_SCATTER: 1600 * (n - 1) // n}
        assert all(sum(f[1].values()) == 1 and f[2] == {} and f[3] == sum(f[0].values()) for f in found.values())


def messages():
    rank, x = dist.get_rank(), torch.ones(50)

    def pass_on():
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty(50), 1 - rank)]
        )
        for work in works:
            work.wait()

    return metered(pass_on)


def test_messages_count_for_their_sender():
    for sent, number, unknown, _ in run_ranks(messages, num_ranks=2):
        assert (sent, number, unknown) == ({Kind.SEND: 200}, {Kind.SEND: 1}, {})


def small():
    both = torch.ones(2), torch.ones(64)
    counted = metered(lambda: [dist.all_reduce(t) for t in both])
    return counted, metered(lambda: [dist.all_reduce(t) for t in both], smallest_counted_bytes=0)


def test_small_payloads_are_left_out_unless_asked_for():
    for counted, everything in run_ranks(small, num_ranks=2):
        assert (counted[1], counted[3]) == ({Kind.ALL_REDUCE: 1}, 256)
        assert (everything[1], everything[3]) == ({Kind.ALL_REDUCE: 2}, 264)


def in_backward():
    model = DistributedDataParallel(nn.Linear(30, 20))
    for _ in range(2):  # the second time it tells the others in which order gradients came
        model(torch.ones(2, 30)).sum().backward()
    return metered(lambda: model(torch.ones(2, 30)).sum().backward())


def test_what_a_library_sends_under_backward_is_seen():
    for sent, _, unknown, _ in run_ranks(in_backward, num_ranks=2):
        assert sent == {Kind.ALL_REDUCE: 620 * 4}
        assert unknown == {}


def unknown_operation():
    parts = [torch.ones(100)] * dist.get_world_size() if dist.get_rank() == 0 else None
    return metered(lambda: dist.scatter(torch.ones(100), parts, src=0))


def test_what_it_has_no_rule_for_it_says():
    for sent, _, unknown, _ in run_ranks(unknown_operation, num_ranks=2):
        assert (sent, unknown) == ({}, {"scatter_": 1})


def redistributions():
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.ones(40 * n, 10)
    part = DTensor.from_local(whole[:40], mesh, [Shard(0)], run_check=False)
    sums = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    return {
        "all_gather": metered(lambda: part.full_tensor()),
        "all_reduce": metered(lambda: sums.full_tensor()),
        "reduce_scatter": metered(lambda: sums.redistribute(placements=[Shard(0)]).to_local() + 0),
    }


@pytest.mark.parametrize("n", [2, 4])
def test_what_dtensor_sends_is_counted(n):
    for found in run_ranks(redistributions, num_ranks=n):
        assert found["all_gather"][0] == {Kind.ALL_GATHER: 1600 * (n - 1)}
        assert found["all_reduce"][0] == {Kind.ALL_REDUCE: 2 * 1600 * (n - 1)}
        assert found["reduce_scatter"][0] == {Kind.REDUCE_SCATTER: 1600 * (n - 1)}
        assert all(sum(f[1].values()) == 1 and f[2] == {} for f in found.values())


def _broadcast_and_reduce(root):
    with Meter() as meter:
        dist.broadcast(torch.ones(100), src=root)
        dist.reduce(torch.ones(100), dst=root)
    return dict(meter.sent_bytes), dict(meter.not_counted)


@pytest.mark.parametrize("root", [0, 2])
def test_a_chain_sends_a_broadcast_from_all_ranks_but_its_last_and_a_reduction_from_all_but_its_target(root):
    found = run_ranks(_broadcast_and_reduce, root, num_ranks=3)
    for rank, (sent, not_counted) in enumerate(found):
        assert not not_counted
        assert sent[Kind.BROADCAST] == (0 if rank == (root + 2) % 3 else 400)
        assert sent[Kind.REDUCE] == (0 if rank == root else 400)

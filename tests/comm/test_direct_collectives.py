"""Gathers and sums over gloo as direct messages: right, counted as one collective, in memory for two parts."""

import pytest
import torch
import torch.distributed as dist

from rotorch.comm import direct_collectives
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.meter import Meter
from rotorch.core.traffic import Kind
from rotorch.testing.ranks import run_ranks
from rotorch.traced.live_storages import LiveStorages

SHAPES = [(6, 5), (0, 3), (2,), (4, 4, 4)]


def parts_of(rank, *, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def wholes_of(rank, n, *, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn((n * s[0], *s[1:]), generator=generator, dtype=torch.float64) for s in SHAPES]


def line_of_all():
    return AxisGroup("all", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def gathers_and_sums():
    line, n = line_of_all(), dist.get_world_size()
    with Meter() as meter:
        wholes = [torch.full((n * s[0], *s[1:]), torch.nan, dtype=torch.float64) for s in SHAPES]
        sums = [torch.full(s, torch.nan, dtype=torch.float64) for s in SHAPES]
        given = wholes_of(line.position, n)
        summed = line.sum_each(sums, given)  # a gather overtakes it
        line.gather_each(wholes, parts_of(line.position))()
        summed()
    for number, whole in enumerate(wholes):
        assert torch.equal(whole, torch.cat([parts_of(rank)[number] for rank in range(n)]))
    for number, part in enumerate(sums):
        whole = sum(wholes_of(rank, n)[number] for rank in range(n))
        torch.testing.assert_close(part, whole.chunk(n)[line.position] if whole.numel() else part)
    assert torch.equal(given[0], wholes_of(line.position, n)[0])  # what is given is read only
    sums = [torch.empty(2), torch.empty(2)]
    ends = [line.sum_each([part], [torch.full((n * 2,), value)]) for part, value in zip(sums, (1.0, 10.0), strict=True)]
    for end in ends:  # in the order in which they began
        end()
    assert [part.tolist() for part in sums] == [[n * 1.0] * 2, [n * 10.0] * 2]
    narrow = line.reduce_scatter(torch.full((n, 2), 1.5, dtype=torch.bfloat16))
    assert narrow.dtype == torch.bfloat16 and narrow.tolist() == [[1.5 * n] * 2]
    single = line.reduce_scatter(torch.ones(n * 3, 2))
    assert torch.equal(single, torch.full((3, 2), float(n)))
    assert torch.equal(line.all_gather(torch.full((1, 2), float(line.position)))[:, 0], torch.arange(float(n)))
    return dict(meter.sent_bytes), dict(meter.num_messages), dict(meter.not_counted)


@pytest.mark.parametrize("n", [2, 3])
def test_every_rank_gets_what_it_is_to_have(n):
    part_bytes = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)
    for sent, messages, unknown in run_ranks(gathers_and_sums, num_ranks=n):
        assert sent == {Kind.ALL_GATHER: part_bytes * (n - 1), Kind.REDUCE_SCATTER: part_bytes * (n - 1)}
        assert messages == {Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 1}
        assert unknown == {}


def bytes_of_a_sum():
    line, n, rows = line_of_all(), dist.get_world_size(), 1000
    wholes = [torch.ones(n * rows) for _ in range(8)]
    parts = [torch.empty(rows) for _ in wholes]
    live = LiveStorages()
    with live:
        line.sum_each(parts, wholes)()
    return live.most_made_bytes(since=0) // (4 * rows)


def test_a_sum_takes_memory_for_two_parts():
    assert run_ranks(bytes_of_a_sum, num_ranks=3) == [2, 2, 2]


def who_sends_directly():
    return tuple(direct_collectives.goes_directly(dist.group.WORLD, device=torch.device(d)) for d in ("cpu", "cuda"))


def test_gloo_goes_directly_and_nothing_else():
    assert run_ranks(who_sends_directly, num_ranks=1) == [(True, False)]

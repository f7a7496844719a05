"""Slices in eight bits on the wire: how far off they may be; all ranks see the same, and masters keep their bits."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.fp8 import Fp8Wire
from rotorch.comm.transports import make_ring
from rotorch.core.messages import FP8_BLOCK, fp8_bytes
from rotorch.testing.ranks import run_ranks

LARGEST, HALF_STEP = 448.0, 1 / 16  # of e4m3: the largest number, and half of the distance between two, relatively
SMALLEST_STEP = 2.0**-9


def there_and_back(values, *, dtype=torch.float32):
    wire = Fp8Wire(home_dtype=values.dtype, dtype=dtype)
    message = torch.empty(wire.length(values.numel()), dtype=torch.uint8)
    wire.pack(values, message)
    out = torch.empty(values.numel(), dtype=dtype)
    wire.unpack(message, out)
    visited = torch.empty_like(out)
    wire.visit(values, visited)
    assert torch.equal(out.view(torch.uint8), visited.view(torch.uint8))
    return out


def scales_of(values):
    padded = torch.cat([values, values.new_zeros(-values.numel() % FP8_BLOCK)])
    return (padded.view(-1, FP8_BLOCK).abs().amax(1) / LARGEST).repeat_interleave(FP8_BLOCK)[: values.numel()]


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 5000, 300_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_every_element_is_within_its_bound(numel, scale):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    error = (there_and_back(values) - values).abs()
    bound = torch.maximum(values.abs() * HALF_STEP, scales_of(values) * SMALLEST_STEP / 2)
    assert bool((error <= bound * (1 + 1e-5)).all())
    if numel > 1:
        assert error.max() > 0


def test_the_largest_of_a_block_and_powers_of_two_below_it_are_exact():
    values = torch.tensor([448.0, 224.0, -112.0, 0.0, 1.0] * 40)
    assert torch.equal(there_and_back(values), values)


def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite():
    tiny = torch.full((FP8_BLOCK,), 3e-45)
    back = there_and_back(torch.cat([torch.zeros(FP8_BLOCK), tiny, torch.full((7,), 1.3e-42)]))
    assert torch.equal(back[:FP8_BLOCK], torch.zeros(FP8_BLOCK)) and bool(back.isfinite().all())


def test_one_large_weight_spoils_its_own_block_only():
    values = torch.full((3 * FP8_BLOCK,), 1e-4)
    values[FP8_BLOCK] = 1e4
    error = (there_and_back(values) - values).abs() / values
    assert error[:FP8_BLOCK].max() < HALF_STEP and error[2 * FP8_BLOCK :].max() < HALF_STEP
    assert error[FP8_BLOCK + 1 : 2 * FP8_BLOCK].max() == 1.0


def test_what_is_not_a_number_stays_none():
    values = torch.ones(FP8_BLOCK)
    values[3] = float("nan")
    assert bool(there_and_back(values)[3].isnan())


def test_a_message_is_a_byte_each_and_a_scale_for_128():
    assert [fp8_bytes(numel) for numel in (0, 1, 128, 129)] == [0, 5, 132, 137]


NUMELS = [[300, 257, 128], [0, 1, 130]]


def seen(buffering, dtype):
    """Every slice as this rank sees it, in forward and in backward, over two steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = dict(dtype=torch.float32, wire_dtype=dtype, device=torch.device("cpu"))
    ring = make_ring("send_receive", mesh=mesh, numels=NUMELS, fp8=True, buffering=buffering, **options)
    homes = []
    for item, sizes in enumerate(NUMELS):
        generator = torch.Generator().manual_seed(10 * item + ring.position)
        homes.append(torch.randn(sizes[ring.position], generator=generator))
        ring.home_weights(item).copy_(homes[-1])
    found = []
    for _ in range(2):
        dist.barrier()
        ring.start(fresh=[True] * len(NUMELS))
        for backward, items in ((False, (0, 1)), (True, (1, 0))):
            for item in items:
                for visit in ring.visits(item, backward=backward):
                    assert visit.weights.dtype == dtype
                    found.append((item, visit.index, visit.weights.clone()))
                    if backward:
                        ring.gradient(item, visit, wait=True).flat.fill_(1.0)
                        ring.pass_on(item, visit)
        ring.finish()
    assert all(torch.equal(ring.home_weights(item), home) for item, home in enumerate(homes))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffering", ["out_of_place", "in_place"])
def test_all_ranks_compute_with_the_same_rounded_slices(buffering, dtype):
    slices = {}
    for found in run_ranks(seen, buffering, dtype, num_ranks=3):
        for item, index, weights in found:
            assert torch.equal(slices.setdefault((item, index), weights), weights)
    for (item, index), weights in slices.items():
        generator = torch.Generator().manual_seed(10 * item + index)
        home = torch.randn(NUMELS[item][index], generator=generator)
        assert torch.equal(weights, there_and_back(home, dtype=dtype))

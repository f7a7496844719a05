"""The ring over symmetric memory on a GPU: what visits whom, and what becomes of gradients, while streams overlap."""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.transports import make_ring
from rotorch.core.errors import ConfigError
from rotorch.mesh import pick_device
from rotorch.testing.ranks import run_ranks

NUMELS = {2: [[5, 7], [0, 3], [1 << 20, (1 << 20) + 1]], 4: [[5, 7, 0, 2], [4, 4, 4, 4], [1 << 20, 3, 1 << 19, 9]]}
NUM_STEPS = 4


def values(item, index, numel, *, step, device):
    return torch.arange(numel, dtype=torch.float64, device=device) + 100.0 * (index + 1) + 1000.0 * item + 7.0 * step


def part(rank, item, index, numel, *, device):
    return (torch.arange(numel, dtype=torch.float64, device=device) + 10.0 * index + item + 1.0) * 2.0**rank


def busy(device):
    """Work that keeps the compute stream behind the host, so that what is not waited for would be seen."""
    a = torch.randn(1024, 1024, device=device)
    for _ in range(8):
        a = a @ a / 1024.0


def make(n):
    device = pick_device("cuda")
    mesh = init_device_mesh("cuda", (n,))
    return make_ring("symmetric_memory", mesh=mesh, numels=NUMELS[n], dtype=torch.float64, device=device), device


def wrong(ring, device, *, step, stop=None):
    """Trains one step; returns a count of wrong elements on the device, so that the host runs ahead meanwhile."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for item in range(len(ring.numels)):
        home = ring.home_weights(item)
        home.copy_(values(item, ring.position, home.numel(), step=step, device=device))
    dist.barrier()
    ring.start(fresh=[True] * len(ring.numels))
    for item, numels in enumerate(ring.numels):
        for visit in ring.visits(item, backward=False):
            busy(device)
            found += (visit.weights != values(item, visit.index, numels[visit.index], step=step, device=device)).sum()
    for item, numels in reversed(list(enumerate(ring.numels))):
        for number, visit in enumerate(ring.visits(item, backward=True)):
            buffer = ring.gradient(item, visit, wait=False)
            busy(device)
            found += (visit.weights != values(item, visit.index, numels[visit.index], step=step, device=device)).sum()
            mine = part(ring.position, item, visit.index, numels[visit.index], device=device)
            buffer.flat.copy_(mine) if buffer.fresh else buffer.flat.add_(mine)
            if number == stop:
                return found
            ring.pass_on(item, visit)
    ring.finish()
    for item, numels in enumerate(ring.numels):
        numel = numels[ring.position]
        expected = sum(part(rank, item, ring.position, numel, device=device) for rank in range(ring.size))
        found += (ring.home_gradients(item) != expected).sum()
    return found


def steps(n):
    ring, device = make(n)
    found = [wrong(ring, device, step=step) for step in range(NUM_STEPS)]
    wrong(ring, device, step=NUM_STEPS, stop=0)  # left by all ranks at the same place
    found += [wrong(ring, device, step=NUM_STEPS + 1 + step) for step in range(NUM_STEPS)]
    ring.close()
    return [int(f) for f in found], ring.name


@pytest.mark.parametrize("n", [2, 4])
def test_slices_and_gradients_are_exact_on_one_gpu(n):
    for found, name in run_ranks(steps, n, num_ranks=n, timeout_s=240):
        assert name == "symmetric_memory"
        assert found == [0] * (2 * NUM_STEPS)


def chosen(transport):
    device, mesh = pick_device("cuda"), init_device_mesh("cuda", (2,))
    try:
        return make_ring(transport, mesh=mesh, numels=NUMELS[2], dtype=torch.float32, device=device).name
    except ConfigError as error:
        return str(error)


def test_ranks_that_share_a_gpu_get_symmetric_memory():
    assert run_ranks(chosen, "auto", num_ranks=2) == ["symmetric_memory"] * 2


def test_gloo_carries_no_messages_between_gpus():
    for message in run_ranks(chosen, "send_receive", num_ranks=2):
        assert "cannot travel as messages of gloo" in message


def test_sharing_must_be_asked_for(monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    if torch.cuda.device_count() > 1:
        pytest.skip("every rank has a GPU of its own here")
    for message in run_ranks(chosen, "symmetric_memory", num_ranks=2):
        assert "ranks share a GPU; TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows it" in message

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.transports import make_ring


@pytest.fixture(scope="session")
def ring():
    """Makes a ring over all ranks, on a rank: `ring(transport, numels=..)`; every slice holds `slice_values`."""
    return make


def make(transport, *, numels):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    made = make_ring(transport, mesh=mesh, numels=numels, dtype=torch.float64, device=torch.device("cpu"))
    for item, sizes in enumerate(numels):
        made.home_weights(item).copy_(slice_values(item, made.position, numel=sizes[made.position]))
    torch.distributed.barrier()
    return made


def slice_values(item, index, *, numel):
    return torch.arange(numel, dtype=torch.float64) + 100.0 * (index + 1) + 1000.0 * item

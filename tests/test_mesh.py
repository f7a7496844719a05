import pytest
import torch
import torch.distributed as dist

from rotorch._torch_private import group_timeout
from rotorch.mesh import make_mesh
from rotorch.strategies import parse_parallel
from rotorch.testing.ranks import run_ranks

CPU = torch.device("cpu")


def timeouts(layout):
    mesh = make_mesh(parse_parallel(layout), device=CPU)
    groups = [dist.group.WORLD, *(mesh.get_group(axis) for axis in mesh.mesh_dim_names)]
    return [group_timeout(group, device=CPU).total_seconds() for group in groups]


@pytest.mark.parametrize("layout", ["ddp=2,rtp=2", "tesseract=1x1x2"])
def test_every_axis_waits_as_long_as_all_ranks_do(layout):
    num_ranks = 4 if "ddp" in layout else 2
    for found in run_ranks(timeouts, layout, num_ranks=num_ranks, timeout_s=77.0):
        assert set(found) == {77.0}

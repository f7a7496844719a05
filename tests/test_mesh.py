import pytest
import torch
import torch.distributed as dist
from torch import nn

from rotorch._torch_private import group_timeout
from rotorch.core.errors import ConfigError
from rotorch.mesh import make_mesh
from rotorch.parallelize import parallelize
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


def losses_of(layouts, widths):
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, widths[rank]), nn.Linear(widths[rank], 4))
    try:
        parallelize(model, layouts[rank], device="cpu")
    except ConfigError as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    ("layouts", "widths", "words"),
    [
        (("ddp=2", "ddp=2"), (8, 8), "built"),
        (("ddp=2", "rtp=2"), (8, 8), 'the layout is "ddp=2" on rank 0 and "rtp=2" on rank 1'),
        (("ddp=2", "ddp=2"), (8, 12), 'the weight 0.weight is "[8, 4] torch.float32'),
    ],
)
def test_ranks_that_would_build_different_things_are_refused_on_all_of_them(layouts, widths, words):
    """Before they wait for each other in different collectives."""
    for found in run_ranks(losses_of, layouts, widths, num_ranks=2):
        assert words in found

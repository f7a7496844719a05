from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rotorch._torch_private import group_timeout
from rotorch.comm.transports.message_ring import message_group
from rotorch.comm.transports.peer_memory import OVERLAPPING
from rotorch.core.errors import ConfigError
from rotorch.mesh import local_gpu, make_mesh
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


@pytest.mark.parametrize(
    ("local_rank", "count", "shared", "index"),
    [(0, 1, False, 0), (3, 4, False, 3), (5, 1, False, 0), (5, 4, True, 1), (4, 4, False, None), (5, 2, False, None)],
)
def test_ranks_take_the_gpu_of_their_number_or_the_only_one_that_they_see(
    monkeypatch, local_rank, count, shared, index
):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv(OVERLAPPING, str(int(shared)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if index is not None:
        assert local_gpu() == torch.device("cuda", index)
        return
    with pytest.raises(
        ConfigError, match=rf"LOCAL_RANK = {local_rank}, and torch sees {count} GPUs .*--nproc-per-node"
    ):
        local_gpu()


def bound_device_when_a_group_is_made():
    """The default group's device while a ring's group is made, and behind it."""
    world, seen, made = dist.group.WORLD, [], dist.new_group
    world.bound_device_id = torch.device("cuda", 0)

    def new_group(*args, **kwargs):
        seen.append(world.bound_device_id)
        return made(*args, **kwargs)

    with mock.patch.object(dist, "new_group", new_group):
        group = message_group([2 * (dist.get_rank() // 2), 2 * (dist.get_rank() // 2) + 1], timeout_s=60)
    after, world.bound_device_id = world.bound_device_id, None
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return seen, after.type, float(total)


def test_groups_of_some_ranks_are_made_where_the_default_group_has_a_device():
    """NCCL would split that group's communicator, for which the other ranks do not come."""
    assert run_ranks(bound_device_when_a_group_is_made, num_ranks=4) == [([None], "cuda", 2.0)] * 4

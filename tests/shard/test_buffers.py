import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.collectives import all_reduce_sum
from rotorch.shard.buffers import WrittenBuffers
from rotorch.testing.ranks import run_ranks


def statistics():
    """Rank 0 alone writes the first norm, both write the second, nobody the third."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3))
    buffers = WrittenBuffers(module)
    buffers.start()
    mine = torch.full((3,), float(4 + 2 * dist.get_rank()))
    if dist.get_rank() == 0:
        module[0].running_mean.copy_(mine)
    module[1].running_mean.copy_(mine)
    buffers.even_out(all_reduce_sum(buffers.written(), mesh=mesh), mesh=mesh)
    return [norm.running_mean.tolist() for norm in module]


def test_those_who_have_written_a_buffer_decide_what_it_is():
    assert run_ranks(statistics, num_ranks=2) == [[[4.0] * 3, [5.0] * 3, [0.0] * 3]] * 2


def versions():
    """By how much the version of a buffer rises that torch's norm wrote, and of one that a module of its own wrote."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2))
    buffers = WrittenBuffers(module)
    buffers.start()
    module[0](torch.randn(4, 3) + dist.get_rank())
    module[1].running_mean.add_(1.0)
    before = [norm.running_mean._version for norm in module]
    buffers.even_out(all_reduce_sum(buffers.written(), mesh=mesh), mesh=mesh)
    return [norm.running_mean._version - was for norm, was in zip(module, before, strict=True)]


def test_a_mean_is_hidden_from_a_backward_only_if_what_it_replaces_was():
    assert run_ranks(versions, num_ranks=2) == [[0, 1]] * 2

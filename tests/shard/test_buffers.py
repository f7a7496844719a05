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

"""Blocks in rows over the depth of a grid, on one rank whose lines are played."""

import torch
from torch import nn

from rotorch.core.spec import Weight
from rotorch.hold.gathered_blocks import GatheredBlocks
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.mesh import make_mesh
from rotorch.shard.sites import find_sites
from rotorch.strategies import parse_parallel
from rotorch.testing.fake import as_rank


class PlayedLine:
    """A line whose other ranks have the same tensors."""

    def __init__(self, axis, size):
        self.axis, self.size, self.position = axis, size, 0

    def all_reduce(self, x):
        return x.mul_(self.size)

    def all_gather(self, x):
        return x.repeat(self.size)

    def reduce_scatter(self, x):
        return x.view(self.size, -1)[0] * self.size


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.scale = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.tensor(2.0))


def test_gradients_are_summed_over_the_depth_and_every_other_line():
    module = Scaled()
    depth, across = PlayedLine("z", 2), PlayedLine("x", 5)
    weights = [Weight("rows", (4, 3), 4), Weight("scale", (), 4)]
    with as_rank(0, num_ranks=2):
        mesh = make_mesh(parse_parallel("ddp=2"), device=torch.device("cpu"))
        memory = GatheredBlocks(
            [ShardPlacement.whole(weight, mesh=mesh) for weight in weights],
            depth=depth,
            sums={weight.name: (depth, across) for weight in weights},
        )
        placements, sites = memory.placements(mesh=mesh), find_sites(module)
        shards = ShardedWeights(placements, sites=sites, mesh=mesh, device=torch.device("cpu"), memory=memory)
        shards.start()
        shards.leaves["rows"].grad, shards.leaves["scale"].grad = torch.full((4, 3), 3.0), torch.tensor(7.0)
        shards.finish()
        assert torch.equal(shards.held["rows"].local_grad, torch.full((2, 3), 3.0 * 2 * 5))
        assert torch.equal(shards.held["scale"].local_grad, torch.tensor(7.0 * 2 * 5))

"""Inputs and outputs of modules that are cut, on one rank whose axis group is faked."""

from dataclasses import dataclass

import pytest
import torch

from rotorch.ops.conjugates import PartlySyncedRegion, scatter_to_region


@dataclass
class AsIfAllWereAlike:
    """A line whose other ranks have the same tensors."""

    size: int
    position: int = 0

    def all_reduce(self, x):
        return x.mul_(self.size)

    def all_gather(self, x):
        return torch.cat([x] * self.size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_own_channels_are_as_large_as_a_sum_of_independent_parts(size):
    region = PartlySyncedRegion(AsIfAllWereAlike(size), num_synced=lambda features: features - 2)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    factor = torch.tensor([size] * 3 + [size**0.5] * 2, dtype=torch.float64)
    y = region.leave(region.enter(x))
    torch.testing.assert_close(y, x * factor)
    weights = torch.randn(3, 5, dtype=torch.float64)
    (y * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights * factor)


@pytest.mark.parametrize(("shape", "dim"), [((4, 3), 0), ((1, 4, 3), 1), ((2, 4, 3), 1)])
def test_a_shard_has_memory_of_its_own(shape, dim):
    """So the whole tensor can be freed, and a layer may write to its part as it may to any activation."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    shard = scatter_to_region(x, dim=dim, lengths=(2, 2), axis_group=AsIfAllWereAlike(2, position=1))
    torch.testing.assert_close(shard, x.chunk(2, dim=dim)[1])
    assert shard.is_contiguous()
    assert shard.untyped_storage().nbytes() == shard.nbytes
    shard.mul_(2.0)
    shard.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))

"""Inputs and outputs of modules that are cut, on one rank whose axis group is faked."""

from dataclasses import dataclass

import pytest
import torch

from rotorch.ops.conjugates import PartlySyncedRegion


@dataclass
class AsIfAllWereAlike:
    """A line whose other ranks have the same tensors."""

    size: int

    def all_reduce(self, x):
        return x.mul_(self.size)


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

"""A look at the values that ranks were given for a model's weights: each rank keeps its own part of its own.

Models that ranks build for themselves have equal values only if every rank's generator was seeded alike. If they have
not, the parallel model is sewn of several, and replicas stay different; torch's DDP sends the first rank's values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.checksums import differ, sum_by_place, with_squares
from rotorch.comm.collectives import all_reduce_sum

_MOST_ELEMENTS = 1024
"""Number of elements of each weight that are looked at: random values differ in all of them."""

_MOST = 2**24
"""Largest number made of values; squares of such numbers are summed over ranks in 64 bits."""


@torch.no_grad()
def first_that_differs(module: nn.Module, *, mesh: DeviceMesh) -> str | None:
    """Name of the first weight or buffer that has different values on the ranks; None if there is none. All ranks.

    Args:
        module: before its weights are cut; on every rank the same weights are on meta.
        mesh: of all ranks.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    given = {name: tensor for name, tensor in named if not tensor.is_meta}
    if mesh.size() == 1 or not given:
        return None
    numbers = torch.stack([_number_of(weight) for weight in given.values()]).tolist()
    if not any(_differ([_bounded(sum(numbers))], mesh=mesh)):
        return None
    bounded = [_bounded(number) for number in numbers]
    return next((name for name, differs in zip(given, _differ(bounded, mesh=mesh), strict=True) if differs), None)


def _number_of(weight: Tensor) -> Tensor:
    """A number of the first elements, which depends on their bits and their places."""
    real = torch.view_as_real(weight) if weight.is_complex() else weight
    return sum_by_place(real.detach().flatten()[:_MOST_ELEMENTS].contiguous().view(torch.uint8).to(torch.int64))


def _bounded(number: int) -> int:
    """A number of at least 1, so that no rank takes the sum of several for its own."""
    return number % _MOST + 1


def _differ(numbers: list[int], *, mesh: DeviceMesh) -> list[bool]:
    """True for each number that is not equal on all ranks; False for all where the other ranks are faked."""
    sums = all_reduce_sum(torch.tensor(with_squares(numbers)), mesh=mesh).tolist()
    return [False] * len(numbers) if sums[0] == numbers[0] else differ(sums, num_ranks=mesh.size())

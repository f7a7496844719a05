"""How the slices of one unit lie in flat buffers, so that a slice is one message and one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rotorch.core.spec import Weight


@dataclass(frozen=True)
class FlatSlices:
    """Slice k of a unit: the slices of its weights, one after another, without gaps.

    Attributes:
        weights: the unit's cut weights, all of one dtype.
        num_slices: how many slices there are.
    """

    weights: tuple[Weight, ...]
    num_slices: int

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """Shapes of the weights' parts in slice `index`."""
        return [w.slice_shape(num_slices=self.num_slices, index=index) for w in self.weights]

    def numel(self, index: int) -> int:
        """Number of elements of slice `index`."""
        return sum(math.prod(shape) for shape in self.shapes(index))

    def views(self, flat: Tensor, *, index: int) -> list[Tensor]:
        """Returns the weights' parts as views of `flat` [numel(index)]."""
        return split_flat(flat, self.shapes(index))


def split_flat(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns consecutive parts of a flat tensor as views of the given shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

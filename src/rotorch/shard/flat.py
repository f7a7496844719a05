"""Layout of one unit's slices in flat buffers, so that a slice is one message and one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rotorch.core.spec import Weight


class FlatSlices:
    """Slice k of a unit: the slices of its weights, one after another, without gaps.

    Args:
        weights: the unit's cut weights, all of one dtype.
        num_slices: number of slices.
        side_by_side: a matrix that is alone in its unit and cut along its last dim lies transposed, so that its slices
            one after another are the whole (transposed) matrix.

    Attributes:
        weights: the unit's cut weights, all of one dtype.
        num_slices: number of slices.
        shapes: `shapes[k]`: shapes of the weights' parts in slice k.
        numels: `numels[k]`: number of elements of slice k.
    """

    def __init__(self, weights: Sequence[Weight], *, num_slices: int, side_by_side: bool = False) -> None:
        self.weights = tuple(weights)
        self.num_slices = num_slices
        self.shapes = [[w.slice_shape(num_slices=num_slices, index=k) for w in weights] for k in range(num_slices)]
        self.numels = [sum(map(math.prod, shapes)) for shapes in self.shapes]
        alone = side_by_side and len(weights) == 1
        self._transposed = [alone and w.cut is not None and w.cut.dim == 1 == len(w.shape) - 1 for w in weights]
        self._splits = [[math.prod(shape) for shape in shapes] for shapes in self.shapes]

    def views(self, flat: Tensor, *, index: int) -> list[Tensor]:
        """Returns the weights' parts in slice `index` as views of `flat` [numels[index]]."""
        parts = flat.split(self._splits[index])
        return [
            part.view(shape[::-1]).t() if transposed else part.view(shape)
            for part, shape, transposed in zip(parts, self.shapes[index], self._transposed, strict=True)
        ]

    def whole(self, flat: Tensor) -> Tensor | None:
        """Returns the one weight, whole, as a view of all its slices one after another; None if they do not form it.

        Args:
            flat: all slices, [sum(numels)].
        """
        if len(self.weights) != 1 or not can_lie_side_by_side(self.weights[0]):
            return None
        (weight,), (transposed,) = self.weights, self._transposed
        if transposed:
            return flat.view(weight.shape[::-1]).t()
        return flat.view(weight.shape) if weight.cut is not None and weight.cut.dim == 0 else None


def can_lie_side_by_side(weight: Weight) -> bool:
    """Returns True if a weight's slices, one after another, can form it: each is one range of the first or last dim."""
    if weight.cut is None or weight.cut.blocks > 1:
        return False
    return weight.cut.dim == 0 or weight.cut.dim == 1 == len(weight.shape) - 1

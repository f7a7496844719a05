"""How the slices of one unit lie in flat buffers, so that a slice is one message and one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rotorch.core.spec import Weight


class FlatSlices:
    """Slice k of a unit: the slices of its weights, one after another, without gaps.

    Attributes:
        weights: the unit's cut weights, all of one dtype.
        num_slices: how many slices there are.
        shapes: `shapes[k]`: shapes of the weights' parts in slice k.
        numels: `numels[k]`: number of elements of slice k.
    """

    def __init__(self, weights: Sequence[Weight], *, num_slices: int) -> None:
        self.weights = tuple(weights)
        self.num_slices = num_slices
        self.shapes = [[w.slice_shape(num_slices=num_slices, index=k) for w in weights] for k in range(num_slices)]
        self.numels = [sum(map(math.prod, shapes)) for shapes in self.shapes]
        self._splits = [[math.prod(shape) for shape in shapes] for shapes in self.shapes]

    def views(self, flat: Tensor, *, index: int) -> list[Tensor]:
        """Returns the weights' parts in slice `index` as views of `flat` [numels[index]]."""
        parts = flat.split(self._splits[index])
        return [part.view(shape) for part, shape in zip(parts, self.shapes[index], strict=True)]

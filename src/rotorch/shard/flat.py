"""Layout of one unit's slices in flat buffers, so that a slice is one message and one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rotorch.comm.transports.groups import FlatChunk
from rotorch.core.row_parts import RowParts
from rotorch.core.spec import Range, Weight
from rotorch.shard.sharded_weight import Chunk, cut_chunks


class FlatSlices:
    """Visit k of a unit: the slices that visit together, of each weight, one weight after another, without gaps.

    Args:
        weights: the unit's cut weights, all of one dtype.
        num_slices: number of slices.
        num_visits: number of visits in which they come; a divisor of `num_slices`, by default that itself.
        side_by_side: a matrix that is alone in its unit and cut along its last dim lies transposed, so that its slices
            one after another are the whole (transposed) matrix.
        cut_first: every weight lies with the dim first that it is cut along, so that slices one after another form a
            larger slice.

    Attributes:
        weights: the unit's cut weights, all of one dtype.
        num_slices: number of slices.
        num_visits: number of visits.
        per_visit: slices that come together.
        home: layout of one slice, as it lies at home; this one if each visit brings one slice.
        shapes: `shapes[k]`: shapes of the weights' parts in visit k.
        numels: `numels[k]`: number of elements of visit k.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        num_slices: int,
        num_visits: int | None = None,
        side_by_side: bool = False,
        cut_first: bool = False,
    ) -> None:
        self.weights = tuple(weights)
        self.num_slices, self.num_visits = num_slices, num_visits or num_slices
        self.per_visit = m = num_slices // self.num_visits
        self.shapes = [
            [w.slice_shape(num_slices=num_slices, index=k * m, count=m) for w in weights]
            for k in range(self.num_visits)
        ]
        self.numels = [sum(map(math.prod, shapes)) for shapes in self.shapes]
        alone = side_by_side and len(weights) == 1
        self._first = [
            w.cut.dim if w.cut is not None and (cut_first or (alone and w.cut.dim == 1 == len(w.shape) - 1)) else 0
            for w in weights
        ]
        self._splits = [[math.prod(shape) for shape in shapes] for shapes in self.shapes]
        self.home = self if m == 1 else FlatSlices(weights, num_slices=num_slices, cut_first=cut_first)

    def in_parts(self, parts: RowParts | None) -> list[FlatSlices]:
        """Returns the parts of a table's slices, in the order in which they lie at home; [self] without `parts`."""
        return [self] if parts is None else [_Part(self, parts, number) for number in range(parts.count)]

    def ranges(self, weight: Weight, *, index: int) -> tuple[Range, ...]:
        """Returns the ranges along its cut dim that visit `index` has of a weight, one per block of its cut."""
        if weight.cut is None:
            raise AssertionError(f"{weight.name} is not cut")
        m, size = self.per_visit, weight.shape[weight.cut.dim]
        return weight.cut.ranges(size, num_slices=self.num_slices, index=index * m, count=m)

    def chunks(self, weight: Weight, *, index: int) -> tuple[Chunk, ...]:
        """Returns the chunks of visit `index` of a weight."""
        return cut_chunks(weight, num_slices=self.num_slices, index=index * self.per_visit, count=self.per_visit)

    def views(self, flat: Tensor, *, index: int) -> list[Tensor]:
        """Returns the weights' parts in visit `index` as views of `flat` [numels[index]]."""
        return [
            part.view(shape) if not dim else part.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)
            for part, shape, dim in zip(flat.split(self._splits[index]), self.shapes[index], self._first, strict=True)
        ]

    def flat_chunks(self, index: int) -> list[FlatChunk]:
        """Returns where the elements of slice `index` lie at home and in its visit; of weights with `cut_first`."""
        if self.per_visit == 1:
            return [FlatChunk(0, 0, self.numels[index])]
        visit, found, home_start, visit_start = index // self.per_visit, [], 0, 0
        for weight, split in zip(self.weights, self._splits[visit], strict=True):
            if weight.cut is None:
                raise AssertionError(f"{weight.name} is not cut")
            size = weight.shape[weight.cut.dim]
            row = math.prod(weight.shape) // size
            block_start = visit_start
            own = weight.cut.ranges(size, num_slices=self.num_slices, index=index)
            for mine, all_of_visit in zip(own, self.ranges(weight, index=visit), strict=True):
                numel = mine.length * row
                if numel:
                    found.append(FlatChunk(home_start, block_start + (mine.start - all_of_visit.start) * row, numel))
                home_start += numel
                block_start += all_of_visit.length * row
            visit_start += split
        return found

    def whole(self, flat: Tensor) -> Tensor | None:
        """Returns the one weight, whole, as a view of all its slices one after another; None if they do not form it.

        Args:
            flat: all slices, [sum(numels)].
        """
        if len(self.weights) != 1 or not can_lie_side_by_side(self.weights[0]):
            return None
        (weight,), (first,) = self.weights, self._first
        if first:
            return flat.view(weight.shape[::-1]).t()
        return flat.view(weight.shape) if weight.cut is not None and weight.cut.dim == 0 else None


class _Part(FlatSlices):
    """Part `number` of every slice of a table."""

    def __init__(self, whole: FlatSlices, parts: RowParts, number: int) -> None:
        (weight,) = whole.weights
        super().__init__(whole.weights, num_slices=whole.num_slices)
        self._rows = [parts.of(whole.ranges(weight, index=k)[0])[number] for k in range(whole.num_slices)]
        self.shapes = [[(rows.length, *weight.shape[1:])] for rows in self._rows]
        self.numels = [math.prod(shape) for (shape,) in self.shapes]
        self._splits = [[numel] for numel in self.numels]

    def ranges(self, weight: Weight, *, index: int) -> tuple[Range, ...]:
        return (self._rows[index],)

    def chunks(self, weight: Weight, *, index: int) -> tuple[Chunk, ...]:
        rows, rest = self._rows[index], weight.shape[1:]
        return (Chunk((rows.start, *(0 for _ in rest)), (rows.length, *rest)),)


def can_lie_side_by_side(weight: Weight) -> bool:
    """Returns True if a weight's slices, one after another, can form it: each is one range of the first or last dim."""
    if weight.cut is None or weight.cut.blocks > 1:
        return False
    return weight.cut.dim == 0 or weight.cut.dim == 1 == len(weight.shape) - 1

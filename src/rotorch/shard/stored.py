"""Tensors in a file: their shapes are known, and any box of one can be read without the rest of it.

A checkpoint's tensors often have other names and cuts than the model's weights: experts one by one where the model
stacks them, two matrices that are one in the model. `Stacked` and `Joined` combine such parts and read only the box
that is asked for. Values go straight to their destination: no tensor lies in memory twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

Box = tuple[range, ...]
"""One range of indices per dim, each with step 1."""


class Stored(ABC):
    """One tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        dtype: in which it is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read(self, box: Box, *, out: Tensor) -> None:
        """Writes the values of a box to `out`, a tensor of the box's shape, converted to its dtype."""

    @property
    def whole(self) -> Box:
        """The box that is all of it."""
        return tuple(range(size) for size in self.shape)

    def read_whole(self) -> Tensor:
        """Returns all of it as a tensor of its own."""
        made = torch.empty(self.shape, dtype=self.dtype)
        self.read(self.whole, out=made)
        return made


def kind_of(dtype: torch.dtype) -> str:
    """The kind of number that a dtype is for: "real", "complex", "whole" (bools too), or "packed" (no number each)."""
    if dtype.is_complex:
        return "complex"
    if dtype in _PACKED:
        return "packed"
    return "real" if dtype.is_floating_point else "whole"


_PACKED = {torch.float4_e2m1fn_x2, torch.float8_e8m0fnu}
"""Two values in one element, and exponents that other tensors are scaled by: parts of a quantised weight."""


def _dtype_of_all(parts: Sequence[Stored]) -> torch.dtype:
    """The widest dtype among the parts; one that is not for real numbers if any part has one, so that it is noticed."""
    dtypes = [part.dtype for part in parts]
    return next((d for d in dtypes if kind_of(d) != "real"), max(dtypes, key=lambda d: d.itemsize))


@final
class Stacked(Stored):
    """Parts of one shape as one tensor with a further dim; `read` opens only the parts that the box meets."""

    def __init__(self, parts: Sequence[Stored], *, dim: int) -> None:
        self._parts, self._dim = tuple(parts), dim
        shape = parts[0].shape
        if any(part.shape != shape for part in parts):
            raise ValueError(f"parts of different shapes: {sorted({part.shape for part in parts})}")
        self.shape, self.dtype = (*shape[:dim], len(parts), *shape[dim:]), _dtype_of_all(parts)

    def read(self, box: Box, *, out: Tensor) -> None:
        inner = (*box[: self._dim], *box[self._dim + 1 :])
        for place, number in enumerate(box[self._dim]):
            self._parts[number].read(inner, out=out.select(self._dim, place))


@final
class Joined(Stored):
    """Parts side by side along one dim; `read` opens only the parts that the box meets."""

    def __init__(self, parts: Sequence[Stored], *, dim: int) -> None:
        self._parts, self._dim = tuple(parts), dim
        rest = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(rest) > 1:
            raise ValueError(f"parts that do not fit side by side: {sorted(part.shape for part in parts)}")
        first = parts[0].shape
        self.shape = (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])
        self.dtype = _dtype_of_all(parts)

    def read(self, box: Box, *, out: Tensor) -> None:
        wanted, start = box[self._dim], 0
        for part in self._parts:
            stop = start + part.shape[self._dim]
            first, last = max(wanted.start, start), min(wanted.stop, stop)
            if first < last:
                inner = (*box[: self._dim], range(first - start, last - start), *box[self._dim + 1 :])
                part.read(inner, out=out.narrow(self._dim, first - wanted.start, last - first))
            start = stop


@final
class Computed(Stored):
    """A tensor that only exists whole: each `read` makes all of it and cuts the box out."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], Tensor]) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._make = make

    def read(self, box: Box, *, out: Tensor) -> None:
        made = self._make()
        for dim, part in enumerate(box):
            made = made.narrow(dim, part.start, len(part))
        out.copy_(made)

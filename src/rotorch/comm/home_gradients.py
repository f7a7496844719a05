"""Gradients of this rank's own slices, in memory that comes with a backward or, where other ranks map it, stays.

[Note: memory that comes]
    When backward begins, activations are at their most and no gradient is there yet; when it ends, it is the other way
    round. So the gradients of a unit get memory when the first backward of a step comes to it, and a step that finds
    all of them cleared gives it up. Frozen units never have any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

from torch import Tensor


class HomeGradients(ABC):
    """Per item the gradient of this rank's own slice, flat."""

    stays: ClassVar[bool]
    """True if a gradient lies in the same memory in every step."""

    @abstractmethod
    def __getitem__(self, item: int) -> Tensor:
        """The gradient; holds any values if this step has written none yet."""

    def come(self, item: int) -> None:
        """Makes a gradient's memory now, if it is not there yet."""
        self[item]

    @abstractmethod
    def give_up(self, items: Iterable[int]) -> None:
        """Leaves the memory of some items to those who still refer to it, if it does not stay."""

    def side_by_side(self, items: Iterable[int]) -> list[Tensor]:
        """The gradients of some items, those of neighbours in one piece of memory as one; there may be gaps in it."""
        found: list[Tensor] = []
        before = None
        for item in sorted(items):
            gradient = self[item]
            if before == item - 1 and _share_memory(found[-1], gradient):
                stop = gradient.storage_offset() + gradient.numel()
                found[-1] = found[-1].as_strided((stop - found[-1].storage_offset(),), (1,))
            else:
                found.append(gradient)
            before = item
        return found


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


class StayingGradients(HomeGradients):
    """In memory that is there for the life of the ring.

    Args:
        gradients: of each item.
    """

    stays = True

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._gradients = gradients

    def __getitem__(self, item: int) -> Tensor:
        return self._gradients[item]

    def give_up(self, items: Iterable[int]) -> None:
        return None


class ComingGradients(HomeGradients):
    """In memory of their own (see [Note: memory that comes]).

    Args:
        numels: elements of each item.
        later_parts: items that follow the one before in its memory (`RingSetup.later_parts`). Such neighbours are given
            up together.
        make: makes memory of so many elements.
    """

    stays = False

    def __init__(self, numels: Sequence[int], *, later_parts: Collection[int], make: Callable[[int], Tensor]) -> None:
        self._numels, self._make = numels, make
        self._neighbours: list[range] = []
        """Per item: those in the same memory."""
        for item in range(len(numels)):
            first = self._neighbours[-1].start if item in later_parts else item
            self._neighbours[first:] = [range(first, item + 1)] * (item + 1 - first)
        self._there: dict[int, Tensor] = {}

    def __getitem__(self, item: int) -> Tensor:
        if item not in self._there:
            together = self._neighbours[item]
            numels = [self._numels[each] for each in together]
            self._there |= zip(together, self._make(sum(numels)).split(numels), strict=True)
        return self._there[item]

    def give_up(self, items: Iterable[int]) -> None:
        for item in items:
            for each in self._neighbours[item]:
                self._there.pop(each, None)

"""Slices that visit together: which ones, in what order, and where their elements lie.

[Note: groups]
    Of n ranks each n/g neighbours are a group; a pass has g visits. In each, all slices of one group come at once, from
    each rank of that group its own, and lie side by side: the elements of one weight next to each other, so that
    products see one larger slice. The order of groups is that of slices on a ring of g. Each item has a number of
    visits of its own: small items come in few (core/visits_by_size.py). A slice that comes by itself is a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rotorch.comm.ring import orders


class FlatChunk(NamedTuple):
    """A run of elements of a slice, at home and among all slices of its visit."""

    home: int
    visit: int
    numel: int

    def at_home(self, flat: Tensor) -> Tensor:
        """Returns its elements of a home slice."""
        return flat[self.home : self.home + self.numel]

    def in_visit(self, flat: Tensor) -> Tensor:
        """Returns its elements of a visit."""
        return flat[self.visit : self.visit + self.numel]


@dataclass(frozen=True)
class Groups:
    """The groups of an item's slices, as one rank sees them.

    Attributes:
        count: groups, and visits of a pass.
        per_visit: slices of a group.
        position: of the rank.
        own: its group.
        forward, backward: orders of groups.
        numels: elements of each visit.
        room: elements that any visit has room in, and a rank's own slice once for each rank of its group.
        chunks: of each slice, the runs of its elements.
    """

    count: int
    per_visit: int
    position: int
    own: int
    forward: Sequence[int]
    backward: Sequence[int]
    numels: Sequence[int]
    room: int
    chunks: Sequence[Sequence[FlatChunk]]

    @classmethod
    def of(
        cls, numels: Sequence[int], *, count: int, position: int, chunks: Sequence[Sequence[FlatChunk]] | None = None
    ) -> Groups:
        """Makes the groups of an item.

        Args:
            numels: elements of each slice.
            count: groups; it divides the number of slices.
            position: of the rank.
            chunks: of each slice; not needed for groups of one.
        """
        per_visit = len(numels) // count
        own = position // per_visit
        forward, backward = orders(own, size=count)
        visits = [sum(numels[k * per_visit : (k + 1) * per_visit]) for k in range(count)]
        if chunks is None:
            chunks = [[FlatChunk(0, 0, numel)] for numel in numels]
        return cls(count, per_visit, position, own, forward, backward, visits, per_visit * max(numels), chunks)

    def order(self, *, backward: bool) -> Sequence[int]:
        """Returns the rank's order of groups in a pass."""
        return self.backward if backward else self.forward

    def ranks(self, group: int) -> range:
        """Returns the ranks of a group."""
        return range(group * self.per_visit, (group + 1) * self.per_visit)

    @property
    def neighbours(self) -> list[int]:
        """The other ranks of the rank's group."""
        return [rank for rank in self.ranks(self.own) if rank != self.position]

    def place_at(self, neighbour: int) -> int:
        """Returns the rank's number among the neighbours of one of its neighbours."""
        return self.position - self.own * self.per_visit - (self.position > neighbour)

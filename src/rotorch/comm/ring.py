"""The ring: one interface for slices of weights going round and gradients riding home, whatever carries them.

[Note: pull]
    Within a step weights are read-only, so slice k is not handed from rank to rank: everybody takes it from its home.
    Order, volume and buffers are those of a rotation, each home serves one reader at a time, nothing waits for a
    chain, and the weights never leave home. Only gradients hop from neighbour to neighbour, because they add up on
    the way.

[Note: precision]
    Slices at home and all gradients have the ring's `dtype`. Visiting slices may have another one, `wire_dtype`, in
    which they are computed with: float32 at home, bfloat16 on the way. Then this rank's own slice too passes through a
    buffer, since a second copy of it that stays would take half as much memory again.

Order of visits on rank r of n: forward (r - i) mod n, own slice first; backward (r + 1 + j) mod n, own slice last, so
that the gradient of slice k is touched by ranks k-1, k-2, ..., k in this order and is complete when its home has
added its part.

Every rank of the ring must make the same sequence of `start`, `visits` and `finish` calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rotorch.comm.status_word import Operation, StatusWord, at


class Visit(NamedTuple):
    """One slice passing by.

    Attributes:
        index: which slice.
        weights: the slice, flat; only valid until the next visit. None if it was not asked for.
        step: how many visits of this pass came before.
        turn: over shared memory, the turn in which this rank adds to the slice's gradient.
        fresh: over shared memory, whether the slice's gradient holds nothing when that turn comes.
    """

    index: int
    weights: Tensor | None
    step: int
    turn: int = 0
    fresh: bool = False


class GradientBuffer(NamedTuple):
    """The travelling gradient of one slice.

    Attributes:
        flat: the buffer, flat.
        fresh: it holds nothing yet: write instead of adding.
    """

    flat: Tensor
    fresh: bool


class DeferredAdd(Protocol):
    """An addition to a gradient; returns whether it was made, which it is if told to wait."""

    def __call__(self, *, wait: bool) -> bool: ...


class Ring(ABC):
    """One rank's place on a ring of `size` ranks, holding one slice of each of several items.

    Args:
        size: ranks on the ring.
        position: this rank's.
        numels: elements of each slice: `numels[item][index]`.
        dtype: of all slices at home and of gradients.
        wire_dtype: of visiting slices, if it is another one (see [Note: precision]).
    """

    moves_weights: bool
    """Whether slices pass through buffers that are used again; then nothing may keep a view of one."""

    defers_adds: bool
    """Whether a rank may add its part to a gradient later than in its visit (see `defer`)."""

    gives_whole: bool = False
    """Whether an item's slices lie side by side where every rank can read them (`whole_weights`)."""

    name: str
    """Of the transport, for `doctor` and reports."""

    def __init__(
        self,
        *,
        size: int,
        position: int,
        numels: Sequence[Sequence[int]],
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.size = size
        self.position = position
        self.numels = [tuple(n) for n in numels]
        self.dtype = dtype
        self.wire_dtype = wire_dtype or dtype
        self.fresh = [True] * len(self.numels)
        """Per item: whether nothing has been added to its gradients in this step."""
        self._deferred: list[DeferredAdd] = []
        self.status = StatusWord()
        """Where it writes down which slice of which item this rank is at."""
        self._ranks = list(range(size))
        self._forward_order = [(position - i) % size for i in range(size)]
        self._backward_order = [(position + 1 + j) % size for j in range(size)]

    def write_status_to(self, status: StatusWord, *, ranks: Sequence[int]) -> None:
        """From now on writes down on `status` where this rank is; `ranks` are those of the ring, by position."""
        self.status, self._ranks = status, list(ranks)

    def _mark_wait(self, operation: Operation, item: int, index: int, *, source: int) -> None:
        """This rank is about to wait for a slice, or its gradient, from the rank at position `source`."""
        self.status.peer = self._ranks[source] + 1
        self.status.now = at(operation, unit=item, part=index)

    @abstractmethod
    def home_weights(self, item: int) -> Tensor:
        """This rank's own slice of an item, flat; valid for the life of the ring."""

    def whole_weights(self, item: int) -> Tensor | None:
        """All slices of an item one after another, flat, where every rank can read them in place; None if it cannot."""
        return None

    @abstractmethod
    def home_gradients(self, item: int) -> Tensor:
        """The gradient of this rank's own slice, flat; complete after `finish`."""

    @property
    @abstractmethod
    def all_home_gradients(self) -> Tensor:
        """The gradients of all items as one flat tensor."""

    def start(self, *, fresh: Sequence[bool]) -> None:
        """Begins a step.

        `fresh[item]`: overwrite its gradient instead of adding to it. The caller has made sure that all ranks are
        here.
        """
        self.fresh = list(fresh)
        self._deferred = []

    @abstractmethod
    def visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        """Yields the slices of an item in this rank's order. With `fetch=False` without their weights."""

    @abstractmethod
    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        """Where the gradient of the slice visiting in backward adds up, once all ranks before this one have added.

        Returns None if they have not and `wait` is false. After adding, `pass_on` is due.
        """

    @abstractmethod
    def pass_on(self, item: int, visit: Visit) -> None:
        """This rank has added its part to `gradient(item, visit)`: sends it on its way."""

    @torch.no_grad()
    def defer(self, addition: DeferredAdd, *, at_most: int = 1) -> None:
        """Notes an addition to a gradient for which the ranks before this one were not ready.

        Makes those noted before that have become possible, and waits for the oldest if more than `at_most` are left:
        what they are made from stays in memory until then.
        """
        self.flush_ready()
        self._deferred.append(addition)
        while len(self._deferred) > at_most:
            self._deferred.pop(0)(wait=True)

    def flush_ready(self) -> None:
        """Makes those of the noted additions that have become possible: other ranks may be waiting for them."""
        if self._deferred:
            with torch.no_grad():
                self._deferred = [addition for addition in self._deferred if not addition(wait=False)]

    @torch.no_grad()
    def flush(self) -> None:
        """Makes what `defer` noted, waiting if need be."""
        late, self._deferred = self._deferred, []
        for addition in late:
            addition(wait=True)

    def finish(self) -> None:
        """Ends a step: everything sent has left, everything due has come."""
        self.flush()

    def stays(self, visit: Visit) -> bool:
        """Whether the memory of a visit's weights holds them for the rest of the step, so that views may be kept."""
        return not self.moves_weights or (visit.index == self.position and self.wire_dtype == self.dtype)

    def restore_owners(self, *, after: BaseException | None = None) -> None:
        """After a pass: slices that it has moved away return. All ranks.

        Args:
            after: what broke the pass off, if anything did. Then the ranks first find out whether all of them have
                come here from the same place; only then slices can return.

        Raises:
            RankFailure: slices cannot return, since not all ranks are here. The ring is of no use any more.
        """
        return None

    def slots(self) -> list[Tensor]:
        """The buffers that visiting slices and their gradients pass through, for the memory ledger."""
        return []

    def close(self) -> None:
        """Gives memory back."""
        return None

    def order(self, *, backward: bool) -> list[int]:
        """This rank's order of slices."""
        return self._backward_order if backward else self._forward_order

"""The ring: one interface for rotating slices of weights and for gradients on their way home, over any transport.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.checksums import cancelling
from rotorch.comm.home_gradients import HomeGradients
from rotorch.comm.status_word import Operation, StatusWord, at

ORDER_MODULUS = 2**31
"""Of `Ring.order_hash`: sums over a million ranks are exact in float64."""


class Visit(NamedTuple):
    """One visit of a slice.

    Attributes:
        index: number of the slice.
        weights: the slice, flat; only valid until the next visit. None if it was not asked for.
        number: of the visit in this pass, from 0.
        turn: over shared memory, the turn in which this rank adds to the slice's gradient.
        fresh: over shared memory, True if the slice's gradient holds nothing when that turn comes.
    """

    index: int
    weights: Tensor | None
    number: int
    turn: int = 0
    fresh: bool = False


class GradientBuffer(NamedTuple):
    """The travelling gradient of one slice.

    Attributes:
        flat: the buffer, flat.
        fresh: it holds nothing yet: write instead of adding.
        stays: its memory is there for the life of the ring, so that views of it may be kept.
    """

    flat: Tensor
    fresh: bool
    stays: bool


class DeferredAdd(Protocol):
    """An addition to a gradient; returns True if it was made, which is certain with `wait=True`."""

    def __call__(self, *, wait: bool) -> bool: ...


@dataclass(frozen=True)
class RingSetup:
    """A ring's ranks and slices: the argument of every transport.

    Attributes:
        mesh: the ring's ranks.
        numels: elements of each slice, `numels[item][index]`.
        dtype: of all slices at home and of gradients.
        device: where slices lie.
        wire_dtype: of visiting slices, if it is another one (see [Note: precision]).
        hop_dtype: of gradients under way, if it is another one; transports that move none have no use for it.
        timeout_s: a rank that is later than this counts as gone.
        later_parts: items that are parts of the slice of which the item before has the part before: at home they begin
            where that one ends.
    """

    mesh: DeviceMesh
    numels: Sequence[Sequence[int]]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    wire_dtype: torch.dtype | None = None
    hop_dtype: torch.dtype | None = None
    timeout_s: float = 600.0
    later_parts: Collection[int] = ()


def orders(own: int, *, size: int) -> tuple[list[int], list[int]]:
    """Returns the orders of `size` slices in forward and in backward, for the rank whose own slice is `own`.

    Its own is first in forward and last in backward: it needs no fetch, and its gradient gets home complete.
    """
    return [(own - i) % size for i in range(size)], [(own + 1 + j) % size for j in range(size)]


class Ring(ABC):
    """One rank's position on a ring of `size` ranks, holding one slice of each of several items.

    A transport's constructor allocates the memory of this rank's own slices, and says where their gradients lie. All
    ranks of the mesh must make the ring together.
    """

    _home_weights: Sequence[Tensor]
    """This rank's own slice of each item; set by the transport."""

    _home_gradients: HomeGradients
    """The gradient of each of them; set by the transport."""

    moves_weights: bool
    """True if slices pass through buffers that are used again; then nothing may keep a view of one."""

    defers_adds: bool
    """True if a rank may add its part to a gradient later than in its visit (see `defer`)."""

    goes_by_order: bool = True
    """True if what comes is what the sender's order says: ranks must visit the same items in the same order."""

    gives_whole: bool = False
    """True if an item's slices lie side by side where every rank can read them (`whole_weights`)."""

    takes_parts: bool = False
    """True if parts of a table's slices are items of their own, which lie side by side at home."""

    num_hosts: int | None = None
    """Number of hosts, where the transport goes by them."""

    name: str
    """Name of the transport, for `doctor` and reports."""

    def __init__(self, setup: RingSetup) -> None:
        self.size = size = setup.mesh.size()
        self.position = position = setup.mesh.get_local_rank()
        self.numels = [tuple(n) for n in setup.numels]
        self.dtype = setup.dtype
        self.wire_dtype, self.hop_dtype = setup.wire_dtype or setup.dtype, setup.hop_dtype or setup.dtype
        self.fresh = [True] * len(self.numels)
        """Per item: True if nothing has been added to its gradients in this step."""
        self._deferred: list[DeferredAdd] = []
        self._begun, self._came_home = [0] * len(self.numels), [0] * len(self.numels)
        """Per item: backward passes of this step, and how many of them are home (see `is_home`)."""
        self.before_pass: Callable[[int, bool], None] | None = None
        """Called with an item before each of its passes; True: a backward."""
        self._first_rank = int(setup.mesh.mesh.flatten()[0])
        self._visited = 0
        self.status = StatusWord()
        """Status word that says which slice of which item this rank is at."""
        self._ranks = list(range(size))
        self._forward_order, self._backward_order = orders(position, size=size)

    def write_status_to(self, status: StatusWord, *, ranks: Sequence[int]) -> None:
        """Makes this rank write its position to `status` from now on; `ranks` are the ring's ranks, by position."""
        self.status, self._ranks = status, list(ranks)

    def _mark_wait(self, operation: Operation, item: int, index: int, *, source: int) -> None:
        """Records that this rank is about to wait for a slice, or its gradient, from the rank at position `source`."""
        # Before `now`, which announces the wait: a reader must not find the peer of an earlier one.
        self.status.peer = self._ranks[source] + 1
        self.status.now = at(operation, unit=item, part=index)

    @contextmanager
    def _awaiting_gradient(self, item: int, index: int, *, source: int) -> Iterator[None]:
        """Records within the block that this rank waits for a slice's gradient. An error leaves the record there."""
        here = self.status.now
        self._mark_wait(Operation.AWAIT_GRADIENT, item, index, source=source)
        yield
        self.status.now = here  # not after an error: the launcher reads what a rank that died has waited for

    @staticmethod
    def _at_slices(item: int, *, backward: bool) -> int:
        """The status word of an item's first slice; those of others follow."""
        return at(Operation.SLICE_BACKWARD if backward else Operation.SLICE_FORWARD, unit=item)

    @property
    def uncounted_bytes(self) -> int:
        """Memory of the device that this rank's ring has past torch's allocator."""
        return 0

    def home_weights(self, item: int) -> Tensor:
        """This rank's own slice of an item, flat; valid for the life of the ring."""
        return self._home_weights[item]

    def whole_weights(self, item: int) -> Tensor | None:
        """All slices of an item as one flat tensor that every rank can read in place; None without `gives_whole`."""
        return None

    def home_gradients(self, item: int) -> Tensor:
        """The gradient of this rank's own slice, flat; complete after `finish`. There from a backward on."""
        return self._home_gradients[item]

    def is_home(self, item: int) -> bool:
        """True if every rank's part of each backward pass of this step so far is in this rank's gradient of the item.

        On a GPU it is there for work on the stream of `behind_gradients`. Asked between passes.
        """
        return self._came_home[item] == self._begun[item]

    def behind_gradients(self) -> AbstractContextManager[Any]:
        """Makes the CUDA stream current on which additions to gradients run, if they have one of their own."""
        return nullcontext()

    def home_gradients_of(self, items: Iterable[int]) -> list[Tensor]:
        """The gradients of some items in as few flat tensors as possible; there may be gaps in one."""
        return self._home_gradients.side_by_side(items)

    @property
    def gradients_stay(self) -> bool:
        """True if home gradients lie in the same memory in every step; else in new memory after `start` was `fresh`."""
        return self._home_gradients.stays

    def start(self, *, fresh: Sequence[bool]) -> None:
        """Begins a step.

        `fresh[item]`: overwrite its gradient instead of adding to it. The caller has made sure that all ranks are
        here.
        """
        self.fresh, self._visited = list(fresh), 0
        self._home_gradients.give_up(item for item, cleared in enumerate(fresh) if cleared)
        # Left over from a step that broke off, whose gradients are not used.
        self._deferred = []
        self._begun, self._came_home = [0] * len(self.numels), [0] * len(self.numels)

    def visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        """Yields the slices of an item in this rank's order. With `fetch=False` without their weights."""
        # A hash, no sum: differences of several ranks must not cancel.
        self._visited = hash((self._visited, item, backward)) % ORDER_MODULUS
        if self.before_pass is not None:
            self.before_pass(item, backward)
        self._begun[item] += backward
        return self._visits(item, backward=backward, fetch=fetch)

    def reads_whole(self, item: int) -> None:
        """Takes note of a forward that reads an item's slices in place, as one tensor, without visits."""
        if self.before_pass is not None:
            self.before_pass(item, False)

    @abstractmethod
    def _visits(self, item: int, *, backward: bool, fetch: bool) -> Iterator[Visit]:
        """Yields what `visits` does: the transport's own way."""

    @property
    def order_hash(self) -> int:
        """Multiple of a hash of the items visited since `start`, in order.

        Those of a ring add up to 0, modulo `ORDER_MODULUS`, if all its ranks have visited the same items. 0 where
        slices are found by their item, whatever the order.
        """
        if not self.goes_by_order:
            return 0
        group, is_first = self._first_rank, self.position == 0
        return cancelling(self._visited, group=group, num_ranks=self.size, is_first=is_first) % ORDER_MODULUS

    @abstractmethod
    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        """The buffer of the visiting slice's gradient in backward, once all ranks before this one have added to it.

        None if they have not and `wait` is false. After adding, the caller must call `pass_on`.
        """

    @abstractmethod
    def pass_on(self, item: int, visit: Visit) -> None:
        """Sends `gradient(item, visit)` to the next rank, after this rank has added its part."""

    @torch.no_grad()
    def defer(self, addition: DeferredAdd, *, at_most: int = 1) -> None:
        """Keeps an addition to a gradient for later, since the ranks before this one have not added yet.

        Makes earlier deferred additions that have become possible, and waits for the oldest while more than `at_most`
        are left, since each keeps its operands in memory.
        """
        self.flush_ready()
        self._deferred.append(addition)
        while len(self._deferred) > at_most:
            # The oldest: the ranks behind this one have been waiting for it longest.
            self._deferred.pop(0)(wait=True)

    def flush_ready(self) -> None:
        """Makes the deferred additions that have become possible: other ranks may be waiting for them."""
        if self._deferred:
            with torch.no_grad():
                self._deferred = [addition for addition in self._deferred if not addition(wait=False)]

    @torch.no_grad()
    def flush(self) -> None:
        """Makes all deferred additions, waiting if need be."""
        # Emptied first: a transport may call `flush_ready` while it waits, which must not make these a second time.
        late, self._deferred = self._deferred, []
        for addition in late:
            addition(wait=True)

    def finish(self) -> None:
        """Ends a step: all messages of this rank have left, all that it expects have arrived."""
        self.flush()

    def stays(self, item: int, visit: Visit) -> bool:
        """True if the memory of a visit's weights holds them for the rest of the step, so that views may be kept."""
        return not self.moves_weights or (visit.index == self.position and self.wire_dtype == self.dtype)

    def restore_owners(self, *, after: BaseException | None = None) -> None:
        """Returns slices to their owners, after a pass that has moved them. All ranks.

        Args:
            after: the exception that broke the pass off, if one did. Then the ranks first find out whether all of them
                have come here from the same place; only then slices can return.

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

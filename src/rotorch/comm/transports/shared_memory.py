"""The ring over shared memory: ranks on one host map each other's slices and read them in place. Nothing moves.

All weights, gradients and turn counters lie in one file in a memory file system, which all ranks of the ring map; each
rank allocates its own extents (`comm/shared_file.py`).

[Note: side by side]
    An item's slices lie one after another and form one tensor: a weight that can be read in place can be read whole,
    and its slices need not be taken one by one. Gradients lie rank by rank.

[Note: another precision]
    If slices are computed with in another dtype than they have at home, a visit converts its slice into a slot of this
    rank, and so does the visit of its own slice. A converted copy at each home would take memory all the time.

[Note: turns]
    Gradients are added in the owner's memory. A slice's turn counter counts its visits in this step;
    the rank whose turn it is adds and increments. Each step has its own base, written by the owner once its optimizer
    is done with the last gradient, so a step that was abandoned half-way leaves nothing to clean up.

[Note: a step that is broken off]
    A rank that leaves a step announces it, since its deferred additions are never made, and others may wait for them.
    Others go on with gradient memory that is never read, until they meet the same failure, or `finish`, which raises.

Writes to a gradient must be seen before the turn that announces them. x86 keeps stores in order; `_fence` is for
machines that do not.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rotorch.comm.home_gradients import StayingGradients
from rotorch.comm.ring import GradientBuffer, Ring, RingSetup, Visit
from rotorch.comm.shared_file import Extent, Patience, announce, share_file
from rotorch.core.errors import HeardFailure

_ALIGNMENT = 64
_STEP = 1 << 24  # turns between the bases of two steps: more visits than a step can have


class _Plan:
    """Layout of the file (see [Note: side by side]).

    Attributes:
        turns: offset of each rank's counters: one per item, and that of [Note: a step that is broken off].
        wholes: each item's slices, one after another.
        gradients: each rank's gradients, all items.
        num_bytes: of the file.
    """

    def __init__(self, numels: Sequence[Sequence[int]], *, size: int, itemsize: int) -> None:
        self._numels, self._itemsize = numels, itemsize
        self._step = max(1, _ALIGNMENT // itemsize)
        header = -(-8 * (len(numels) + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.turns = [rank * header for rank in range(size)]
        self._header, end = header, size * header
        self.wholes = []
        for numel in numels:
            self.wholes.append(Extent(end, sum(numel) * itemsize))
            end += self._aligned(sum(numel)) * itemsize
        self.gradients = []
        for rank in range(size):
            num_bytes = sum(self._aligned(numel[rank]) for numel in numels) * itemsize
            self.gradients.append(Extent(end, num_bytes))
            end += num_bytes
        self.num_bytes = end

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._step) * self._step

    def gradient_starts(self, rank: int) -> list[int]:
        """Offset of each item in a rank's gradients, in elements."""
        return list(itertools.accumulate((self._aligned(n[rank]) for n in self._numels), initial=0))[:-1]

    def owned(self, rank: int) -> list[Extent]:
        """Extents that a rank allocates: its counters, its slices, its gradients."""
        slices = [
            Extent(whole.start + sum(n[:rank]) * self._itemsize, n[rank] * self._itemsize)
            for whole, n in zip(self.wholes, self._numels, strict=True)
        ]
        return [Extent(self.turns[rank], self._header), *slices, self.gradients[rank]]


class SharedMemoryRing(Ring):
    """See the module's notes.

    Args:
        setup: ranks and slices, on CPUs.
        whole: slices lie side by side, so that every rank can read the whole weight.

    Raises:
        SharedMemoryUnavailable: the ranks are on several hosts, or the file system is missing or too small.
    """

    moves_weights = False
    defers_adds = True
    goes_by_order = False
    name = "shared_memory"

    def __init__(self, setup: RingSetup, *, whole: bool = False) -> None:
        super().__init__(setup)
        dtype = setup.dtype
        converts = self.wire_dtype != self.dtype
        self.moves_weights = converts
        largest = max((max(n) for n in self.numels), default=0)
        self._slot = torch.empty(largest if converts else 0, dtype=self.wire_dtype)
        self._in_slot: tuple[int, int] | None = None
        """Item and index of the slice that the slot holds with this step's values."""
        self.gives_whole = whole
        group = setup.mesh.get_group() if self.size > 1 else None
        self._patience = Patience(group=group, timeout_s=setup.timeout_s)
        self._base = 0
        self._rounds = [0] * len(self.numels)
        self._fence = threading.Lock()
        self._plan = _Plan(self.numels, size=self.size, itemsize=dtype.itemsize)
        self._map = share_file(self._plan.num_bytes, group=group, owned=self._plan.owned(self.position))
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        plan = self._plan
        self._turns = [
            np.frombuffer(self._map, dtype=np.int64, count=len(self.numels), offset=start) for start in plan.turns
        ]
        self._broken_off = [
            np.frombuffer(self._map, dtype=np.int64, count=1, offset=start + 8 * len(self.numels))
            for start in plan.turns
        ]
        """Per rank: the base of the last step that it has left."""
        self._discards_adds = False
        """True if another rank has left this step, so that this rank's additions go nowhere."""
        self._discarded = torch.empty(0, dtype=self.dtype)
        self._wholes = [self._typed(flat, extent) for extent in plan.wholes]
        self._weights = [whole.split(numel) for whole, numel in zip(self._wholes, self.numels, strict=True)]
        self._all_gradients = [self._typed(flat, extent) for extent in plan.gradients]
        self._gradients = [self._parts(rank) for rank in range(self.size)]
        self._home_weights = [of_item[self.position] for of_item in self._weights]
        self._home_gradients = StayingGradients(self._gradients[self.position])

    # ------------------------------------------------------------- memory

    def _typed(self, flat: Tensor, extent: Extent) -> Tensor:
        return flat[extent.start : extent.start + extent.num_bytes].view(self.dtype)

    def _parts(self, rank: int) -> list[Tensor]:
        """The items' parts of a rank's gradients."""
        starts, flat = self._plan.gradient_starts(rank), self._all_gradients[rank]
        return [flat[start : start + n[rank]] for start, n in zip(starts, self.numels, strict=True)]

    def whole_weights(self, item: int) -> Tensor | None:
        return self._wholes[item] if self.gives_whole else None

    def slots(self) -> list[Tensor]:
        return [self._slot] if self._slot.numel() else []

    # ------------------------------------------------------------- rotation

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        # Turns of a new base: those that a step which broke off has left behind are all lower.
        self._base += _STEP
        self._rounds = [0] * len(self.numels)
        self._in_slot = None
        self._discards_adds = False
        with self._fence:
            # Opens this rank's gradients to the others: its optimizer is done with those of the last step.
            self._turns[self.position][:] = self._base

    def _visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        first, fresh = self._base + self._rounds[item] * self.size, False
        if backward:  # now, not at the end of the pass: another pass of this item may begin before (see `defer`)
            fresh, self.fresh[item] = self.fresh[item], False
            self._rounds[item] += 1
        status, here = self.status, self._at_slices(item, backward=backward)
        for number, index in enumerate(self.order(backward=backward)):
            status.now = here + index
            weights = self._visiting(item, index) if fetch else None
            yield Visit(index, weights, number, first + number, fresh and number == 0)

    def _visiting(self, item: int, index: int) -> Tensor:
        """A slice where it lies, or converted into the slot (see [Note: precision] in `comm/ring.py`)."""
        weights = self._weights[item][index]
        if self.wire_dtype == self.dtype:
            return weights
        slot = self._slot[: weights.numel()]
        if self._in_slot != (item, index):  # backward begins with the slice that forward ended with
            slot.copy_(weights)
            self._in_slot = (item, index)
        return slot

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        turns = self._turns[visit.index]
        if turns[item] < visit.turn:
            if not wait:
                return None
            self._wait(turns, item, visit)
        # The pass goes on, and `finish` raises: a unit in the middle of backward could not be left cleanly.
        if self._discards_adds:
            return GradientBuffer(self._discarded_gradient(self.numels[item][visit.index]), True, stays=True)
        with self._fence:  # reads of the gradient come after that of the turn which announced it
            pass
        return GradientBuffer(self._gradients[visit.index][item], visit.fresh, stays=True)

    def is_home(self, item: int) -> bool:
        if self._turns[self.position][item] < self._base + self._begun[item] * self.size:
            return False
        with self._fence:  # reads of the gradient come after that of the turn which announced it
            pass
        return True

    def pass_on(self, item: int, visit: Visit) -> None:
        if self._discards_adds:
            return  # nothing was added to the real gradient, so its turn must not go on
        announce(self._turns[visit.index], item, visit.turn + 1, fence=self._fence)

    def _discarded_gradient(self, numel: int) -> Tensor:
        """Gradient memory without readers, at one address for the ring's life: callers cache views by address."""
        if not self._discarded.numel():
            self._discarded = self._discarded.new_empty(max(max(n) for n in self.numels))
        return self._discarded[:numel]

    def _wait(self, turns: np.ndarray, item: int, visit: Visit) -> None:
        # The ranks add to a slice's gradient in the order of the ring, each after its neighbour.
        if self._discards_adds:
            return
        with self._awaiting_gradient(item, visit.index, source=(self.position + 1) % self.size):
            # Meanwhile: the rank that this one waits for may itself wait for additions that this one has deferred.
            self._patience.wait(
                lambda: turns[item] >= visit.turn or bool(self._who_left()),
                whom=lambda: self._who_adds(int(turns[item]), visit.index),
                ranks=self._ranks,
                what="its part of a gradient",
                late=lambda: (
                    f"ring position {self.position} waited {self._patience.timeout_s:.0f} s for slice {visit.index} "
                    f"of item {item} (turn {turns[item] - self._base} of {visit.turn - self._base}): "
                    "the rank before it is late"
                ),
                meanwhile=self.flush_ready,
            )
            self._discards_adds = bool(turns[item] < visit.turn)

    def _who_adds(self, turn: int, index: int) -> int:
        """Position of the rank whose turn it is to add to the gradient of slice `index`; the owner's before a step."""
        return index if turn < self._base else (index - 1 - (turn - self._base)) % self.size

    def _who_left(self) -> list[int]:
        return [rank for rank, base in zip(self._ranks, self._broken_off, strict=True) if base[0] >= self._base]

    def finish(self) -> None:
        super().finish()
        if self._discards_adds:
            ranks = ", ".join(map(str, self._who_left()))
            raise HeardFailure(f"rank {ranks} has left this step in the middle: gradients are incomplete")

    def restore_owners(self, *, after: BaseException | None = None) -> None:
        if after is not None:  # weights are at home; see [Note: a step that is broken off]
            announce(self._broken_off[self.position], 0, self._base, fence=self._fence)
            self._deferred = []  # this frees their operands

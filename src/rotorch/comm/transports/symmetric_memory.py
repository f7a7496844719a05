"""The ring over symmetric memory: ranks whose GPUs reach each other's memory; copy engines move slices and gradients.

Has not run on a GPU yet: its order of events is held by tests over `rotorch.testing.peer_memory`.

[Note: fetches]
    Home slices lie in a window that every rank maps. A fetch copies a slice from its home into one of two slots, on a
    lane of its own, while the slice before it is computed with; also across units (see passes.py). No rank is asked or
    told: weights are read-only from the barrier in `start`, which comes after every rank's optimizer, to the end of the
    step. A slot is filled again when the compute that was queued before the fetch has finished with it. A rank's own
    slice is used where it lies. Where several slices visit together (groups.py), each is copied from its own home to
    its places beside the others, one run of elements at a time; this rank's own one, too.

[Note: staged]
    Where slices visit in another precision than they have at home, the window holds them in that one, and masters lie
    beside it. Each owner converts its slices once, in `start`, before the barrier: half the bytes on the link, by copy
    engine instead of a kernel, for half of the weights again in memory. A rank that is still in the last pass may read
    what an owner writes here. It finds the same values, since masters change only after their gradients are complete,
    and these have been to every rank.

[Note: hops]
    A rank makes its part of a slice's gradient in a buffer of its own, at once and without adding. The sum of the ranks
    before it arrives in its inbox, in the window. On a third lane both are added and copied into the next rank's inbox:

        compute:  make part k -> buffer 0      make part k+1 -> buffer 1      make part k+2 -> buffer 0 ...
        hops:                    wait for the sum of k in the inbox            (may the hop be through?)
                                 buffer 0 += inbox; signal back: inbox is free
                                 wait for the next rank's inbox to be free
                                 copy buffer 0 to it; signal: the sum has come

    So a hop has the compute of two slices to hide behind: the one during which the sum arrives and the one during which
    it is passed on. The part of one's own slice is made in the home gradient, to which the inbox is added.

[Note: the way home of groups]
    Sums of groups hop between the ranks that have the same number in theirs. After the last one a rank's buffer has the
    gradient of its own group, with the parts of all ranks of its number. It copies to every neighbour's inbox what is
    that neighbour's slice, and adds to its home gradient what is its own, then what the neighbours have copied, in
    their order: an order that no timing changes.

[Note: waits lead to earlier visits]
    An inbox has one owner, who says before each copy into it that it is free: to the rank that will send the next sum,
    or to its neighbours. In visit j a rank waits for the sum that the rank before it sent in visit j-1, and for the
    next rank to have taken, in its visit j, the sum that it was sent in visit j-1. All waits lead to earlier visits, or
    from a copy to the word before it: at any distance between ranks, and wherever a host stops (to load a kernel, say),
    there is no circular wait.

[Note: abandoned steps]
    A step that all ranks leave halfway may leave signals behind that no rank takes. Every second step uses the same
    channels, and a rank clears its signals on them before the barrier of `start`, after which others may signal again.

A neighbour that never signals would keep this rank's GPU waiting for ever; the host notices at the next `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotorch._torch_private import copy_each
from rotorch.comm.home_gradients import ComingGradients
from rotorch.comm.ring import GradientBuffer, Ring, RingSetup, Visit
from rotorch.comm.transports.groups import FlatChunk, Groups
from rotorch.comm.transports.passes import Pass, Passes
from rotorch.comm.transports.peer_memory import CudaPeerMemory, PeerMemory
from rotorch.core.errors import RankFailure

_ALIGNMENT = 256  # bytes: matrix products and copy engines are fastest on slices that start at a multiple
_SIGNALS = 2  # channels of a step: the sum has come; the inbox is free


@dataclass
class _Fetch:
    """A fetch under way: the pass and step that it is for, the slot that it fills, and the mark after its copy."""

    target: Pass
    step: int
    slot: int
    mark: Any


class SymmetricMemoryRing(Ring):
    """See the module's notes.

    Args:
        setup: ranks and slices; hops of a step count as lost after its `timeout_s`.
        num_visits: of a pass of each item, divisors of the number of ranks; by default slices come one by one.
        flat_chunks: of each slice then, `flat_chunks[item][index]`.
        make_memory: makes the windows.

    Raises:
        PeerMemoryUnavailable: on all ranks alike.
    """

    moves_weights = True
    defers_adds = False  # parts are made at once, and added on a lane of their own
    takes_parts = True
    name = "symmetric_memory"

    def __init__(
        self,
        setup: RingSetup,
        *,
        num_visits: Sequence[int] = (),
        flat_chunks: Sequence[Sequence[Sequence[FlatChunk]]] = (),
        make_memory: Callable[..., PeerMemory] = CudaPeerMemory,
    ) -> None:
        super().__init__(setup)
        mesh, device, dtype = setup.mesh, setup.device, setup.dtype
        n, r = self.size, self.position
        self._timeout_s = setup.timeout_s
        self._converts = self.wire_dtype != dtype
        self._later_parts = setup.later_parts
        self._groups = [
            Groups.of(
                sizes,
                count=num_visits[item] if num_visits else n,
                position=r,
                chunks=flat_chunks[item] if num_visits else None,
            )
            for item, sizes in enumerate(self.numels)
        ]
        starts = [self._layout([self._words(sizes[rank]) for sizes in self.numels]) for rank in range(n)]
        largest = max((groups.room for groups in self._groups), default=0) if n > 1 else 0
        inbox = max(ends[-1] for ends in starts)  # windows are equally large, slices may not be
        sums = self._words(largest, self.hop_dtype)
        self._memory = memory = make_memory(mesh=mesh, device=device, numel=max(inbox + sums, 1), dtype=dtype)
        self._homes = [
            [
                self._as_visitor(memory.of_peer(rank, start, self._words(sizes[rank])), sizes[rank])
                for start, sizes in zip(starts[rank], self.numels, strict=False)
            ]
            for rank in range(n)
        ]
        """Every rank's slices as they visit: `[rank][item]`."""
        self._own = [
            self._as_visitor(memory.window[s : s + self._words(sizes[r])], sizes[r])
            for s, sizes in zip(starts[r], self.numels, strict=False)
        ]
        """This rank's slices as they visit: its home slices, but where these are converted."""
        self._home_weights = self._own
        if self._converts:
            home_starts = self._layout([sizes[r] for sizes in self.numels])
            masters = memory.empty(home_starts[-1], dtype=dtype)
            self._home_weights = [masters[s : s + sizes[r]] for s, sizes in zip(home_starts, self.numels, strict=False)]
        self._inbox = memory.window[inbox : inbox + sums].view(self.hop_dtype)[:largest]
        self._inboxes = [memory.of_peer(rank, inbox, sums).view(self.hop_dtype)[:largest] for rank in range(n)]
        self._home_gradients = ComingGradients(
            [sizes[r] for sizes in self.numels],
            later_parts=setup.later_parts,
            make=partial(memory.empty, dtype=dtype),
        )
        self._slots = [memory.empty(largest, dtype=self.wire_dtype) for _ in range(2)]
        self._parts = [memory.empty(largest, dtype=self.hop_dtype) for _ in range(2)]
        together = {item: groups.count for item, groups in enumerate(self._groups) if groups.per_visit > 1}
        self._passes = Passes(size=n, num_visits=together)
        self._copies: dict[tuple[int, int, int], tuple[list[Tensor], list[Tensor]]] = {}
        """Per item, visit and slot: the tensors between which a fetch copies."""
        self._in_flight: _Fetch | None = None
        self._num_fetches = self._num_parts = self._num_steps = 0
        self._held: set[int] = set()
        """Slots whose slices are visiting."""
        now = memory.compute.mark()
        self._slot_free = [now, now]
        """Per slot: the mark after which compute no longer uses it."""
        self._part_free = [now, now]
        """Per part: the mark after which it has been copied away."""
        self._home_summed: dict[int, Any] = {}
        """Per item: the mark after which the inbox has been added to its home gradient."""

    def _layout(self, numels: Sequence[int]) -> list[int]:
        """Offsets of a rank's items, one after another, in elements of `dtype`; the end comes last."""
        step = max(1, _ALIGNMENT // self.dtype.itemsize)
        starts = [0]
        for item, numel in enumerate(numels):
            end = starts[-1] + numel
            starts.append(end if item + 1 in self._later_parts else -(-end // step) * step)
        return starts

    def _words(self, numel: int, dtype: torch.dtype | None = None) -> int:
        """Elements of a window, which has the ring's `dtype`, that a slice takes as it visits, or a sum in `dtype`."""
        return -(-numel * (dtype or self.wire_dtype).itemsize // self.dtype.itemsize)

    def _as_visitor(self, words: Tensor, numel: int) -> Tensor:
        return words.view(self.wire_dtype)[:numel] if self._converts else words

    def stays(self, item: int, visit: Visit) -> bool:
        groups = self._groups[item]
        return groups.per_visit == 1 and visit.index == groups.own

    def slots(self) -> list[Tensor]:
        return [*self._slots, *self._parts, self._inbox]

    @property
    def window_bytes(self) -> int:
        """Of this rank's window: slices as they visit, padded to the rank with the most, and the inbox."""
        return self._memory.window.numel() * self.dtype.itemsize

    @property
    def uncounted_bytes(self) -> int:
        return 0 if self._memory.is_counted else self.window_bytes

    # ------------------------------------------------------------- a step

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        memory = self._memory
        hops = memory.hops.mark()
        if not memory.reached(hops, timeout_s=self._timeout_s):
            raise RankFailure(
                f"ring position {self.position} waited {self._timeout_s:.0f} s for gradients of the last step: "
                "a neighbour on the ring is late or gone"
            )
        self._passes.start()
        self._in_flight = None  # dropped: a pass without gradients ends without `finish`, an abandoned step anywhere
        self._held.clear()
        self._num_fetches = 0  # in every step a visit finds its slice in the same slot, as CUDA graphs must
        self._num_steps += 1
        memory.compute.after(hops)
        memory.compute.after(memory.fetches.mark())
        if self._converts:
            copy_each(self._own, self._home_weights)
        if self.size > 1:
            memory.clear(self._channels())  # see [Note: abandoned steps]
            memory.barrier()  # every rank's weights are as its optimizer left them
        now = memory.compute.mark()
        memory.fetches.after(now)
        memory.hops.after(now)
        self._slot_free, self._part_free, self._home_summed = [now, now], [now, now], {}

    def _channels(self) -> range:
        """Channel 0 is the barrier's."""
        first = 1 + _SIGNALS * (self._num_steps % 2)
        return range(first, first + _SIGNALS)

    def finish(self) -> None:
        super().finish()
        self._memory.compute.after(self._memory.hops.mark())

    def close(self) -> None:
        self._in_flight = None
        # Copies may still read the peers' windows, which are unmapped when the ring goes.
        for lane in (self._memory.fetches, self._memory.hops):
            self._memory.reached(lane.mark(), timeout_s=self._timeout_s)

    # ------------------------------------------------------------- weights

    def _visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        this = Pass(item, backward, fetch)
        self._passes.enter(this)
        here = self._at_slices(item, backward=backward)
        for number, index in enumerate(self._groups[item].order(backward=backward)):
            self.status.now = here + index  # the host's position: the GPU may still be at an earlier slice
            slot, weights = self._arrive(this, number, index) if fetch else (None, None)
            ahead = self._passes.next_fetch(this, number)
            if ahead is not None and self._in_flight is None:
                self._in_flight = self._post(*ahead)
            try:
                yield Visit(index, weights, number)
            finally:
                if slot is not None:
                    self._slot_free[slot] = self._memory.compute.mark()
                    self._held.discard(slot)
        if backward:
            self.fresh[item] = False

    def _arrive(self, this: Pass, step: int, index: int) -> tuple[int | None, Tensor]:
        """Returns the weights of visit `index` and the slot that they are in; compute that follows finds them there."""
        groups = self._groups[this.item]
        if groups.per_visit == 1 and index == groups.own:
            return None, self._own[this.item]
        flight, self._in_flight = self._in_flight, None
        if flight is None or (flight.target, flight.step) != (this, step):
            flight = self._post(this, step)  # nothing came, or for a pass that this step does not make
        self._memory.compute.after(flight.mark)
        self._held.add(flight.slot)
        return flight.slot, self._slots[flight.slot][: groups.numels[index]]

    def _post(self, target: Pass, step: int) -> _Fetch:
        """Starts the copies of one visit, from the homes of its slices into the next slot."""
        slot = self._num_fetches % 2
        self._num_fetches += 1
        if slot in self._held:
            raise AssertionError(f"slot {slot} is filled while its slice is visiting")
        lane = self._memory.fetches
        # What was in this slot before may still be computed with.
        lane.after(self._slot_free[slot])
        lane.copy(*self._between(target.item, self._groups[target.item].order(backward=target.backward)[step], slot))
        return _Fetch(target, step, slot, lane.mark())

    def _between(self, item: int, index: int, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of a slot, and the runs of home slices that visit `index` of an item brings into them."""
        if (item, index, slot) not in self._copies:
            groups, memory = self._groups[item], self._slots[slot]
            runs = [
                (self._homes[rank][item], c) for rank in groups.ranks(index) for c in groups.chunks[rank] if c.numel
            ]
            self._copies[item, index, slot] = [c.in_visit(memory) for _, c in runs], [c.at_home(h) for h, c in runs]
        return self._copies[item, index, slot]

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer:
        """The buffer for this rank's part of a visit's gradient; never waits for the ranks before it."""
        compute = self._memory.compute
        if self.stays(item, visit):
            if item in self._home_summed:
                compute.after(self._home_summed.pop(item))
            return GradientBuffer(self._home_gradients[item], self.fresh[item], stays=self.gradients_stay)
        part = self._num_parts % 2  # the other one may still be under way to the next rank
        compute.after(self._part_free[part])
        return GradientBuffer(self._parts[part][: self._groups[item].numels[visit.index]], True, stays=True)

    def behind_gradients(self) -> AbstractContextManager[Any]:
        return self._memory.hops.running()

    def pass_on(self, item: int, visit: Visit) -> None:
        groups, stays = self._groups[item], self.stays(item, visit)
        here = visit.index == groups.own
        if here:
            self._came_home[item] += 1
        if self.size == 1:
            return
        hops, numel = self._memory.hops, groups.numels[visit.index]
        to, source = ((self.position + distance) % self.size for distance in (-groups.per_visit, groups.per_visit))
        part = self._num_parts % 2
        if here:
            self._home_gradients.come(item)  # before the mark below, so behind all that its memory was used for
        buffer = self._home_gradients[item] if stays else self._parts[part][:numel]
        came, free = self._channels()
        # The part is added to and sent only once compute has made it.
        hops.after(self._memory.compute.mark())
        with hops.open():
            # In the first visit of a pass this rank is the first to add: no sum has come to its inbox.
            if numel and visit.number > 0:
                hops.wait_signal(source, channel=came)
                hops.add([buffer], [self._inbox[:numel]])
            if not here:
                if groups.numels[(visit.index + 1) % groups.count]:
                    hops.signal(source, channel=free)
                if numel:
                    hops.wait_signal(to, channel=free)
                    hops.copy([self._inboxes[to][:numel]], [buffer])
                    hops.signal(to, channel=came)
            elif not stays:
                self._share_out(item, buffer)
        if stays:
            self._home_summed[item] = hops.mark()
        else:
            self._part_free[part] = hops.mark()
            self._num_parts += 1

    def _share_out(self, item: int, gradient: Tensor) -> None:
        """Gives every neighbour its part of the own group's gradient (see [Note: the way home of groups])."""
        groups, numels, hops = self._groups[item], self.numels[item], self._memory.hops
        home = self._home_gradients[item]
        came, free = self._channels()
        own = [chunk for chunk in groups.chunks[self.position] if chunk.numel]
        if own:
            for rank in groups.neighbours:
                hops.signal(rank, channel=free)
        for rank in groups.neighbours:
            if numels[rank]:
                start = numels[rank] * groups.place_at(rank)
                inbox = self._inboxes[rank][start : start + numels[rank]]
                theirs = [chunk for chunk in groups.chunks[rank] if chunk.numel]
                hops.wait_signal(rank, channel=free)
                hops.copy([c.at_home(inbox) for c in theirs], [c.in_visit(gradient) for c in theirs])
                hops.signal(rank, channel=came)
        if own:
            parts = [c.at_home(home) for c in own], [c.in_visit(gradient) for c in own]
            if not self.fresh[item]:
                hops.add(*parts)
            elif self.hop_dtype == self.dtype:
                hops.copy(*parts)
            else:
                with hops.running():  # a kernel: copy engines convert nothing
                    copy_each(*parts)
            for number, rank in enumerate(groups.neighbours):
                hops.wait_signal(rank, channel=came)
                hops.add([home], [self._inbox[number * home.numel() : (number + 1) * home.numel()]])

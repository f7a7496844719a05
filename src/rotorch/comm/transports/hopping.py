"""The ring over point-to-point messages with the least memory: slices replace each other in one buffer.

[Note: slices that travel]
    Without a second buffer a slice cannot be fetched while another one is used, so slices hop: after each visit every
    rank sends the slice that it holds to one neighbour and receives the other neighbour's in its place, through a
    bounce of a few MiB (the in-place rotation of arXiv 2311.01635). Home buffers themselves are sent and received into:
    there is no slot for weights at all. They are as large as the item's largest slice.
    If slices are computed with in another dtype than they have at home, or packed on the wire, masters must not be
    rounded, so they stay, and a copy of the slice travels in a slot of that dtype.

[Note: away from home]
    A forward pass ends with slice r + 1 on rank r, where backward begins; backward ends at home. Between the two, and
    after a forward pass that no backward follows, slices are away. A pass begins by moving them to where it begins,
    `finish` and `restore_owners` move them home. `_offsets` has their distance: rank r holds slice r + offset.

[Note: broken off]
    A hop needs all ranks. After an exception each rank sends the others its slices' offsets. If all are equal, none is
    in the middle of a hop, and slices go home: an exception that all ranks raise loses nothing. If one rank raises
    alone, the others wait for a hop that never comes, and get a RankFailure; slices that have moved are lost to this
    ring then, which refuses to start again. A checkpoint is the way back, as from a rank that died.

Gradients hop too, in one slot and through a bounce of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rotorch.comm.ring import GradientBuffer, RingSetup, Visit
from rotorch.comm.status_word import Operation
from rotorch.comm.transports.message_ring import MessageRing, message_group
from rotorch.comm.transports.messages import Bounce, Hop
from rotorch.comm.wire import Wire
from rotorch.core.errors import RankFailure

_PATIENCE_S = 20.0  # after an exception, for the other ranks to have raised it too; less than anybody's timeout


class HoppingRing(MessageRing):
    """See the module's notes.

    Args:
        setup: ranks and slices.
        wire: form in which slices travel; by default as they visit.
    """

    def __init__(self, setup: RingSetup, *, wire: Wire | None = None) -> None:
        dtype, device = setup.dtype, setup.device
        wire = wire or Wire(home_dtype=dtype, dtype=setup.wire_dtype or dtype)
        self._homes_travel = wire.as_at_home
        rooms = [max(n) for n in setup.numels]
        super().__init__(setup, wire=wire, rooms=rooms if self._homes_travel else None)
        # A group with a short timeout: ranks that did not raise never answer, and must not hold up the error.
        patience_s = min(_PATIENCE_S, setup.timeout_s / 2)
        self._agreement_group = message_group(setup.mesh.mesh.tolist(), timeout_s=patience_s)
        largest = self._largest
        self._rooms = self._home_buffer.split(rooms) if self._homes_travel else ()
        length, travels = wire.length(largest), self.size > 1
        self._traveller = torch.empty(0 if self._homes_travel else length, dtype=wire.message_dtype, device=device)
        self._unpacked = torch.empty(largest if wire.packs else 0, dtype=wire.dtype, device=device)
        self._bounce = Bounce(length if travels else 0, dtype=wire.message_dtype, device=device)
        self._gradient_slot = torch.empty(largest if travels else 0, dtype=dtype, device=device)
        self._gradient_bounce = Bounce(largest if travels else 0, dtype=dtype, device=device)
        self._offsets = [0] * len(self.numels)
        """Per item: number of the slice in its home buffer, minus this rank's own (see [Note: away from home])."""
        self._hop: Hop | None = None
        self._gradient_hop: Hop | None = None
        self._lost: str | None = None

    def slots(self) -> list[Tensor]:
        buffers = [self._traveller, self._unpacked, self._bounce.memory]
        return [b for b in (*buffers, self._gradient_slot, self._gradient_bounce.memory) if b.numel()]

    def stays(self, item: int, visit: Visit) -> bool:
        return False

    # ------------------------------------------------------------- a step

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        if self._lost is not None:
            raise RankFailure(self._lost)
        self._drop()  # an abandoned step ends in the middle of a hop
        self._go_home()

    def finish(self) -> None:
        super().finish()
        self._go_home()

    def close(self) -> None:
        self._drop()

    def restore_owners(self, *, after: BaseException | None = None) -> None:
        if self._lost is not None or not self._homes_travel or self.size == 1:
            return
        if after is not None:
            if self._hop is None and not any(self._offsets):
                return
            self._make_sure_that_all_are_here(after)
        self._go_home()

    def _make_sure_that_all_are_here(self, after: BaseException) -> None:
        """Raises `RankFailure` unless all ranks have left the step at the same place; see [Note: broken off]."""
        reason = "this rank lost a neighbour"
        if isinstance(after, Exception) and not isinstance(after, RankFailure):
            try:
                self._drop()
                mine = torch.tensor(self._offsets)
                everyones = [torch.empty_like(mine) for _ in range(self.size)]
                dist.all_gather(everyones, mine, group=self._agreement_group)
                if all(torch.equal(mine, each) for each in everyones):
                    return
                reason = "ranks left the step at different places"
            except RuntimeError:  # RankFailure among them
                reason = "not all ranks left the step"
        self._hop = self._gradient_hop = None
        self._lost = (
            f"rtp: buffering=in_place: weights were on their way when the step broke off, and {reason}: they cannot "
            "return. Restart from a checkpoint"
        )
        raise RankFailure(self._lost)

    def _drop(self) -> None:
        """Waits for hops that no visit waits for any more, and discards them."""
        for hop in (self._hop, self._gradient_hop):
            if hop is not None:
                hop.drop()
        self._hop = self._gradient_hop = None

    # ------------------------------------------------------------- weights

    def _visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        order, brings = self.order(backward=backward), self._bring_home if self._homes_travel else self._bring_copy
        here = self._at_slices(item, backward=backward)
        neighbour = (self.position + (1 if backward else -1)) % self.size
        for number, index in enumerate(order):
            if fetch and number:
                self._mark_wait(Operation.AWAIT_SLICE, item, index, source=neighbour)
            weights = brings(item, number, index, backward=backward) if fetch else None
            self.status.now = here + index
            yield Visit(index, weights, number)
        if backward:
            self.fresh[item] = False

    def _bring_home(self, item: int, step: int, index: int, *, backward: bool) -> Tensor:
        """Returns slice `index` in the home buffer, and starts the hop that brings the next one."""
        # Usually there already: backward begins with forward's last slice. Not after two forwards, or a pass that was
        # left in the middle.
        if step == 0:
            self._move(item, to=index)
        else:
            self._arrive(item, backward=backward)
        room = self._rooms[item]
        if step < self.size - 1:
            # Its first chunks travel while the caller computes with this slice, which stays readable until `wait`.
            self._hop = self._post(room, item, index, backward=backward)
        return room[: self.numels[item][index]]

    def _arrive(self, item: int, *, backward: bool) -> None:
        if self._hop is None:
            raise AssertionError("no hop is under way")
        self._hop.wait()
        self._hop = None
        self._offsets[item] = (self._offsets[item] + (1 if backward else -1)) % self.size

    def _move(self, item: int, *, to: int) -> None:
        """Moves all slices of an item until this rank holds slice `to`, by the shorter way."""
        ahead = (to - self.position - self._offsets[item]) % self.size
        # All ranks are equally far from there, so all choose the same direction.
        backward = 2 * ahead < self.size
        for _ in range(ahead if backward else self.size - ahead):
            held = (self.position + self._offsets[item]) % self.size
            self._hop = self._post(self._rooms[item], item, held, backward=backward)
            self._arrive(item, backward=backward)

    def _go_home(self) -> None:
        for item in range(len(self.numels)):
            self._move(item, to=self.position)

    def _bring_copy(self, item: int, step: int, index: int, *, backward: bool) -> Tensor:
        """Returns slice `index` out of the slot that copies travel in, and starts the hop that brings the next one."""
        if index == self.position:
            self._load(item)
        elif step == 0:  # of backward: this rank's own copy leaves, and the next rank's arrives
            self._load(item)
            self._post(self._traveller, item, self.position, backward=True).wait()
        elif self._hop is not None:
            self._hop.wait()
            self._hop = None
        last_hop = self.size - 3 if backward else self.size - 2  # backward's last visit is the own slice: no hop
        if step <= last_hop:
            self._hop = self._post(self._traveller, item, index, backward=backward)
        numel = self.numels[item][index]
        if not self._wire.packs:
            return self._traveller[:numel]
        self._wire.unpack(self._traveller[: self._wire.length(numel)], self._unpacked[:numel])
        return self._unpacked[:numel]

    def _load(self, item: int) -> None:
        home = self._home_weights[item]
        self._wire.pack(home, self._traveller[: self._wire.length(home.numel())])

    def _post(self, buffer: Tensor, item: int, held: int, *, backward: bool) -> Hop:
        """Starts a hop of all slices of an item; this rank holds slice `held`."""
        n, r, direction = self.size, self.position, 1 if backward else -1
        sizes = self.numels[item]
        return Hop(
            buffer,
            send_numel=self._wire.length(sizes[held]),
            to=(r - direction) % n,
            receive_numel=self._wire.length(sizes[(held + direction) % n]),
            source=(r + direction) % n,
            bounce=self._bounce,
            group=self._weight_group,
        )

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        n, number = self.size, visit.number
        if n == 1:
            return GradientBuffer(self._home_gradients[item], self.fresh[item], stays=self.gradients_stay)
        travelling = self._gradient_slot[: self.numels[item][visit.index]]
        if number == 0:
            return GradientBuffer(travelling, True, stays=True)
        if self._gradient_hop is not None:
            if not wait:  # a hop makes progress only in its `wait`, which copies chunks
                return None
            with self._awaiting_gradient(item, visit.index, source=(self.position + 1) % n):
                self._gradient_hop.wait()
            self._gradient_hop = None
        if number < n - 1:
            return GradientBuffer(travelling, False, stays=True)
        home = self._home_gradients[item]
        if self.fresh[item]:  # own slice: the sum of all others has arrived
            home.copy_(travelling)
        else:
            home.add_(travelling)
        return GradientBuffer(home, False, stays=self.gradients_stay)

    def pass_on(self, item: int, visit: Visit) -> None:
        n, r = self.size, self.position
        if visit.number == n - 1:
            self._came_home[item] += 1
            return
        self._gradient_hop = Hop(
            self._gradient_slot,
            send_numel=self.numels[item][visit.index],
            to=(r - 1) % n,
            receive_numel=self.numels[item][(visit.index + 1) % n],
            source=(r + 1) % n,
            bounce=self._gradient_bounce,
            group=self._gradient_group,
        )

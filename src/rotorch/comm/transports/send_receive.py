"""The ring over point-to-point messages (gloo, NCCL).

At each visit every rank sends its home slice to one reader and receives one.

[Note: ahead]
    While slice i is computed with, the fetch of the next slice is under way, also across units (see `passes.py`), and
    with `ahead=2` that of the one after it: otherwise a long slice is fetched only from the visit of a short one on,
    behind which it cannot hide. Slots are filled in turn, and there is one more of them than fetches ahead. A fetch is
    posted when the one before it has come or this rank waits for nothing: messages from different ranks that are
    under way together share the link, and the first one comes late. If a step makes other passes than the one before
    it, all ranks notice alike; they drop slices that came too early and fetch on demand.

[Note: on the wire]
    Slices may travel, and visit, in another form than they have at home (`wire`): then the message is made in one
    buffer, once per pass, and a rank's own slice visits in the same form: in forward in that buffer; in backward, where
    the buffer may be on its way with the next unit already, in the slot that is free. Messages that must be unpacked
    need no second slot: when one is unpacked, the next may come.

[Note: added when it arrives]
    The last visit of backward is that of this rank's own slice. Its part is written home at once; the sum of all other
    ranks' parts is still on its way then, and is added when the slot that it comes into is needed for another slice,
    at the end of a step at the latest. A home gradient is so made of own part, then arrival, pass after pass: an order
    that no timing changes, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotorch.comm.ring import GradientBuffer, RingSetup, Visit
from rotorch.comm.status_word import Operation
from rotorch.comm.transports.message_ring import MessageRing
from rotorch.comm.transports.messages import Exchange, wait_for_all
from rotorch.comm.transports.passes import Fetch, FetchesAhead, Pass, Passes
from rotorch.comm.wire import Wire


@dataclass
class _PendingAdd:
    """The sum of all other ranks' parts that is yet to be added to a home gradient, and the slot it comes into."""

    item: int
    slot: int
    hop: Exchange


class SendReceiveRing(MessageRing):
    """See the module's notes.

    Args:
        setup: ranks and slices.
        wire: form in which slices travel; by default as they visit.
        ahead: fetches under way while a slice is computed with. More than one if slices travel as they are at home.
        room: elements of a slot; by default those of the largest slice.
    """

    takes_parts = True

    def __init__(self, setup: RingSetup, *, wire: Wire | None = None, ahead: int = 1, room: int | None = None) -> None:
        super().__init__(setup, wire=wire)
        device = setup.device
        wire, largest = self._wire, room or self._largest
        length, travels = wire.length(largest), self.size > 1
        if ahead > 1 and not wire.as_at_home:
            raise AssertionError("messages lie in one buffer, which two under way would need")
        num_slots = (1 if wire.packs else ahead + 1) if travels or not wire.as_at_home else 0
        self._slots = [torch.empty(length, dtype=wire.message_dtype, device=device) for _ in range(num_slots)]
        self._unpacked = torch.empty(largest if wire.packs else 0, dtype=wire.dtype, device=device)
        to_send = 0 if wire.as_at_home else wire.length(self._largest)
        self._message = torch.empty(to_send, dtype=wire.message_dtype, device=device)
        """The message of this rank's slice, where that is not the home slice itself."""
        self._message_item: int | None = None
        self._gradient_slots = [
            torch.empty(largest if travels else 0, dtype=self.hop_dtype, device=device) for _ in range(2)
        ]
        self._hops: list[Exchange | None] = [None, None]
        """Per gradient slot: the hop that sends its contents (and receives into the other slot)."""
        self._pending_add: _PendingAdd | None = None
        self._num_fetches = 0
        self._ahead = FetchesAhead(Passes(size=self.size), most=ahead, post=self._post)

    def slots(self) -> list[Tensor]:
        return [b for b in (*self._slots, self._unpacked, self._message, *self._gradient_slots) if b.numel()]

    # ------------------------------------------------------------- weights

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        self._drain()  # a pass without gradients ends without `finish`, an abandoned step in the middle
        self._message_item = None  # the optimizer has changed it
        self._num_fetches = 0  # in every step a visit finds its slice in the same slot, as CUDA graphs must
        self._ahead.passes.start()

    def finish(self) -> None:
        super().finish()
        self._settle()
        self._drain()

    def close(self) -> None:
        self._drain()

    def _drain(self) -> None:
        """Waits for all messages under way; drops sums that a step that broke off has not added to its gradients."""
        self._ahead.drop()
        wait_for_all(self._hops)
        if self._pending_add is not None:
            self._pending_add.hop.wait()
            self._pending_add = None

    def _visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        this = Pass(item, backward, fetch)
        self._ahead.passes.enter(this)
        here = self._at_slices(item, backward=backward)
        for number, index in enumerate(self._order_of(item, backward=backward)):
            source = self._comes_from(item, index)
            if fetch and source is not None:
                self._mark_wait(Operation.AWAIT_SLICE, item, index, source=source)
            weights = self._arrive(this, number, index) if fetch else None
            self.status.now = here + index
            self._ahead.top_up(this, number)
            yield Visit(index, weights, number)
        if backward:
            self.fresh[item] = False

    def _order_of(self, item: int, *, backward: bool) -> Sequence[int]:
        """This rank's order of an item's visits."""
        return self.order(backward=backward)

    def _comes_from(self, item: int, index: int) -> int | None:
        """Position of a rank that sends this one what visit `index` of an item needs; None if nothing comes."""
        return None if index == self.position else index

    def _arrive(self, this: Pass, step: int, index: int) -> Tensor:
        """Returns slice `index`, waiting for it if need be."""
        numel = self.numels[this.item][index]
        if index == self.position:
            return self._home_weights[this.item] if self._wire.as_at_home else self._own(this)
        message = self._fetched(this, step)[: self._wire.length(numel)]
        if not self._wire.packs:
            return message
        self._wire.unpack(message, self._unpacked[:numel])
        return self._unpacked[:numel]

    def _fetched(self, this: Pass, step: int) -> Tensor:
        """Waits for the fetch of a visit, and returns the slot that it has filled."""
        flight = self._ahead.next(this, step)
        flight.exchange.wait()
        return self._slot_of(flight.number)

    def _slot_of(self, number: int) -> Tensor:
        """The slot that a fetch fills."""
        # In turn, as visits are: the slice that this slot held last has been visited.
        return self._slots[number % len(self._slots)]

    def _own(self, this: Pass) -> Tensor:
        """This rank's own slice in the form in which it visits other ranks (see [Note: on the wire])."""
        home = self._home_weights[this.item]
        if self._wire.packs:
            out = self._unpacked
        elif this.backward:
            # Of two slots the one that no fetch is under way to: the last filled one, whose slice has been visited.
            out = self._slot_of(self._ahead.under_way[0].number + 1 if self._ahead.under_way else self._num_fetches - 1)
        else:
            return self._outgoing(this.item)
        self._wire.visit(home, out[: home.numel()])
        return out[: home.numel()]

    def _outgoing(self, item: int) -> Tensor:
        """The message of an item's slice: the slice at home itself, or a copy in the form of the wire."""
        home = self._home_weights[item]
        if self._wire.as_at_home:
            return home
        message = self._message[: self._wire.length(home.numel())]
        if self._message_item != item:
            # The buffer may still be on its way for the item before this one.
            for flight in self._ahead.under_way:
                flight.exchange.wait_sent()
            self._wire.pack(home, message)
            self._message_item = item
        return message

    def _post(self, target: Pass, step: int) -> Fetch:
        """Starts the exchange of one visit: this rank's home slice goes to its reader, another rank's comes here."""
        n, r = self.size, self.position
        source = self.order(backward=target.backward)[step]
        reader = (r - 1 - step) % n if target.backward else (r + step) % n
        number = self._num_fetches
        self._num_fetches += 1
        length = self._wire.length(self.numels[target.item][source])
        exchange = Exchange(
            send=self._outgoing(target.item),
            to=reader,
            receive=self._slot_of(number)[:length],
            source=source,
            group=self._weight_group,
        )
        return Fetch(target, step, number, exchange)

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        if visit.number == self.size - 1:  # own slice: see [Note: added when it arrives]
            return GradientBuffer(self._home_gradients[item], self.fresh[item], stays=self.gradients_stay)
        return self._travelling(item, visit, self.numels[item][visit.index], wait=wait)

    def _travelling(self, item: int, visit: Visit, numel: int, *, wait: bool) -> GradientBuffer | None:
        """The travelling gradient of a visit in its slot; None if it has not come, or the slot is not free yet."""
        slot, other = visit.number % 2, (visit.number + 1) % 2
        travelling = self._gradient_slots[slot][:numel]
        # A slot's last contents may still be on their way, or be a sum that waits to be added at home.
        if visit.number == 0:
            if not wait and not self._is_free(slot):
                return None
            self._release(slot)
            return GradientBuffer(travelling, True, stays=True)
        hop = self._hops[other]  # sent the last slice's gradient from the other slot, receives into this one
        if hop is not None:
            if not wait and not hop.has_received():
                return None
            self._await_gradient(hop, item, visit.index)
        return GradientBuffer(travelling, False, stays=True)

    def pass_on(self, item: int, visit: Visit) -> None:
        n, number = self.size, visit.number
        if n == 1:
            self._came_home[item] += 1
            return
        slot, other = number % 2, (number + 1) % 2
        if number == n - 1:
            hop = self._hops[other]
            if hop is None:
                raise AssertionError("the sum of the other ranks' parts is not on its way")
            # Not waited for here: the sum may arrive while later units compute.
            self._pending_add = _PendingAdd(item, slot, hop)
            return
        # The other slot receives the next slice's sum: its last contents must have left.
        self._release(other)
        self._hop(slot, self.numels[item][visit.index], self.numels[item][(visit.index + 1) % n], distance=1)

    def _hop(self, slot: int, leaves: int, arrives: int, *, distance: int) -> None:
        """Sends `leaves` elements of a gradient slot to the rank `distance` before this one.

        The other slot receives `arrives` elements from the rank as far behind it.
        """
        self._hops[slot] = Exchange(
            send=self._gradient_slots[slot][:leaves],
            to=(self.position - distance) % self.size,
            receive=self._gradient_slots[1 - slot][:arrives],
            source=(self.position + distance) % self.size,
            group=self._gradient_group,
        )

    def _is_free(self, slot: int) -> bool:
        """Returns True if a gradient slot is known to hold nothing that is still needed, without waiting."""
        pending, hop = self._pending_add, self._hops[slot]
        arrived = pending is None or pending.slot != slot or pending.hop.has_received()
        return arrived and (hop is None or hop.has_sent())

    def _release(self, slot: int) -> None:
        """Waits until a gradient slot's contents have left, or were added to the home gradient that they are for."""
        if self._pending_add is not None and self._pending_add.slot == slot:
            self._settle()
        hop = self._hops[slot]
        if hop is not None:  # not its receive into the other slot, which that slot's next user waits for
            hop.wait_sent()
            self._hops[slot] = None

    @torch.no_grad()
    def _settle(self) -> None:
        """Adds the pending sum to its home gradient."""
        pending = self._pending_add
        if pending is not None:
            self._await_gradient(pending.hop, pending.item, self.position)
            home = self._home_gradients[pending.item]
            home.add_(self._gradient_slots[pending.slot][: home.numel()])
            self._came_home[pending.item] += 1
            self._pending_add = None

    def _await_gradient(self, hop: Exchange, item: int, index: int) -> None:
        with self._awaiting_gradient(item, index, source=(self.position + 1) % self.size):
            # Only the receive: the send from the other slot is waited for when that slot is needed again.
            hop.wait_received()

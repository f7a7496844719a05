"""The ring over messages in which several slices visit together: fewer and larger products, for larger slots.

[Note: messages]
    Groups are those of groups.py. Of its own group, too, a rank receives the others' slices; its own it copies beside
    them. A slot has room for the largest visit of any item.

[Note: the way home]
    A group's gradient hops from group to group, between the ranks that have the same number in theirs. So when a rank
    has added to that of its own group, the buffer has the parts of all ranks of that number; each then gives every
    neighbour the part that is the neighbour's slice, and adds what it gets to its own. That is as many bytes as hops of
    single slices take. A home gradient is made of the sum of this rank's number, then those of the others in their
    order: an order that no timing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotorch._torch_private import add_to_each, copy_each
from rotorch.comm.ring import GradientBuffer, RingSetup, Visit
from rotorch.comm.transports.groups import FlatChunk, Groups
from rotorch.comm.transports.messages import Exchange
from rotorch.comm.transports.passes import Fetch, FetchesAhead, Pass, Passes
from rotorch.comm.transports.send_receive import SendReceiveRing
from rotorch.comm.wire import Wire


@dataclass
class _Arriving:
    """The sums of ranks with other numbers in the gradient of a home slice, on their way into slot `into`."""

    item: int
    slot: int
    into: int
    fresh: bool
    exchange: Exchange


class GroupedRing(SendReceiveRing):
    """See the module's notes.

    Args:
        setup: ranks and slices.
        num_visits: of a pass of each item; divisors of the number of ranks.
        flat_chunks: of each slice, `flat_chunks[item][index]`.
        wire: form in which slices travel, the same in which they visit.
        ahead: groups under way while one is computed with. More than one if slices travel as they are at home.
    """

    def __init__(
        self,
        setup: RingSetup,
        *,
        num_visits: Sequence[int],
        flat_chunks: Sequence[Sequence[Sequence[FlatChunk]]],
        wire: Wire | None = None,
        ahead: int = 1,
    ) -> None:
        if wire is not None and wire.packs:
            raise AssertionError("packed slices do not visit side by side")
        position = setup.mesh.get_local_rank()
        self._groups = groups = [
            Groups.of(numels, count=count, chunks=chunks, position=position)
            for numels, count, chunks in zip(setup.numels, num_visits, flat_chunks, strict=True)
        ]
        super().__init__(setup, wire=wire, ahead=ahead, room=max((each.room for each in groups), default=0))
        passes = Passes(size=self.size, num_visits=dict(enumerate(num_visits)))
        self._ahead = FetchesAhead(passes, most=ahead, post=self._post)
        self._arriving: _Arriving | None = None

    def stays(self, item: int, visit: Visit) -> bool:
        return False  # the own slice, too, lies in a slot

    def _drain(self) -> None:
        super()._drain()
        if self._arriving is not None:
            self._arriving.exchange.wait()
            self._arriving = None

    # ------------------------------------------------------------- weights

    def _order_of(self, item: int, *, backward: bool) -> Sequence[int]:
        return self._groups[item].order(backward=backward)

    def _comes_from(self, item: int, index: int) -> int | None:
        # The first of several: a wait names one rank. In groups of one, nobody sends this rank its own group.
        return next((rank for rank in self._groups[item].ranks(index) if rank != self.position), None)

    def _arrive(self, this: Pass, step: int, index: int) -> Tensor:
        groups = self._groups[this.item]
        slot = self._fetched(this, step)[: groups.numels[index]]
        if index == groups.own:  # the neighbours' slices have come beside it; nobody sends this rank its own
            home = self._home_weights[this.item]
            own = groups.chunks[self.position]
            self._wire.visit_in_pieces([c.at_home(home) for c in own], [c.in_visit(slot) for c in own])
        return slot

    def _post(self, target: Pass, step: int) -> Fetch:
        """Starts the messages of one visit: this rank's slice to all ranks of a group, another one's slices here."""
        groups = self._groups[target.item]
        g, own, chunks = groups.count, groups.own, groups.chunks
        group = groups.order(backward=target.backward)[step]
        # The group whose order has this one at the same step: every rank posts the sends that its readers now wait for.
        readers = (own - 1 - step) % g if target.backward else (own + step) % g
        number = self._num_fetches
        self._num_fetches += 1
        memory, outgoing = self._slot_of(number), self._outgoing(target.item)
        exchange = Exchange(
            receives=[
                (chunk.in_visit(memory), source)
                for source in groups.ranks(group)
                if source != self.position
                for chunk in chunks[source]
            ],
            sends=[
                (chunk.at_home(outgoing), reader)
                for reader in groups.ranks(readers)
                if reader != self.position
                for chunk in chunks[self.position]
            ],
            group=self._weight_group,
        )
        return Fetch(target, step, number, exchange)

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        return self._travelling(item, visit, self._groups[item].numels[visit.index], wait=wait)

    def pass_on(self, item: int, visit: Visit) -> None:
        groups, slot, other = self._groups[item], visit.number % 2, (visit.number + 1) % 2
        self._release(other)  # it receives next: what it sent for the visit before must have left
        if visit.number < groups.count - 1:
            numels, arriving = groups.numels, (visit.index + 1) % groups.count
            # As far as a group is long: to the rank with this one's number in the group before.
            self._hop(slot, numels[visit.index], numels[arriving], distance=groups.per_visit)
            return
        # The last visit, of the own group: the slot has its gradient with all parts of ranks of this rank's number.
        neighbours = groups.neighbours
        self._hops[slot] = exchange = Exchange(
            receives=[
                (chunk.at_home(part), rank)
                for part, rank in zip(self._parts(item, other), neighbours, strict=True)
                for chunk in groups.chunks[self.position]
            ],
            sends=[
                (chunk.in_visit(self._gradient_slots[slot]), rank)
                for rank in neighbours
                for chunk in groups.chunks[rank]
            ],
            group=self._gradient_group,
        )
        # Not waited for here: the sums may arrive while later units compute.
        self._arriving = _Arriving(item, slot, other, self.fresh[item], exchange)

    def _parts(self, item: int, slot: int) -> tuple[Tensor, ...]:
        """Room in a gradient slot for one home slice from each neighbour."""
        numel, others = self.numels[item][self.position], self._groups[item].per_visit - 1
        memory = self._gradient_slots[slot]
        return tuple(memory[i * numel : (i + 1) * numel] for i in range(others))

    def _is_free(self, slot: int) -> bool:
        arriving, hop = self._arriving, self._hops[slot]
        return (arriving is None or arriving.exchange.has_received()) and (hop is None or hop.has_sent())

    def _release(self, slot: int) -> None:
        self._settle()  # it keeps both slots
        super()._release(slot)

    @torch.no_grad()
    def _settle(self) -> None:
        """Adds the sums of all numbers to the home gradient that they are for."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        item, groups = arriving.item, self._groups[arriving.item]
        self._await_gradient(arriving.exchange, item, groups.own)
        home, own = self._home_gradients[item], self._gradient_slots[arriving.slot]
        chunks = groups.chunks[self.position]
        targets, parts = [c.at_home(home) for c in chunks], [c.in_visit(own) for c in chunks]
        # `fresh` as that pass found it: the ring's own flag has been cleared at its end.
        (copy_each if arriving.fresh else add_to_each)(targets, parts)
        for part in self._parts(item, arriving.into):
            home.add_(part)
        self._came_home[item] += 1

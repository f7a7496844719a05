"""The ring over several hosts: each slice crosses to each host once per pass, and the ranks there share it.

[Note: blocks]
    Ranks of a host are neighbours, and every host has as many. A pass visits the slices of one host after another's, a
    block at a time: in forward this host's own block first, in backward last. Of a block of another host, each rank
    receives the slice whose owner has the same local rank, into shared memory of its host, and reads the others where
    its neighbours have received them. While a block is computed with, the next one is on its way.

[Note: gradients]
    The ranks of a host add their parts to the gradient of a slice in turn, in shared memory. The last of them is the
    rank with the owner's local rank: it adds the sum of the hosts before, which has come meanwhile, and sends it to the
    next host. To its own slice's gradient a rank adds that sum when the buffer is next needed, at the end of a step at
    the latest, and opens the gradient to other passes only then.

[Note: slots]
    A slot may be filled once every rank of the host is done with the block that was in it. All ranks post their
    messages at the same visits, whoever is late: so a step that breaks off at one place leaves the same messages on
    all ranks, and none without its other end.

[Note: numbers]
    Ranks of a host tell each other by numbers in shared memory, each written by one rank at a time. Every step has a
    base of its own, so one that broke off leaves nothing to clean up.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from rotorch.comm.home_gradients import StayingGradients
from rotorch.comm.ring import GradientBuffer, Ring, RingSetup, Visit
from rotorch.comm.shared_file import Extent, Patience, announce, share_file
from rotorch.comm.status_word import Operation
from rotorch.comm.transports.message_ring import message_group
from rotorch.comm.transports.messages import Exchange, wait_for_all
from rotorch.comm.transports.passes import Fetch, FetchesAhead, Pass, Passes
from rotorch.core.errors import HeardFailure
from rotorch.core.messages import sum_slots

_STEP = 1 << 24  # between the bases of two steps: more than any number grows in one
_DONE, _ARRIVED, _BROKEN_OFF, _COUNTS = range(4)


class _Segment:
    """One rank's part of the host's file.

    Attributes:
        counts: fetches that the rank is done with, and that have arrived, and the last step that it left in the middle.
        sum_turns: additions to each of its slots for sums.
        home_turns: additions to each of its home gradients.
        weights: its own slice of each item.
        gradients: the gradient of each of them.
        slots: for visiting slices.
        sums: for gradients of other hosts' slices.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        extent: Extent,
        *,
        dtype: torch.dtype,
        home: Sequence[int],
        sizes: Sequence[int],
        sums: int,
    ) -> None:
        numbers = np.frombuffer(memory, dtype=np.int64, count=_COUNTS + sums + len(home), offset=extent.start)
        self.counts, self.sum_turns = numbers[:_COUNTS], numbers[_COUNTS : _COUNTS + sums]
        self.home_turns = numbers[_COUNTS + sums :]
        start, total = extent.start + _header_bytes(len(home), sums), sum(home)
        elements = torch.frombuffer(memory, dtype=torch.uint8)[start : extent.start + extent.num_bytes].view(dtype)
        weights, gradients, *slots = elements.split([total, total, *sizes])
        self.weights, self.gradients = weights.split(list(home)), gradients.split(list(home))
        self.sums, self.slots = slots[:sums], slots[sums:]


def _header_bytes(num_items: int, num_sums: int) -> int:
    return -(-8 * (_COUNTS + num_sums + num_items) // mmap.PAGESIZE) * mmap.PAGESIZE


class HierarchicalRing(Ring):
    """See the module's notes.

    Args:
        setup: ranks and slices, on CPUs; slices visit as they are at home.
        hosts: number of hosts; each has as many ranks, and they are neighbours.
        ahead: blocks on their way while one is computed with.

    Raises:
        SharedMemoryUnavailable: on all ranks of a host, if they cannot share memory.
    """

    moves_weights = True
    defers_adds = False  # a slot must be free for the next unit
    name = "hierarchical"

    def __init__(self, setup: RingSetup, *, hosts: int, ahead: int = 1) -> None:
        super().__init__(setup)
        dtype, timeout_s = setup.dtype, setup.timeout_s
        self.num_hosts, self._per_host = hosts, self.size // hosts
        m = self._per_host
        self._host, self._local_rank = divmod(self.position, m)
        # Within a block, too, one's own is first in forward and last in backward.
        self._forward_order = [
            (self._host - b) % hosts * m + (self._local_rank - i) % m for b in range(hosts) for i in range(m)
        ]
        self._backward_order = [
            (self._host + 1 + b) % hosts * m + (self._local_rank + 1 + i) % m for b in range(hosts) for i in range(m)
        ]
        ranks = setup.mesh.mesh.tolist()
        self._weight_group, self._gradient_group = (message_group(ranks, timeout_s=timeout_s) for _ in range(2))
        self._neighbours = slice(self._host * m, (self._host + 1) * m)
        group = message_group(ranks[self._neighbours], timeout_s=timeout_s)
        self._patience = Patience(group=group, timeout_s=timeout_s)
        self._fence = threading.Lock()
        largest = max((max(n) for n in self.numels), default=0)
        self._num_sum_slots = sums = sum_slots(hosts)
        homes = [[n[position] for n in self.numels] for position in range(self.size)[self._neighbours]]
        sizes, header = [largest] * (sums + ahead + 1), _header_bytes(len(self.numels), sums)
        extents, end = [], 0
        for home in homes:
            num_bytes = header + (2 * sum(home) + sum(sizes)) * dtype.itemsize
            extents.append(Extent(end, num_bytes))
            end += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = share_file(end, group=group, owned=[extents[self._local_rank]])
        self._segments = [
            _Segment(memory, extent, dtype=dtype, home=home, sizes=sizes, sums=sums)
            for extent, home in zip(extents, homes, strict=True)
        ]
        self._own = own = self._segments[self._local_rank]
        self._home_weights, self._home_gradients = own.weights, StayingGradients(own.gradients)
        self._arrival = torch.empty(largest, dtype=dtype)
        """The sum of the hosts before this one, for this rank's slice of the next block."""
        self._base, self._num_fetches, self._num_done, self._num_sums = 0, 0, 0, 0
        self._rounds = [0] * len(self.numels)
        self._ahead = FetchesAhead(
            Passes(size=hosts), most=ahead, post=self._post, when_dropped=self._end_fetch
        )  # of blocks: a pass has as many as there are hosts
        self._hops: list[Exchange | None] = [None] * sums
        """Per slot for sums: the messages that send it."""
        self._arriving: Exchange | None = None
        self._pending_item: int | None = None
        """Item whose home gradient the arriving sum is for."""

    def slots(self) -> list[Tensor]:
        return [b for b in (*self._own.slots, *self._own.sums, self._arrival) if b.numel()]

    # ------------------------------------------------------------- a step

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        self._drain()  # a pass without gradients ends without `finish`, an abandoned step in the middle
        self._base += _STEP
        self._num_fetches, self._num_done, self._num_sums = 0, 0, 0
        self._rounds = [0] * len(self.numels)
        self._ahead.passes.start()
        with self._fence:
            # Opens this rank's gradients to the others: its optimizer is done with those of the last step.
            self._own.sum_turns[:] = self._base
            self._own.home_turns[:] = self._base
        self._announce(self._own.counts, _DONE, self._base)

    def finish(self) -> None:
        super().finish()
        self._settle()
        self._drain()

    def close(self) -> None:
        self._drain()

    def _drain(self) -> None:
        """Waits for all messages under way, and drops what they bring."""
        self._ahead.drop()
        wait_for_all(self._hops)
        self._arriving, self._pending_item = None, None

    def restore_owners(self, *, after: BaseException | None = None) -> None:
        if after is not None:  # weights are at home; neighbours must not wait for this rank's part of the step
            self._announce(self._own.counts, _BROKEN_OFF, self._base)

    # ------------------------------------------------------------- weights

    def _visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        this, number = Pass(item, backward, fetch), 0
        self._ahead.passes.enter(this)
        here = self._at_slices(item, backward=backward)
        for nth, index in enumerate(self.order(backward=backward)):
            block, turn = divmod(nth, self._per_host)
            comes = fetch and index // self._per_host != self._host
            if comes and turn == 0:
                number = self._arrive(this, block)
            weights = self._visiting(item, index, number) if fetch else None
            self.status.now = here + index
            if turn == 1:  # not before: neighbours may still compute with the last slice of the block before
                self._ahead.top_up(this, block)
            yield Visit(index, weights, nth)
            if comes and turn == self._per_host - 1:
                self._end_fetch()
        if backward:
            self.fresh[item] = False

    def _arrive(self, this: Pass, block: int) -> int:
        """Waits for this rank's slice of a block and shows it to its neighbours. Returns the fetch's number."""
        flight = self._ahead.next(this, block)
        source = self._source(block, backward=this.backward)
        self._mark_wait(Operation.AWAIT_SLICE, this.item, source, source=source)
        flight.exchange.wait()
        self._announce(self._own.counts, _ARRIVED, self._base + flight.number + 1)
        return flight.number

    def _visiting(self, item: int, index: int, number: int) -> Tensor:
        """A slice in the memory of this host: at home, or where fetch `number` has brought it."""
        host, local_rank = divmod(index, self._per_host)
        segment = self._segments[local_rank]
        if host == self._host:
            return segment.weights[item]
        if local_rank != self._local_rank:
            self._mark_wait(Operation.AWAIT_SLICE, item, index, source=self._neighbours.start + local_rank)
            self._await(segment.counts, _ARRIVED, self._base + number + 1, whom=lambda: local_rank, what="a slice")
        return segment.slots[number % len(segment.slots)][: self.numels[item][index]]

    def _source(self, block: int, *, backward: bool) -> int:
        """Position of the rank that sends this one its slice of a block of a pass."""
        return (
            self.order(backward=backward)[block * self._per_host] // self._per_host * self._per_host + self._local_rank
        )

    def _post(self, target: Pass, block: int) -> Fetch:
        """Starts the messages of one block: this rank's own slice goes to one host, another host's comes here."""
        number, slots = self._num_fetches, self._own.slots
        self._num_fetches += 1
        for local_rank, segment in enumerate(self._segments):  # see [Note: slots]
            free = self._base + max(0, number + 1 - len(slots))
            self._await(
                segment.counts, _DONE, free, whom=lambda local_rank=local_rank: local_rank, what="its visit of a slice"
            )
        source = self._source(block, backward=target.backward)
        distance = source - self.position
        exchange = Exchange(
            send=self._home_weights[target.item],
            to=(self.position - distance) % self.size,
            receive=slots[number % len(slots)][: self.numels[target.item][source]],
            source=source,
            group=self._weight_group,
        )
        return Fetch(target, block, number, exchange)

    def _end_fetch(self) -> None:
        """Tells the neighbours that this rank is done with a block."""
        self._num_done += 1
        self._announce(self._own.counts, _DONE, self._base + self._num_done)

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        host, local_rank = divmod(visit.index, self._per_host)
        turn, segment = visit.number % self._per_host, self._segments[local_rank]
        turns, which, first = self._turns(item, visit)
        if host == self._host:
            flat, fresh = segment.gradients[item], turn == 0 and self.fresh[item]
        else:
            flat, fresh = segment.sums[which][: self.numels[item][visit.index]], turn == 0
            if turn == 0:
                self._open_sums(which, first)
        if turns[which] < first + turn:
            if not wait:
                return None
            waits_for = (local_rank - 1 - max(0, int(turns[which]) - first)) % self._per_host
            with self._awaiting_gradient(item, visit.index, source=self._neighbours.start + waits_for):
                # They add in the order of their visits; before the first, the owner's local rank opens it.
                self._await(
                    turns,
                    which,
                    first + turn,
                    whom=lambda: (
                        local_rank
                        if turns[which] < first
                        else (local_rank - 1 - (int(turns[which]) - first)) % self._per_host
                    ),
                    what="its part of a gradient",
                )
        with self._fence:  # reads of the gradient come after that of the turn which announced it
            pass
        return GradientBuffer(flat, fresh, stays=True)

    def _turns(self, item: int, visit: Visit) -> tuple[np.ndarray, int, int]:
        """The numbers that count additions to a slice's gradient, the entry of this one, and its first value."""
        host, local_rank = divmod(visit.index, self._per_host)
        segment, per_use = (
            self._segments[local_rank],
            self._per_host + 1,
        )  # the last one opens the buffer to the next use
        if host == self._host:
            return segment.home_turns, item, self._base + self._rounds[item] * per_use
        uses, slot = divmod(self._num_sums, self._num_sum_slots)
        return segment.sum_turns, slot, self._base + uses * per_use

    def _open_sums(self, slot: int, first: int) -> None:
        """Lets neighbours write to a slot for sums, once its last contents have left."""
        hop, self._hops[slot] = self._hops[slot], None
        if hop is not None:
            hop.wait_sent()
        if self._own.sum_turns[slot] < first:
            self._announce(self._own.sum_turns, slot, first)

    @torch.no_grad()
    def pass_on(self, item: int, visit: Visit) -> None:
        block, turn = divmod(visit.number, self._per_host)
        turns, which, first = self._turns(item, visit)
        self._announce(turns, which, first + turn + 1)
        if turn < self._per_host - 1:
            return
        # The last turn of a block is that of the slice whose owner has this local rank.
        if visit.index == self.position:
            self._rounds[item] += 1
            self._pending_item = item  # not waited for here: the sum may arrive while later units compute
            return
        self._num_sums += 1
        flat = self._own.sums[which][: self.numels[item][visit.index]]
        if block > 0:
            flat.add_(self._arrived(item, visit.index))
        else:
            self._settle()
        m = self._per_host
        self._hops[which] = self._arriving = Exchange(
            send=flat,
            to=(self.position - m) % self.size,
            receive=self._arrival[: self.numels[item][(visit.index + m) % self.size]],
            source=(self.position + m) % self.size,
            group=self._gradient_group,
        )

    def _arrived(self, item: int, index: int) -> Tensor:
        """Waits for the sum of the hosts before this one in the gradient of a slice."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            raise AssertionError("the sum of the other hosts' parts is not on its way")
        with self._awaiting_gradient(item, index, source=(self.position + self._per_host) % self.size):
            arriving.wait_received()
        return self._arrival[: self.numels[item][index]]

    @torch.no_grad()
    def _settle(self) -> None:
        """Adds the pending sum to its home gradient, and opens that to the next pass of the item."""
        item, self._pending_item = self._pending_item, None
        if item is not None:
            self._home_gradients[item].add_(self._arrived(item, self.position))
            self._came_home[item] += 1
            first = self._base + self._rounds[item] * (self._per_host + 1)
            self._announce(self._own.home_turns, item, first)

    # ------------------------------------------------------------- neighbours

    def _announce(self, numbers: np.ndarray, index: int, value: int) -> None:
        announce(numbers, index, value, fence=self._fence)

    def _await(self, numbers: np.ndarray, index: int, value: int, *, whom: Callable[[], int], what: str) -> None:
        """Waits until a number of the host's memory, which the rank with local rank `whom()` owes, has come so far.

        Raises:
            HeardFailure: that rank has left the step in the middle, or ended.
            RankFailure: it is late.
        """
        ranks, patience = self._ranks[self._neighbours], self._patience

        def left() -> bool:
            return bool(self._segments[whom()].counts[_BROKEN_OFF] >= self._base > 0)

        def late() -> str:
            return f"rank {ranks[whom()]} is late: this one waited {patience.timeout_s:.0f} s for {what}"

        if numbers[index] < value:
            patience.wait(lambda: numbers[index] >= value or left(), whom=whom, ranks=ranks, what=what, late=late)
            if numbers[index] < value:
                raise HeardFailure(f"rank {ranks[whom()]} has left this step in the middle, before {what}")
        with self._fence:  # reads of what was announced come after that of the number
            pass

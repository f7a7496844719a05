"""The ring over point-to-point messages (gloo, NCCL).

At each step every rank sends its home slice to one reader and receives one.

[Note: one ahead]
    While slice i is computed with, the fetch of the next slice is under way, also across units: the sequence of
        fetches of a step is the same as that of the step before, so the first fetch of the next unit starts during
        the last slice of this one. Two slots are filled in turn. If a step goes another way than the one before it,
        all ranks see it alike; they drop what came too early and fetch on demand.

Weights and gradients travel in groups of their own, so neither waits for the other or for anyone's collectives; a
send is never posted without the receive of the same hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.ring import GradientBuffer, Ring, Visit
from rotorch.core.errors import RankFailure


@dataclass(frozen=True)
class _Pass:
    """One call of `visits`."""

    item: int
    backward: bool
    fetch: bool


class _Exchange:
    """One send and one receive under way (an empty slice needs neither); each is waited for once."""

    def __init__(self, *, send: Tensor, to: int, receive: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
        wanted = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for operation, tensor, peer in ((dist.isend, send, to), (dist.irecv, receive, source))
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(wanted) if wanted else []
        if len(works) < len(wanted):  # NCCL: one handle for the whole batch
            self._sent, self._received = [], works
        else:
            self._sent = works[: 1 if send.numel() else 0]
            self._received = works[len(self._sent) :]

    def has_received(self) -> bool:
        return all(work.is_completed() for work in self._received)

    def wait_received(self) -> None:
        _wait(self._received)
        self._received = []

    def wait_sent(self) -> None:
        _wait(self._sent)
        self._sent = []

    def wait(self) -> None:
        self.wait_received()
        self.wait_sent()


def _wait(works: list[dist.Work]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:  # timed out, or the connection was closed
        raise RankFailure(f"a neighbour on the ring is late or gone: {str(error).splitlines()[0]}") from error


@dataclass
class _Fetch:
    """A fetch under way: which pass and step it is for, and the slot it fills."""

    target: _Pass
    step: int
    slot: int
    exchange: _Exchange


class SendReceiveRing(Ring):
    """See the module's notes. All ranks of `mesh` must make it together."""

    moves_weights = True
    adds_late = False  # a slot must be free for the next unit
    name = "send_receive"

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        numels: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(size=mesh.size(), position=mesh.get_local_rank(), numels=numels, dtype=dtype)
        ranks, timeout = mesh.mesh.tolist(), timedelta(seconds=timeout_s)
        self._weight_group, self._gradient_group = (
            dist.new_group(ranks, timeout=timeout, use_local_synchronization=True) if self.size > 1 else None
            for _ in range(2)
        )
        home = [n[self.position] for n in self.numels]
        self._home_weights = torch.empty(sum(home), dtype=dtype, device=device)
        self._home_gradients = torch.empty(sum(home), dtype=dtype, device=device)
        self._weights = self._home_weights.split(home)
        self._gradients = self._home_gradients.split(home)
        largest = max((max(n) for n in self.numels), default=0) if self.size > 1 else 0
        self._slots = [torch.empty(largest, dtype=dtype, device=device) for _ in range(2)]
        self._gradient_slots = [torch.empty(largest, dtype=dtype, device=device) for _ in range(2)]
        self._hops: list[_Exchange | None] = [None, None]
        """Per gradient slot: the hop that sends its contents (and receives into the other slot)."""
        self._num_fetches = 0
        self._in_flight: _Fetch | None = None
        self._passes: list[_Pass] = []
        self._last_passes: dict[bool, list[_Pass]] = {}
        self._as_before = True
        """Whether this step has gone the way of the one before it so far."""
        self._training = False

    def home_weights(self, item: int) -> Tensor:
        return self._weights[item]

    def home_gradients(self, item: int) -> Tensor:
        return self._gradients[item]

    @property
    def all_home_gradients(self) -> Tensor:
        return self._home_gradients

    def slots(self) -> list[Tensor]:
        return [*self._slots, *self._gradient_slots]

    # ------------------------------------------------------------- weights

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        self._drain()  # a pass without gradients ends without `finish`, an abandoned step in the middle
        self._passes = []
        self._as_before = True
        self._training = torch.is_grad_enabled()

    def finish(self) -> None:
        self._drain()

    def close(self) -> None:
        # The groups stay: torch names a group after its ranks, and a new one of the same name would meet the old one's
        # addresses in the store and fail to connect.
        self._drain()

    def _drain(self) -> None:
        if self._in_flight is not None:
            self._in_flight.exchange.wait()
            self._in_flight = None
        for slot, hop in enumerate(self._hops):
            if hop is not None:
                hop.wait()
            self._hops[slot] = None
        if self._passes:
            self._last_passes[self._training] = self._passes

    def visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        this = _Pass(item, backward, fetch)
        number, expected = len(self._passes), self._last_passes.get(self._training, [])
        self._as_before = self._as_before and number < len(expected) and expected[number] == this
        self._passes.append(this)
        for step, index in enumerate(self.order(backward=backward)):
            weights = self._arrive(this, step, index) if fetch else None
            ahead = self._next_fetch(this, step)
            if ahead is not None and self._in_flight is None:
                self._in_flight = self._post(*ahead)
            yield Visit(index, weights, step)
        if backward:
            self.fresh[item] = False

    def _arrive(self, this: _Pass, step: int, index: int) -> Tensor:
        """Returns slice `index`, waiting for it if need be."""
        if index == self.position:
            return self._weights[this.item]
        flight = self._in_flight
        if flight is not None and (flight.target, flight.step) != (this, step):
            flight.exchange.wait()  # this step goes another way than the one before: what came is not wanted
            flight = None
        if flight is None:
            flight = self._post(this, step)
        self._in_flight = None
        flight.exchange.wait()
        return self._slots[flight.slot][: self.numels[this.item][index]]

    def _next_fetch(self, this: _Pass, step: int) -> tuple[_Pass, int] | None:
        """The fetch after (this, step): the next step's, or the first one of the pass that is expected next."""
        if this.fetch:
            order = self.order(backward=this.backward)
            for later in range(step + 1, self.size):
                if order[later] != self.position:
                    return this, later
        if not self._as_before or self.size == 1:
            return None
        expected = self._last_passes.get(self._training, [])
        for number in range(len(self._passes), len(expected)):
            if expected[number].fetch:
                return expected[number], 0 if expected[number].backward else 1
        return None

    def _post(self, target: _Pass, step: int) -> _Fetch:
        """Starts the exchange of one step: this rank's home slice goes to its reader, another's comes here."""
        n, r = self.size, self.position
        source = self.order(backward=target.backward)[step]
        reader = (r - 1 - step) % n if target.backward else (r + step) % n
        slot = self._num_fetches % 2
        self._num_fetches += 1
        numel = self.numels[target.item][source]
        exchange = _Exchange(
            send=self._weights[target.item],
            to=reader,
            receive=self._slots[slot][:numel],
            source=source,
            group=self._weight_group,
        )
        return _Fetch(target, step, slot, exchange)

    # ------------------------------------------------------------- gradients

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        n, step = self.size, visit.step
        home = self._gradients[item]
        if n == 1:
            return GradientBuffer(home, self.fresh[item])
        slot, other = step % 2, (step + 1) % 2
        travelling = self._gradient_slots[slot][: self.numels[item][visit.index]]
        if step == 0:
            self._release(slot)
            return GradientBuffer(travelling, True)
        hop = self._hops[other]  # sent the last slice's gradient from the other slot, receives into this one
        if hop is not None:
            if not wait and not hop.has_received():
                return None
            hop.wait_received()
        if step < n - 1:
            return GradientBuffer(travelling, False)
        if self.fresh[item]:  # own slice: the sum of all others has arrived
            home.copy_(travelling)
        else:
            home.add_(travelling)
        return GradientBuffer(home, False)

    def pass_on(self, item: int, visit: Visit) -> None:
        n, r, step = self.size, self.position, visit.step
        if step == n - 1:
            return
        slot, other = step % 2, (step + 1) % 2
        self._release(other)
        arriving = (visit.index + 1) % n
        self._hops[slot] = _Exchange(
            send=self._gradient_slots[slot][: self.numels[item][visit.index]],
            to=(r - 1) % n,
            receive=self._gradient_slots[other][: self.numels[item][arriving]],
            source=(r + 1) % n,
            group=self._gradient_group,
        )

    def _release(self, slot: int) -> None:
        """Waits until what a gradient slot held has left."""
        hop = self._hops[slot]
        if hop is not None:
            hop.wait()
            self._hops[slot] = None

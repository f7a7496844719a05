"""Spans of computing, waiting and messages under way on one rank, recorded by an observer for pictures of a step.

Nothing here runs without an observer: `observe_ring` and `observe_waits` put wrappers in place for the time of a
block and take them away again, so the ring and torch.distributed pay nothing otherwise.

[Note: waits of a ring]
    All time that `visits` takes to give the next slice is waiting for a slice, and all time in `gradient` and `pass_on`
    is waiting for a gradient, with all of the transport's work there: waits, messages, copies. Computing alone would
    not need it. Additions that were kept back (`Ring.defer`) and are made there count as waiting too.

[Note: under way]
    A message is under way from its posting until a wait for it ends: it may have come earlier without notice. Shared
    memory has no messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rotorch._torch_private import functional_collectives
from rotorch.comm.ring import Ring, Visit
from rotorch.comm.shared_memory_reduce import SharedMemoryReduce
from rotorch.core.quantities import format_bytes
from rotorch.pipelining.actions import Action

_SHORTEST_WAIT_S = 5e-6
"""Shorter waits are only the time of the check itself."""


class Activity(StrEnum):
    """The activity that a span of time was spent on."""

    VISIT = "visit"  # computing with a slice
    SLICE = "slice"  # waiting for one
    GRADIENT = "gradient"  # waiting for a gradient, or handing it on
    COLLECTIVE = "collective"  # waiting for any other operation of torch.distributed
    FETCH = "fetch"  # a slice is under way
    HOP = "hop"  # a gradient is under way
    BLOCK = "block"  # the forward of one of the model's repeated blocks
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Span:
    """From `start_s` to `end_s` on `time.perf_counter`, which on Linux all processes of a machine share."""

    doing: Activity
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class ActionSpan:
    """An action of a pipeline's row, of the `chunk`-th stage of its rank, on the clock of `Span`."""

    action: Action
    chunk: int
    start_s: float
    end_s: float


@dataclass
class Observer:
    """Collects the spans of one rank.

    Attributes:
        spans: in the order in which they ended.
        actions: of a pipeline's rows, in their order.
    """

    spans: list[Span] = field(default_factory=list)
    actions: list[ActionSpan] = field(default_factory=list)
    _waiting: Activity | None = None

    def note(self, doing: Activity, name: str, *, since_s: float) -> None:
        """Records a span that ends now."""
        self.spans.append(Span(doing, name, since_s, time.perf_counter()))

    @contextmanager
    def during(self, doing: Activity, name: str) -> Iterator[None]:
        """Notes the time of a block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.note(doing, name, since_s=start_s)

    @contextmanager
    def acting(self, action: Action, *, chunk: int) -> Iterator[None]:
        """Notes the time of a block, in which a pipeline does an action."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.actions.append(ActionSpan(action, chunk, start_s, time.perf_counter()))

    def wait(self, doing: Activity, name: str, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, and records its time as waiting; waits inside of it are part of it."""
        # Part of the outer wait, which counts this time already.
        if self._waiting is not None:
            return call()
        self._waiting, start_s = doing, time.perf_counter()
        try:
            return call()
        finally:
            self._waiting = None
            if time.perf_counter() - start_s > _SHORTEST_WAIT_S:
                self.note(doing, name, since_s=start_s)

    @property
    def waiting(self) -> Activity | None:
        """The kind of wait that is under way; None outside of waits."""
        return self._waiting


class Observable:
    """Questions about a model's transport on this rank. The answers here are those of a model without a ring."""

    @property
    def transport(self) -> str | None:
        """Name of the transport between ranks, where there is a choice."""
        return None

    @property
    def transport_within(self) -> str | None:
        """Name of the transport among ranks inside of a ring that share a batch; None without such ranks."""
        return None

    @property
    def num_hosts(self) -> int | None:
        """Number of hosts of that transport, where it goes by hosts."""
        return None

    def slots(self) -> list[Tensor]:
        """Buffers that slices of a ring pass through; they stay from step to step."""
        return []

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Reports computing and waiting that only the model's own code knows to `observer`, within the block."""
        return nullcontext()


@contextmanager
def observe_ring(ring: Ring, observer: Observer, *, names: Sequence[str]) -> Iterator[None]:
    """Reports every visit and wait of `ring` within the block to `observer` (see [Note: waits of a ring]).

    Args:
        ring: the observed ring.
        observer: collects the spans.
        names: of the ring's items.
    """
    visits, gradient, pass_on = ring.visits, ring.gradient, ring.pass_on

    def observed_visits(item: int, *, backward: bool, **how: Any) -> Iterator[Visit]:
        inner, phase = visits(item, backward=backward, **how), "backward" if backward else "forward"
        while True:
            visit = observer.wait(Activity.SLICE, names[item], lambda: next(inner, None))
            if visit is None:
                return
            start_s = time.perf_counter()
            try:
                yield visit
            finally:
                observer.note(Activity.VISIT, f"{names[item]} slice {visit.index} {phase}", since_s=start_s)

    def observed_gradient(item: int, visit: Visit, **how: Any) -> Any:
        name = f"{names[item]} slice {visit.index}"
        return observer.wait(Activity.GRADIENT, name, lambda: gradient(item, visit, **how))

    def observed_pass_on(item: int, visit: Visit) -> None:
        name = f"{names[item]} slice {visit.index}"
        observer.wait(Activity.GRADIENT, name, lambda: pass_on(item, visit))

    wrappers = {"visits": observed_visits, "gradient": observed_gradient, "pass_on": observed_pass_on}
    # On the instance: deleting the entries uncovers the class's methods again.
    vars(ring).update(wrappers)
    try:
        yield
    finally:
        for name in wrappers:
            del vars(ring)[name]


@contextmanager
def observe_waits(observer: Observer) -> Iterator[None]:
    """Reports this process's waits for torch.distributed from Python, and messages under way, to `observer`.

    Sums in shared memory count as well. Waits inside of C++ (torch's DDP at the end of backward) do not pass here.
    """
    functional = functional_collectives()
    wait, batch, wait_tensor = dist.Work.wait, dist.batch_isend_irecv, functional.wait_tensor
    sum_, maximum = SharedMemoryReduce.sum, SharedMemoryReduce.maximum
    under_way: dict[int, tuple[Any, Activity, str, float]] = {}
    """Per receive: its work (kept, so that its id stays its own), kind of span, name, and time of posting."""

    def observed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        done = observer.wait(Activity.COLLECTIVE, "collective", lambda: wait(work, *args, **kwargs))
        _, doing, name, posted_s = under_way.pop(id(work), (None, None, "", 0.0))
        if doing is not None:
            observer.note(doing, name, since_s=posted_s)
        return done

    def observed_wait_tensor(tensor: Any) -> Any:
        return observer.wait(Activity.COLLECTIVE, "collective", lambda: wait_tensor(tensor))

    def observed_sum(shared_reduce: SharedMemoryReduce, tensor: Tensor) -> None:
        observer.wait(Activity.COLLECTIVE, "sum", lambda: sum_(shared_reduce, tensor))

    def observed_maximum(shared_reduce: SharedMemoryReduce, tensor: Tensor) -> None:
        observer.wait(Activity.COLLECTIVE, "maximum", lambda: maximum(shared_reduce, tensor))

    def observed_batch(operations: list[dist.P2POp]) -> list[Any]:
        posted_s, works = time.perf_counter(), batch(operations)
        # NCCL gives one work for a whole batch: its messages have no times of their own.
        if observer.waiting in _BRINGS and len(works) == len(operations):
            doing = _BRINGS[observer.waiting]
            for operation, work in zip(operations, works, strict=True):
                if operation.op is dist.irecv:
                    size = format_bytes(operation.tensor.nbytes)
                    under_way[id(work)] = (work, doing, f"{size} from {operation.group_peer}", posted_s)
        return works

    dist.Work.wait, dist.batch_isend_irecv = observed_wait, observed_batch
    functional.wait_tensor = observed_wait_tensor
    SharedMemoryReduce.sum, SharedMemoryReduce.maximum = observed_sum, observed_maximum  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait, dist.batch_isend_irecv = wait, batch
        functional.wait_tensor = wait_tensor
        SharedMemoryReduce.sum, SharedMemoryReduce.maximum = sum_, maximum  # type: ignore[method-assign]


_BRINGS = {Activity.SLICE: Activity.FETCH, Activity.GRADIENT: Activity.HOP}

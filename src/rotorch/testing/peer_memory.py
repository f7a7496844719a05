"""Peer memory without GPUs: windows in mapped files, and lanes that run late, early, or at random, and watch the order.

A ring over symmetric memory is right if only its own marks and signals hold its lanes back. So this stand-in for CUDA
runs a lane's work at any time that marks and signals allow: at once ("early"), only when other work needs it ("late"),
or in between ("random"). A ring that forgets a mark computes with values that are not there yet, or overwritten.

[Note: clocks]
    Lucky timing hides no error either. Every work item has a place in its lane's sequence, and marks tell a lane how
    far the others have come. Of two accesses to the same memory, one of which writes, one
    must have seen the other, or `OutOfOrder` is raised, at whatever time they ran. The compute lane is the process
    itself: `watched()` sees its reads and writes.

[Note: windows]
    Data of other ranks is checked by a flag: a copy into a peer's window marks its range as unread, an
    addition from one's own window marks it as read. Writing an unread range and reading a read one raise.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import TorchDispatchMode, storage_key, tree_flatten
from rotorch.comm.collectives import barrier, gather_objects
from rotorch.comm.shared_file import shared_memory_directory
from rotorch.core.errors import RankFailure

_NUM_CHANNELS = 8
_PATIENCE_S = 120.0

Clock = dict[str, int]
"""How far each lane has come, as far as somebody has seen it."""


class OutOfOrder(AssertionError):
    """Memory is used by two that do not know of each other."""


@dataclass(frozen=True)
class FakeMark:
    """A mark in a lane: after so much work, with the marks that the lane had seen then."""

    lane: FakeLane
    position: int
    clock: Clock


@dataclass
class _Access:
    """Use of a range of a storage by one lane, with its time on that lane's own clock."""

    start: int
    end: int
    lane: str
    time: int
    writes: bool


@dataclass
class _Work:
    """Work item of a lane: when it can run, and its effect."""

    ready: Callable[[], bool]
    run: Callable[[], None]
    waits_for: FakeMark | None = None


class FakeLane:
    """A queue of work with a clock. The compute lane's work is done at once, waiting for what it needs."""

    def __init__(self, memory: FakePeerMemory, name: str) -> None:
        self._memory, self.name = memory, name
        self._work: deque[_Work] = deque()
        self._given = self._done = 0
        self.clock: Clock = {name: 0}

    # ------------------------------------------------------------- what a ring calls

    def mark(self) -> FakeMark:
        self._memory.check_open(self)
        made = FakeMark(self, self._given, dict(self.clock))
        self.clock[self.name] += 1
        return made

    def after(self, mark: FakeMark) -> None:
        for lane, seen in mark.clock.items():
            self.clock[lane] = max(self.clock.get(lane, 0), seen)
        self._give(_Work(lambda: mark.lane.has_reached(mark), lambda: None, waits_for=mark))

    def copy(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        memory = self._memory
        for target, source in zip(to, sources, strict=True):
            memory.note(self, source, writes=False)
            memory.note(self, target, writes=True)
            self._give(_Work(lambda: True, partial(memory.copy, target, source)))

    def add(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        memory = self._memory
        for target, source in zip(to, sources, strict=True):
            memory.note(self, source, writes=False)
            memory.note(self, target, writes=True)
            self._give(_Work(lambda: True, partial(memory.add, target, source)))

    def signal(self, peer: int, *, channel: int) -> None:
        flags = self._memory.flags(peer, channel)
        me = self._memory.rank

        def run() -> None:
            if flags[me]:
                raise OutOfOrder(f"rank {me} signals rank {peer} on channel {channel}, which its last signal waits on")
            flags[me] = 1

        self._give(_Work(lambda: True, run))

    def wait_signal(self, peer: int, *, channel: int) -> None:
        flags = self._memory.flags(self._memory.rank, channel)

        def run() -> None:
            flags[peer] = 0

        self._give(_Work(lambda: bool(flags[peer]), run))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block nothing but this lane is given work."""
        before, self._memory.open_lane = self._memory.open_lane, self
        try:
            yield
        finally:
            self._memory.open_lane = before

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, operations of this process are this lane's."""
        self._memory.drive(self.mark())
        before, self._memory.process = self._memory.process, self
        try:
            yield
        finally:
            self._memory.process = before
            self.clock[self.name] += 1

    # ------------------------------------------------------------- running it

    def has_reached(self, mark: FakeMark) -> bool:
        return self._done >= mark.position

    def run_one(self) -> bool:
        """Runs the next piece of work if it can run; returns whether it did."""
        if not self._work or not self._work[0].ready():
            return False
        with self._memory.unwatched():
            self._work.popleft().run()
        self._done += 1
        return True

    def push(self) -> bool:
        """Gets this lane on by one piece, its own or one that it waits for; returns whether anything happened."""
        if not self._work:
            return False
        waits_for = self._work[0].waits_for
        if waits_for is not None and not waits_for.lane.has_reached(waits_for):
            return waits_for.lane.push()
        return self.run_one()

    def _give(self, work: _Work) -> None:
        self._memory.check_open(self)
        self._given += 1
        self._work.append(work)
        if self.name == "compute":
            self._memory.drive(self.mark())
        else:
            self._memory.something_was_given()


class FakePeerMemory:
    """A `PeerMemory` over mapped files. All ranks of `mesh` must make it together.

    Args:
        mesh: the ring.
        device: not used.
        numel: elements of each window.
        dtype: of the windows.
        schedule: "early", "late" or "random".
        seed: of the random schedule.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        numel: int,
        dtype: torch.dtype,
        schedule: str = "random",
        seed: int = 0,
    ) -> None:
        self.rank, self._mesh, self._dtype, self._numel = mesh.get_local_rank(), mesh, dtype, numel
        self._schedule, self._random = schedule, random.Random(f"{seed} {self.rank}")
        self._flag_bytes = 8 * _NUM_CHANNELS * mesh.size()
        size = self._flag_bytes + 2 * numel * dtype.itemsize  # the second half: which elements nobody has read
        descriptor, path = tempfile.mkstemp(prefix="rotorch-peers-", dir=shared_memory_directory())
        os.ftruncate(descriptor, size)
        os.close(descriptor)
        maps = []
        for theirs in gather_objects(path, mesh=mesh):
            with open(theirs, "r+b") as file:
                maps.append(mmap.mmap(file.fileno(), size))
        barrier(mesh=mesh)
        Path(path).unlink()
        self._flags = [np.frombuffer(m, dtype=np.int64, count=_NUM_CHANNELS * mesh.size()) for m in maps]
        flats = [torch.frombuffer(m, dtype=dtype, offset=self._flag_bytes, count=2 * numel) for m in maps]
        self._windows = [flat[:numel] for flat in flats]
        self._unread = [flat[numel:] for flat in flats]
        self.window, self.is_counted = self._windows[self.rank], False
        self.compute, self.fetches, self.hops = (FakeLane(self, name) for name in ("compute", "fetches", "hops"))
        self.process = self.compute
        self.open_lane: FakeLane | None = None
        """The lane that alone is given work, if one is (`Lane.open`)."""
        """The lane whose work this process does."""
        self._accesses: dict[int, list[_Access]] = defaultdict(list)
        self._mine: set[int] = set()
        self._is_watched = False

    # ------------------------------------------------------------- what a ring calls

    def of_peer(self, rank: int, start: int, numel: int) -> Tensor:
        return self._windows[rank][start : start + numel]

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        made = torch.full((numel,), float("nan"), dtype=dtype)
        self._mine.add(storage_key(made))
        return made

    def clear(self, channels: range) -> None:
        for channel in channels:
            self.flags(self.rank, channel)[:] = 0

    def barrier(self) -> None:
        barrier(mesh=self._mesh)
        self._unread[self.rank].zero_()  # what an abandoned step has left
        barrier(mesh=self._mesh)

    def reached(self, mark: FakeMark, *, timeout_s: float) -> bool:
        try:
            self.drive(mark, patience_s=timeout_s)
        except RankFailure:
            return False
        return True

    # ------------------------------------------------------------- running lanes

    def flags(self, rank: int, channel: int) -> np.ndarray:
        """The signals that `rank` has got on a channel, by sender."""
        n = self._mesh.size()
        return self._flags[rank][channel * n : (channel + 1) * n]

    def drive(self, mark: FakeMark, *, patience_s: float = _PATIENCE_S) -> None:
        """Runs what must run for `mark` to be reached; waits for other ranks' signals."""
        deadline = time.monotonic() + patience_s
        while not mark.lane.has_reached(mark):
            if not mark.lane.push():
                if time.monotonic() > deadline:
                    raise RankFailure(f"rank {self.rank} waits for a signal that does not come")
                time.sleep(5e-5)

    def something_was_given(self) -> None:
        """Runs as much of the side lanes as the schedule wants."""
        while self._schedule != "late":
            lanes = [self.fetches, self.hops]
            self._random.shuffle(lanes)
            if self._schedule == "random" and self._random.random() < 0.4:
                return
            if not any(lane.run_one() for lane in lanes):
                return

    # ------------------------------------------------------------- watching

    def note(self, lane: FakeLane, tensor: Tensor, *, writes: bool) -> None:
        """Lane `lane` uses a tensor now, by its clock: raises `OutOfOrder` if another one does, unseen."""
        key, numel = storage_key(tensor), tensor.numel()
        if not numel or key not in self._mine:
            return
        start, end = tensor.storage_offset(), tensor.storage_offset() + _extent(tensor)
        kept = []
        for other in self._accesses[key]:
            overlap = other.start < end and start < other.end
            seen = other.lane == lane.name or lane.clock.get(other.lane, 0) >= other.time
            if overlap and not seen and (writes or other.writes):
                raise OutOfOrder(
                    f"rank {self.rank}: {lane.name} {'writes' if writes else 'reads'} what {other.lane} "
                    f"{'writes' if other.writes else 'reads'} and has not been waited for"
                )
            covered = writes and seen and start <= other.start and other.end <= end
            repeated = other.lane == lane.name and other.writes == writes and (other.start, other.end) == (start, end)
            if not covered and not repeated:
                kept.append(other)
        kept.append(_Access(start, end, lane.name, lane.clock[lane.name], writes))
        self._accesses[key] = kept

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copies, as a lane does; what is written into another rank's window is unread (see [Note: windows])."""
        assert to.dtype == source.dtype, "a copy engine converts nothing"
        for window, unread in zip(self._windows, self._unread, strict=True):
            if storage_key(to) == storage_key(window):
                self._turn(unread, to, window, unread_now=True)
        to.copy_(source)

    def add(self, to: Tensor, source: Tensor) -> None:
        """Adds, as a lane does; what was in this rank's window is read now."""
        if storage_key(source) == storage_key(self.window):
            self._turn(self._unread[self.rank], source, self.window, unread_now=False)
        to.add_(source)

    def _turn(self, unread: Tensor, part: Tensor, window: Tensor, *, unread_now: bool) -> None:
        start = part.storage_offset() - window.storage_offset()
        state = unread[start : start + part.numel()]
        if bool((state != 0).any() if unread_now else (state == 0).any()):
            raise OutOfOrder(
                f"rank {self.rank}: {'overwrites what nobody has read' if unread_now else 'reads too early'}"
            )
        state.fill_(1.0 if unread_now else 0.0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts every operation of this process as one of the compute lane within the block (see [Note: clocks])."""
        self._is_watched = True
        try:
            with _Watch(self):
                yield
        finally:
            self._is_watched = False

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Leaves operations to another lane within the block."""
        before, self._is_watched = self._is_watched, False
        try:
            yield
        finally:
            self._is_watched = before

    def compute_uses(self, tensor: Tensor, *, writes: bool) -> None:
        """The model reads or writes a tensor at this moment."""
        if self._is_watched:
            self.check_open(self.process)
            self.note(self.process, tensor, writes=writes)

    def check_open(self, lane: FakeLane) -> None:
        """Raises `OutOfOrder` if another lane has been opened: on a GPU its stream would be the current one."""
        if self.open_lane not in (None, lane):
            raise OutOfOrder(f"rank {self.rank}: {lane.name} is used within a block of {self.open_lane.name}")


def _extent(tensor: Tensor) -> int:
    """Elements from a tensor's first to its last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


class _Watch(TorchDispatchMode):
    def __init__(self, memory: FakePeerMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema.arguments
        given = [*zip(schema, args, strict=False), *((a, (kwargs or {}).get(a.name)) for a in schema[len(args) :])]
        writing = [a.alias_info is not None and a.alias_info.is_write for a in schema]
        if any(writing) or all(r.alias_info is None for r in func._schema.returns):  # else it only makes a view
            for (_, value), writes in zip(given, writing, strict=True):
                for tensor in tree_flatten(value)[0]:
                    if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                        self._memory.compute_uses(tensor, writes=writes)
        return func(*args, **(kwargs or {}))

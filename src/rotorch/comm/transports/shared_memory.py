"""The ring over shared memory: ranks on one host map each other's slices and read them in place. Nothing moves.

[Note: one file]
    All weights, gradients and turn counters lie in one file in a memory file system, which all ranks of the ring map.
    Each rank allocates what is its own (so that a full disk is an error here and not a crash later, and pages lie in
    the memory next to their owner's processor). The file is unlinked at once: when the last process is gone, so is
    the memory. Should the process be killed before that, the next ring on this host removes the file: its name tells
    the process, and in which space of process ids it has this number (containers may share the file system only).

[Note: side by side]
    An item's slices lie one after another, so that all of them together are one tensor: whoever can read a weight
    where it lies may read it whole, and need not take its slices one by one. Gradients lie rank by rank.

[Note: another precision]
    If slices are computed with in another dtype than they have at home, a visit converts its slice into a slot of this
    rank, also its own: each home could keep a converted copy for all instead, but that would stay all the time.

[Note: turns]
    Gradients are added in the owner's memory. A slice's turn counter says how many visits it has had in this step;
    the rank whose turn it is adds and increments. Each step has its own base, written by the owner once its optimizer
    is done with the last gradient, so a step that was abandoned half-way leaves nothing to clean up.

Writes to a gradient must be seen before the turn that announces them. x86 keeps stores in order; `_fence` is for
machines that do not.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import gather_objects
from rotorch.comm.ring import GradientBuffer, Ring, Visit
from rotorch.core.errors import RankFailure
from rotorch.core.quantities import format_bytes

_ALIGNMENT = 64
_STEP = 1 << 24  # turns between the bases of two steps: more visits than a step can have
_YIELDS = 2000  # then sleep: a rank that waits long must not take cycles from the one it waits for
_YIELDS_CROWDED = 20  # where ranks exceed cores, and so the one that is waited for may have none


class SharedMemoryUnavailable(Exception):
    """Why shared memory cannot be used here."""


def shared_memory_directory() -> Path:
    """Where shared memory lies: `ROTORCH_SHARED_MEMORY_DIR`, or `/dev/shm`."""
    return Path(os.environ.get("ROTORCH_SHARED_MEMORY_DIR", "/dev/shm"))


def _host() -> str:
    """Names this running host; containers that share a kernel differ in their host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}:{boot.read_text().strip() if boot.exists() else ''}"


def _file_prefix() -> str:
    """Begins the names of files whose next part is a process id as this process counts them."""
    space = Path("/proc/self/ns/pid")
    return f"rotorch-{space.stat().st_ino if space.exists() else 0}-"


def _sweep(directory: Path) -> None:
    """Removes files of processes that were killed between making one and unlinking it."""
    for file in directory.glob(f"{_file_prefix()}*"):
        owner = file.name.removeprefix(_file_prefix()).partition("-")[0]
        if owner.isdigit() and not _runs(int(owner)):
            with suppress(OSError):  # somebody else's, or swept by another job at this moment
                file.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ranks_here(ring_size: int) -> int:
    """How many ranks of the job this host runs, as far as is known: torchrun tells."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(ring_size, int(told) if told.isdigit() else 0)


def _num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Extent:
    """Bytes of the file."""

    start: int
    num_bytes: int


class _Plan:
    """What lies where in the file (see [Note: one file] and [Note: side by side]).

    Attributes:
        turns: where each rank's counters start.
        wholes: each item's slices, one after another.
        gradients: each rank's gradients, all items.
        num_bytes: of the file.
    """

    def __init__(self, numels: Sequence[Sequence[int]], *, size: int, itemsize: int) -> None:
        self._numels, self._itemsize = numels, itemsize
        self._step = max(1, _ALIGNMENT // itemsize)
        header = -(-max(8 * len(numels), 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.turns = [rank * header for rank in range(size)]
        self._header, end = header, size * header
        self.wholes = []
        for numel in numels:
            self.wholes.append(_Extent(end, sum(numel) * itemsize))
            end += self._aligned(sum(numel)) * itemsize
        self.gradients = []
        for rank in range(size):
            num_bytes = sum(self._aligned(numel[rank]) for numel in numels) * itemsize
            self.gradients.append(_Extent(end, num_bytes))
            end += num_bytes
        self.num_bytes = end

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._step) * self._step

    def gradient_starts(self, rank: int) -> list[int]:
        """Where each item starts in a rank's gradients, in elements."""
        return list(itertools.accumulate((self._aligned(n[rank]) for n in self._numels), initial=0))[:-1]

    def owned(self, rank: int) -> list[_Extent]:
        """What a rank allocates: its counters, its slices, its gradients."""
        slices = [
            _Extent(whole.start + sum(n[:rank]) * self._itemsize, n[rank] * self._itemsize)
            for whole, n in zip(self.wholes, self._numels, strict=True)
        ]
        return [_Extent(self.turns[rank], self._header), *slices, self.gradients[rank]]


class SharedMemoryRing(Ring):
    """See the module's notes. All ranks of `mesh` must make it together.

    Raises:
        SharedMemoryUnavailable: the ranks are on several hosts, or the file system is missing or too small.
    """

    moves_weights = False
    adds_late = True
    name = "shared_memory"

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        numels: Sequence[Sequence[int]],
        dtype: torch.dtype,
        wire_dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        whole: bool = False,
    ) -> None:
        super().__init__(
            size=mesh.size(), position=mesh.get_local_rank(), numels=numels, dtype=dtype, wire_dtype=wire_dtype
        )
        converts = self.wire_dtype != self.dtype
        self.moves_weights = converts
        largest = max((max(n) for n in self.numels), default=0)
        self._slot = torch.empty(largest if converts else 0, dtype=self.wire_dtype)
        self._in_slot: tuple[int, int] | None = None
        """Which item's which slice the slot holds, as weights are in this step."""
        self.gives_whole = whole
        self._timeout_s = timeout_s
        self._yields = _YIELDS_CROWDED if _ranks_here(self.size) > _num_cores() else _YIELDS
        self._base = 0
        self._rounds = [0] * len(self.numels)
        self._fence = threading.Lock()
        self._plan = _Plan(self.numels, size=self.size, itemsize=dtype.itemsize)
        self._map = self._share(mesh)
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        plan = self._plan
        self._turns = [
            np.frombuffer(self._map, dtype=np.int64, count=len(self.numels), offset=start) for start in plan.turns
        ]
        self._wholes = [self._typed(flat, extent) for extent in plan.wholes]
        self._weights = [whole.split(numel) for whole, numel in zip(self._wholes, self.numels, strict=True)]
        self._all_gradients = [self._typed(flat, extent) for extent in plan.gradients]
        self._gradients = [self._parts(rank) for rank in range(self.size)]

    # ------------------------------------------------------------- memory

    def _share(self, mesh: DeviceMesh) -> mmap.mmap:
        """Makes the file, maps it on all ranks, and unlinks it."""
        if self.size == 1:  # private memory will do
            return mmap.mmap(-1, self._plan.num_bytes)
        path, reason = self._create() if self.position == 0 else (None, "")
        try:
            first, *_ = offers = gather_objects((_host(), path, reason), mesh=mesh)
            if first[2]:
                raise SharedMemoryUnavailable(first[2])
            if len({host for host, _, _ in offers}) > 1:
                raise SharedMemoryUnavailable("the ranks are on several hosts")
            mapped, reason = self._open(first[1])
            reasons = [why for why in gather_objects(reason, mesh=mesh) if why]
            if reasons or mapped is None:
                raise SharedMemoryUnavailable(reasons[0])
            return mapped
        finally:
            if path is not None:
                Path(path).unlink(missing_ok=True)

    def _create(self) -> tuple[str | None, str]:
        """Makes the file, empty yet. Returns its path, or why it could not be made."""
        directory, size, path = shared_memory_directory(), self._plan.num_bytes, None
        try:
            _sweep(directory)
            descriptor, path = tempfile.mkstemp(prefix=f"{_file_prefix()}{os.getpid()}-", dir=directory)
            try:
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            if path is not None:
                Path(path).unlink(missing_ok=True)
            return None, f"{format_bytes(size)} cannot be made in {directory}: {error.strerror}"
        return path, ""

    def _open(self, path: str) -> tuple[mmap.mmap | None, str]:
        """Allocates what is this rank's own, and maps the file. Returns the map, or why there is none."""
        extents = self._plan.owned(self.position)
        try:
            with open(path, "r+b") as file:
                for extent in extents:
                    if extent.num_bytes:
                        os.posix_fallocate(file.fileno(), extent.start, extent.num_bytes)
                return mmap.mmap(file.fileno(), self._plan.num_bytes), ""
        except OSError as error:
            if error.errno == errno.ENOSPC:
                size = format_bytes(self._plan.num_bytes)
                return None, f"{size} do not fit into {shared_memory_directory()}: {error.strerror}"
            return None, f"rank {self.position} cannot map {format_bytes(self._plan.num_bytes)}: {error.strerror}"

    def _typed(self, flat: Tensor, extent: _Extent) -> Tensor:
        return flat[extent.start : extent.start + extent.num_bytes].view(self.dtype)

    def _parts(self, rank: int) -> list[Tensor]:
        """The items' parts of a rank's gradients."""
        starts, flat = self._plan.gradient_starts(rank), self._all_gradients[rank]
        return [flat[start : start + n[rank]] for start, n in zip(starts, self.numels, strict=True)]

    def home_weights(self, item: int) -> Tensor:
        return self._weights[item][self.position]

    def whole_weights(self, item: int) -> Tensor | None:
        return self._wholes[item] if self.gives_whole else None

    def home_gradients(self, item: int) -> Tensor:
        return self._gradients[self.position][item]

    @property
    def all_home_gradients(self) -> Tensor:
        return self._all_gradients[self.position]

    def slots(self) -> list[Tensor]:
        return [self._slot] if self._slot.numel() else []

    # ------------------------------------------------------------- rotation

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        self._base += _STEP
        self._rounds = [0] * len(self.numels)
        self._in_slot = None
        with self._fence:
            self._turns[self.position][:] = self._base

    def visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        first, fresh = self._base + self._rounds[item] * self.size, False
        if backward:  # now, not at the end of the pass: another pass of this item may begin before (see `add_late`)
            fresh, self.fresh[item] = self.fresh[item], False
            self._rounds[item] += 1
        for step, index in enumerate(self.order(backward=backward)):
            weights = self._visiting(item, index) if fetch else None
            yield Visit(index, weights, step, first + step, fresh and step == 0)

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
        with self._fence:
            pass
        return GradientBuffer(self._gradients[visit.index][item], visit.fresh)

    def pass_on(self, item: int, visit: Visit) -> None:
        with self._fence:  # one cycle orders the gradient's stores before it, the next one the turn's after it
            pass
        with self._fence:
            self._turns[visit.index][item] = visit.turn + 1

    def _wait(self, turns: np.ndarray, item: int, visit: Visit) -> None:
        deadline, yields = time.monotonic() + self._timeout_s, 0
        while turns[item] < visit.turn:
            self.make_late()  # the one that this rank waits for may itself wait for what this one has kept back
            yields += 1
            if yields < self._yields:
                os.sched_yield()
                continue
            time.sleep(1e-4)
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"ring position {self.position} waited {self._timeout_s:.0f} s for slice {visit.index} "
                    f"of item {item} (turn {turns[item] - self._base} of {visit.turn - self._base}): "
                    "the rank before it is late"
                )

"""The ring over shared memory: ranks on one host map each other's slices and read them in place. Nothing moves.

[Note: one file per rank]
    A rank's weights, gradients and turn counters lie in one file in a memory file system, allocated in full (so that
    a full disk is an error here and not a crash later), mapped by all ranks of the ring, and unlinked at once: when
    the last process is gone, so is the memory.

[Note: turns]
    Gradients are added in the owner's memory. A slice's turn counter says how many visits it has had in this step;
    the rank whose turn it is adds and increments. Each step has its own base, written by the owner once its optimizer
    is done with the last gradient, so a step that was abandoned half-way leaves nothing to clean up.

Writes to a gradient must be seen before the turn that announces them. x86 keeps stores in order; `_fence` is for
machines that do not.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import barrier, gather_objects
from rotorch.comm.ring import GradientBuffer, Ring, Visit
from rotorch.core.errors import RankFailure
from rotorch.core.quantities import format_bytes

_ALIGNMENT = 64
_STEP = 1 << 24  # turns between the bases of two steps: more visits than a step can have
_YIELDS = 2000  # then sleep: a rank that waits long must not take cycles from the one it waits for


class SharedMemoryUnavailable(Exception):
    """Why shared memory cannot be used here."""


def shared_memory_directory() -> Path:
    """Where shared memory lies: `ROTORCH_SHARED_MEMORY_DIR`, or `/dev/shm`."""
    return Path(os.environ.get("ROTORCH_SHARED_MEMORY_DIR", "/dev/shm"))


def _host() -> str:
    """Names this running host; containers that share a kernel differ in their host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}:{boot.read_text().strip() if boot.exists() else ''}"


class SharedMemoryRing(Ring):
    """See the module's notes. All ranks of `mesh` must make it together.

    Raises:
        SharedMemoryUnavailable: the ranks are on several hosts, or the file system is missing or too small.
    """

    moves_weights = False
    adds_late = True
    name = "shared_memory"

    def __init__(
        self, *, mesh: DeviceMesh, numels: Sequence[Sequence[int]], dtype: torch.dtype, timeout_s: float = 600.0
    ) -> None:
        super().__init__(size=mesh.size(), position=mesh.get_local_rank(), numels=numels, dtype=dtype)
        self._timeout_s = timeout_s
        self._base = 0
        self._rounds = [0] * len(self.numels)
        self._fence = threading.Lock()
        self._starts = [self._layout(rank) for rank in range(self.size)]
        path, reason = self._create() if mesh.size() > 1 else (None, "")
        offers = gather_objects((_host(), path, reason), mesh=mesh)
        try:
            reasons = [why for _, _, why in offers if why]
            if reasons:
                raise SharedMemoryUnavailable(reasons[0])
            if len({host for host, _, _ in offers}) > 1:
                raise SharedMemoryUnavailable("the ranks are on several hosts")
            self._maps = [self._open(offer_path, rank) for rank, (_, offer_path, _) in enumerate(offers)]
        finally:
            barrier(mesh=mesh)  # every rank has mapped every file, or given up
            if path is not None:
                Path(path).unlink(missing_ok=True)
        flats = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]
        self._turns = [np.frombuffer(m, dtype=np.int64, count=len(self.numels)) for m in self._maps]
        self._all_weights = [self._region(flats[rank], rank, region=0) for rank in range(self.size)]
        self._all_gradients = [self._region(flats[rank], rank, region=1) for rank in range(self.size)]
        self._weights = [self._parts(self._all_weights[rank], rank) for rank in range(self.size)]
        self._gradients = [self._parts(self._all_gradients[rank], rank) for rank in range(self.size)]

    # ------------------------------------------------------------- memory

    def _layout(self, rank: int) -> list[int]:
        """Where each item starts in a rank's weights (and gradients), in elements; the total comes last."""
        step = max(1, _ALIGNMENT // self.dtype.itemsize)
        starts, total = [], 0
        for numel in self.numels:
            starts.append(total)
            total += -(-numel[rank] // step) * step
        return [*starts, total]

    def _header_bytes(self) -> int:
        return -(-max(8 * len(self.numels), 1) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _file_bytes(self, rank: int) -> int:
        return self._header_bytes() + 2 * self._starts[rank][-1] * self.dtype.itemsize

    def _create(self) -> tuple[str | None, str]:
        """Makes this rank's file, in full. Returns its path, or why it could not be made."""
        directory, size = shared_memory_directory(), self._file_bytes(self.position)
        path = None
        try:
            descriptor, path = tempfile.mkstemp(prefix="rotorch-", dir=directory)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            if path is not None:
                Path(path).unlink(missing_ok=True)
            return None, f"{format_bytes(size)} for each rank do not fit into {directory}: {error.strerror}"
        return path, ""

    def _open(self, path: str | None, rank: int) -> mmap.mmap:
        size = self._file_bytes(rank)
        if path is None:  # a ring of one: private memory will do
            return mmap.mmap(-1, size)
        try:
            with open(path, "r+b") as file:
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise SharedMemoryUnavailable(f"cannot map rank {rank}'s memory: {error.strerror}") from None

    def _region(self, flat: Tensor, rank: int, *, region: int) -> Tensor:
        size = self._starts[rank][-1] * self.dtype.itemsize
        start = self._header_bytes() + region * size
        return flat[start : start + size].view(self.dtype)

    def _parts(self, flat: Tensor, rank: int) -> list[Tensor]:
        return [flat[s : s + n[rank]] for s, n in zip(self._starts[rank], self.numels, strict=False)]

    def home_weights(self, item: int) -> Tensor:
        return self._weights[self.position][item]

    def home_gradients(self, item: int) -> Tensor:
        return self._gradients[self.position][item]

    @property
    def all_home_gradients(self) -> Tensor:
        return self._all_gradients[self.position]

    # ------------------------------------------------------------- rotation

    def start(self, *, fresh: Sequence[bool]) -> None:
        super().start(fresh=fresh)
        self._base += _STEP
        self._rounds = [0] * len(self.numels)
        with self._fence:
            self._turns[self.position][:] = self._base

    def visits(self, item: int, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        for step, index in enumerate(self.order(backward=backward)):
            turn = self._base + self._rounds[item] * self.size + step
            yield Visit(index, self._weights[index][item] if fetch else None, step, turn)
        if backward:
            self._rounds[item] += 1
            self.fresh[item] = False

    def gradient(self, item: int, visit: Visit, *, wait: bool) -> GradientBuffer | None:
        turns = self._turns[visit.index]
        if turns[item] < visit.turn:
            if not wait:
                return None
            self.catch_up()  # another rank may be waiting for what this one keeps back
            self._wait(turns, item, visit)
        with self._fence:
            pass
        return GradientBuffer(self._gradients[visit.index][item], self.fresh[item] and visit.step == 0)

    def pass_on(self, item: int, visit: Visit) -> None:
        with self._fence:  # one cycle orders the gradient's stores before it, the next one the turn's after it
            pass
        with self._fence:
            self._turns[visit.index][item] = visit.turn + 1

    def _wait(self, turns: np.ndarray, item: int, visit: Visit) -> None:
        deadline, yields = time.monotonic() + self._timeout_s, 0
        while turns[item] < visit.turn:
            yields += 1
            if yields < _YIELDS:
                os.sched_yield()
                continue
            time.sleep(1e-4)
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"ring position {self.position} waited {self._timeout_s:.0f} s for slice {visit.index} "
                    f"of item {item} (turn {turns[item] - self._base} of {visit.turn - self._base}): "
                    "the rank before it is late"
                )

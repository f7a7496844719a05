"""Memory that several processes of one host map: one file in a memory file system, and waiting for a number in it.

[Note: one file]
    Each rank allocates its own extents (so that a full disk is an error here and not a crash later, and pages lie in
    the memory next to their owner's processor). The file is unlinked at once: when the last process has ended, the
    memory is free. Should the process be killed before that, the next one to make such a file on this host removes it:
    its name has the process's id and the id's pid namespace (containers may share the file system only). The same goes
    for the directory that a launcher makes for the files of its ranks.

[Note: the same memory]
    Names do not show which ranks share memory: containers have host names of their own or one in common, with one
    `/dev/shm` or several, and a copied virtual machine has its original's names. Nor does a file that opens on both
    sides: on a network file system each host maps pages of its own. So every rank writes a random number into the file
    through its own map, behind the shared bytes, and checks that all ranks' numbers are there once all have written.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.core.quantities import format_bytes
from rotorch.process.host_memory import SHARED_MEMORY, available_bytes, room_in

_YIELDS = 2000  # then sleep: a rank that waits long must not take cycles from the one it waits for
_SLEEP_S, _SLEEPS = 1e-4, 5000  # about a second; after longer waits a millisecond more does not matter
_LONG_SLEEP_S = 1e-3
_YIELDS_CROWDED = 20  # where ranks exceed cores, and so the one that is waited for may have none
_MARK_BYTES = 16  # of a random number per rank
_SEVERAL_HOSTS = "the ranks are on several hosts, or in containers that share no memory"
_LOOK_EVERY_S = 0.25  # whether the one that is waited for still runs


class SharedMemoryUnavailable(Exception):
    """Raised where ranks cannot share memory; its text is the reason."""


@dataclass(frozen=True)
class Extent:
    """Bytes of the file."""

    start: int
    num_bytes: int


def share_file(num_bytes: int, *, group: dist.ProcessGroup | None, owned: Sequence[Extent]) -> mmap.mmap:
    """Makes a file of `num_bytes`, maps it on all ranks of `group`, and unlinks it. All of them.

    Args:
        num_bytes: its length.
        group: the ranks; None for one alone, for which private memory will do.
        owned: the extents that this rank allocates.

    Raises:
        SharedMemoryUnavailable: on all ranks: they are on several hosts, or the file system is missing or too small.
    """
    if group is None:
        return mmap.mmap(-1, num_bytes)
    position = group.rank()
    # On pages of their own, so that they can be mapped by themselves and go when the comparison is over.
    marks = Extent(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, _MARK_BYTES * group.size())
    path, reason = _create(marks.start + marks.num_bytes) if position == 0 else (None, "")
    try:
        offers = _gathered((platform.node(), path, reason), group=group)
        hosts, (_, shown, reason) = [host for host, _, _ in offers], offers[0]
        if reason:
            raise SharedMemoryUnavailable(reason)
        mapped, marked, reason = _open(
            shown, num_bytes, position=position, hosts=hosts, owned=[*owned, marks], marks=marks
        )
        mark = secrets.token_bytes(_MARK_BYTES)
        if marked is not None:
            marked[position * _MARK_BYTES :][:_MARK_BYTES] = np.frombuffer(mark, dtype=np.uint8)
        told = _gathered((mark, reason), group=group)  # all have written
        reasons = [why for _, why in told if why]
        if not reasons:
            sees_all = marked is not None and marked.tobytes() == b"".join(written for written, _ in told)
            unseen = f"rank {position} on {hosts[position]} does not see what others write"
            reasons = [why for why in _gathered("" if sees_all else f"{_SEVERAL_HOSTS}: {unseen}", group=group) if why]
        if reasons or mapped is None:
            raise SharedMemoryUnavailable(reasons[0])
        return mapped
    finally:
        # At once: every rank that can map it has, and a job that is killed leaves no file behind.
        if path is not None:
            Path(path).unlink(missing_ok=True)


def shared_memory_directory() -> Path:
    """The directory of shared files: `ROTORCH_SHARED_MEMORY_DIR`, or `/dev/shm`.

    A launcher gives its ranks a directory that it removes once all of them have started up. Files that they make later
    lie in `ROTORCH_SHARED_MEMORY_LATER`.
    """
    directory = Path(os.environ.get("ROTORCH_SHARED_MEMORY_DIR", SHARED_MEMORY))
    later = os.environ.get("ROTORCH_SHARED_MEMORY_LATER")
    return Path(later) if later is not None and not directory.is_dir() else directory


def announce(numbers: np.ndarray, index: int, value: int, *, fence: threading.Lock) -> None:
    """Writes a number that other ranks poll; earlier writes of this rank are visible before it.

    x86 keeps stores in order anyway; elsewhere taking a lock and giving it back does.
    """
    with fence:  # one cycle orders earlier stores before it, the next one the number's after it
        pass
    with fence:
        numbers[index] = value


class Patience:
    """Polling for another rank: yields, then sleeps; gives up after a timeout, or when the other process has ended.

    All ranks of `group` make it together.

    Args:
        group: the ranks that share this memory; None for one alone.
        timeout_s: after so long it gives up.
    """

    def __init__(self, *, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        num_ranks = 1 if group is None else group.size()
        self._yields = _YIELDS_CROWDED if _ranks_here(num_ranks) > _num_cores() else _YIELDS
        self._processes = [own_prefix()] if group is None else _gathered(own_prefix(), group=group)

    def wait(
        self,
        come: Callable[[], bool],
        *,
        whom: Callable[[], int],
        ranks: Sequence[int],
        what: str,
        late: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Waits until `come()`, which the rank at position `whom()` has to make true; calls `meanwhile` in every round.

        `whom()` may change while others do their part, but only a rank that still runs can change it.

        Args:
            come: returns True once this rank can go on.
            whom: position of the rank that owes it.
            ranks: numbers of the ranks, by position.
            what: what that rank owes, in the words of a message: "its part of a gradient".
            late: makes the message of a `RankFailure`.
            meanwhile: makes this rank's additions that others may wait for.

        Raises:
            HeardFailure: the rank that owes it has ended.
            RankFailure: it is late.
        """
        start, yields = time.monotonic(), 0
        look_next = start + _LOOK_EVERY_S
        while not come():
            if meanwhile is not None:
                meanwhile()
            yields += 1
            if yields < self._yields:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S if yields < self._yields + _SLEEPS else _LONG_SLEEP_S)
            now = time.monotonic()
            if now > start + self.timeout_s:
                raise RankFailure(late())
            if now > look_next:
                look_next, position = now + _LOOK_EVERY_S, whom()
                # Asked again after the look: the rank may have done its part just before it ended.
                if has_ended(self._processes[position]) and whom() == position and not come():
                    raise HeardFailure(f"rank {ranks[position]} has ended, and this one waits for {what}")


def _gathered(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's `value`, small and picklable, in the order of positions."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _create(num_bytes: int) -> tuple[str | None, str]:
    """Makes the file, still empty. Returns its path, or the reason why it could not be made."""
    directory = shared_memory_directory()
    try:
        return _create_in(directory, num_bytes)
    except OSError as error:
        # The launcher removes its directory once all ranks have started up, which may be at this very moment.
        if not directory.is_dir() and shared_memory_directory() != directory:
            return _create(num_bytes)
        if error.errno == errno.ENOSPC:
            return None, f"{format_bytes(num_bytes)} do not fit into {room_in(directory)}"
        return None, f"{format_bytes(num_bytes)} cannot be made in {directory}: {error.strerror}"


def _create_in(directory: Path, num_bytes: int) -> tuple[str | None, str]:
    sweep(directory)
    # Before any is allocated: a memory file system may be as large as the memory, and filling it ends processes.
    if num_bytes > shutil.disk_usage(directory).free:
        return None, f"{format_bytes(num_bytes)} do not fit into {room_in(directory)}"
    if num_bytes > (available := available_bytes()):
        there = format_bytes(available)
        return None, f"{format_bytes(num_bytes)} do not fit into the memory that is available, {there}"
    descriptor, path = tempfile.mkstemp(prefix=own_prefix(), dir=directory)
    try:
        # Takes no memory yet: each rank allocates its own extents, on its processor's memory node.
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return path, ""


def _open(
    path: str, num_bytes: int, *, position: int, hosts: Sequence[str], owned: Sequence[Extent], marks: Extent
) -> tuple[mmap.mmap | None, np.ndarray | None, str]:
    """Allocates this rank's extents and maps the file. Returns the map and that of all marks, or the reason why not."""
    try:
        with open(path, "r+b") as file:
            for extent in owned:
                if extent.num_bytes:
                    # An error here; without it, writing to a page of a full file system kills the process (SIGBUS).
                    os.posix_fallocate(file.fileno(), extent.start, extent.num_bytes)
            marked = mmap.mmap(file.fileno(), marks.num_bytes, offset=marks.start)
            return mmap.mmap(file.fileno(), num_bytes), np.frombuffer(marked, dtype=np.uint8), ""
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return None, None, f"{format_bytes(num_bytes)} do not fit into {room_in(Path(path).parent)}"
        if error.errno == errno.ENOENT and position > 0:
            seen = f"rank {position} on {hosts[position]} does not see {path} of rank 0 on {hosts[0]}"
            return None, None, f"{_SEVERAL_HOSTS}: {seen}"
        return None, None, f"rank {position} cannot map {format_bytes(num_bytes)}: {error.strerror}"


def own_prefix() -> str:
    """Prefix of the names of files that the next process to `sweep` removes once this process is gone."""
    return f"{_file_prefix()}{os.getpid()}-"


def _file_prefix() -> str:
    """Prefix of the names of files whose next part is a process id of this process's pid namespace."""
    space = Path("/proc/self/ns/pid")
    return f"rotorch-{space.stat().st_ino if space.exists() else 0}-"


def sweep(directory: Path) -> None:
    """Removes files and directories of processes that were killed between making one and removing it."""
    for file in directory.glob(f"{_file_prefix()}*"):
        owner = _owner(file.name)
        if owner is None or _runs(owner):
            continue
        with suppress(OSError):  # another user's, or swept by another job at this moment
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file, ignore_errors=True)
            else:
                file.unlink()


def has_ended(prefix: str) -> bool:
    """Returns True if the process with this `own_prefix` has ended, as far as this process can know."""
    pid = _owner(prefix)
    if pid is None:
        return False
    try:
        # Behind the last bracket: the process's name stands in brackets and may contain anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return not _runs(pid)
    return state in "ZX"  # ended, though its parent has not reaped it


def _owner(name: str) -> int | None:
    """Id of the process whose `own_prefix` a name begins with; None if it is of another pid namespace."""
    pid = name.removeprefix(_file_prefix()).partition("-")[0]
    return int(pid) if name.startswith(_file_prefix()) and pid.isdigit() else None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _ranks_here(ring_size: int) -> int:
    """Number of the job's ranks on this host, as far as it is known: torchrun says it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(ring_size, int(told) if told.isdigit() else 0)


def _num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

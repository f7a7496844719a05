"""Memory of a process on the host: freed memory stays with it, or goes back to the system on request.

A training step frees memory that the next one needs again. glibc returns the top of its heap to the system as it is
freed, by a threshold that it derives from the largest block it has seen; then every step gets thousands of new pages,
which the kernel clears one by one. That took 1 to 4 % of a step where it was measured (docs/lab_log.md).
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from rotorch.core.quantities import format_bytes

SHARED_MEMORY = Path("/dev/shm")
"""Directory in which Linux keeps memory that processes share by name, locks included."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt(3)
_LARGEST_ON_HEAP = 32 << 20  # the largest that glibc takes; larger blocks have pages of their own, as ever
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Makes this process keep memory that it frees, for its next step. The process's peak does not change.

    Leaves alone a process whose user has set up its allocator by environment variables (glibc's, or a preloaded one).

    Returns:
        True if it has changed anything: there must be glibc.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None or any(os.environ.get(name) for name in _SETTINGS):
        return False
    # Setting the one ends glibc's own choice of both.
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def give_back_freed_memory() -> None:
    """Returns memory that this process has freed and kept to the system, where the C library can."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def room_in(directory: Path) -> str:
    """A memory file system such as `/dev/shm`, its room, and a way to make more, for the end of a message."""
    while not os.path.ismount(directory):
        directory = directory.parent
    room = shutil.disk_usage(directory)
    larger = f"docker run --shm-size=1g, or mount -o remount,size=1g {directory}"
    return (
        f"{directory} ({format_bytes(room.free)} free of {format_bytes(room.total)}). "
        f"Make it larger{f' ({larger})' if directory == SHARED_MEMORY else ''}, or remove what fills it"
    )


def make_room() -> None:
    """Frees memory that this process does not need, before it takes much: for loading a model on a tight host.

    That is garbage in cycles, and source text: torch reads files of its own while it is imported and whenever it notes
    where it was called, and Python keeps them for the next traceback (4 MB once a model of transformers is described).
    A traceback reads them again. Source that is in no file, as of notebooks, stays.
    """
    for name, entry in [*linecache.cache.items()]:
        if len(entry) > 1 and entry[1] is not None:
            del linecache.cache[name]
    gc.collect()
    give_back_freed_memory()


def available_bytes() -> int:
    """Bytes that the processes of this machine may still take together, by free memory and by cgroups' limits."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits_of_cgroups())]))


def most_bytes() -> int:
    """Upper bound of the memory of all processes together: that of the machine, or of its cgroup."""
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    return min([there, *(limit for limit, _ in _limits_of_cgroups())])


def address_space_left_bytes() -> int | None:
    """Bytes that this process may still map before its own limit (`ulimit -v`); None without one."""
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def _limits_of_cgroups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """Limit and use of each cgroup that this process is in and that has a limit: version 2, and version 1's memory."""
    for line in _text(own).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "memory" if controllers else root
        limit, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        place = Path(name.lstrip("/"))
        for group in (place, *place.parents):
            figures = [_text(top / group / file).strip() for file in (limit, used)]
            if all(figure.isdigit() for figure in figures):  # "max": no limit
                yield int(figures[0]), int(figures[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there, or some containers hide it
        return ""


def _of_glibc(name: str) -> ctypes._NamedFuncPointer | None:  # type: ignore[name-defined]
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

"""Memory of a process on the host: what is freed stays with it, or goes back to the system when it is told to.

A training step frees what it will need again in the next one. glibc hands the top of its heap back to the system as it
is freed, by a threshold that it makes up from the largest block it has seen; then every step gets thousands of pages
anew, which the kernel clears one by one. That took 1 to 4 % of a step where it was measured (docs/lab_log.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt(3)
_LARGEST_ON_HEAP = 32 << 20  # the largest that glibc takes; larger blocks have pages of their own, as ever
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees, for its next step. The highest moment of a process stays as high as it was.

    Leaves alone a process whose user has set up its allocator by environment variables (glibc's, or a preloaded one).

    Returns:
        Whether it has changed anything: there must be glibc.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None or any(os.environ.get(name) for name in _SETTINGS):
        return False
    # Setting the one ends glibc's own choice of both.
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def give_back_freed_memory() -> None:
    """Hands memory that this process has freed and kept back to the system, where the C library can."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> ctypes._NamedFuncPointer | None:  # type: ignore[name-defined]
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None

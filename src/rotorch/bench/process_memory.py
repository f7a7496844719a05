"""Memory of a process as the kernel counts it, shared pages once.

[Note: shared pages]
    RSS counts a page in every process that maps it; PSS gives each of n processes 1/n. The kernel keeps a highest mark
    of RSS (`VmHWM`) but none of PSS. So the peak here is the highest RSS, less the excess of RSS at rest (RSS -
    PSS): exact as long as the shared pages stay mapped throughout, as mapped weights and libraries do.

[Note: allocator]
    By default glibc keeps freed memory and hands each thread an arena of its own, so that strategies cannot be told
    apart by RSS. `MALLOC_ENVIRONMENT` makes it return memory at once. It is read when a process starts: ranks that are
    measured are started afresh, not forked, and their times do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class ProcessMemory:
    """One reading. Zeros where the system does not tell (not Linux).

    Attributes:
        rss_bytes: resident, shared pages whole.
        pss_bytes: resident, shared pages divided among the processes that map them.
        private_bytes: resident and mapped by nobody else.
        highest_rss_bytes: highest `rss_bytes` since the start of the process or the last `reset_peak`.
    """

    rss_bytes: int = 0
    pss_bytes: int = 0
    private_bytes: int = 0
    highest_rss_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Highest mark with shared pages counted once (see [Note: shared pages])."""
        return self.highest_rss_bytes - (self.rss_bytes - self.pss_bytes)


def read_process_memory() -> ProcessMemory:
    """Reads this process's memory."""
    if not (_PROC / "smaps_rollup").is_file():
        return ProcessMemory()
    status = _fields((_PROC / "status").read_text())
    rollup = _fields((_PROC / "smaps_rollup").read_text())
    return ProcessMemory(
        rss_bytes=rollup["Rss"],
        pss_bytes=rollup["Pss"],
        private_bytes=rollup["Private_Clean"] + rollup["Private_Dirty"],
        highest_rss_bytes=max(status["VmHWM"], rollup["Rss"]),
    )


def reset_peak() -> None:
    """Sets the highest mark back to the resident bytes of now."""
    file = _PROC / "clear_refs"
    if file.is_file():
        file.write_text("5")


def _fields(text: str) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.removesuffix(" kB")) * 1024
    return found

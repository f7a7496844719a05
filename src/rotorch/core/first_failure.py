"""The rank that failed first, told from the ends of a job's ranks.

[Note: the cause]
    A rank that fails takes others with it: they lose their connections to it and raise, too, and may be seen to do so
    earlier. Times of arrival say little on a busy machine, so the cause is told from the kind of each end. A rank that
    died comes first, since none dies of another's end; then the earliest that raised for a reason of its own; last one
    that only heard of a failure. While all failures are hearsay, the rank that caused them has not ended yet, so the
    other ranks are waited for. A process that is exiting is waited for in any case: its connections close before its
    end can be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from rotorch.core.errors import HeardFailure

_LOST = re.compile(r"connection (closed|reset) by peer|broken pipe", re.IGNORECASE)
"""gloo's words for a rank that is gone."""
_EXITING = 0x4  # PF_EXITING of the kernel's task flags, the ninth field of /proc/PID/stat


class Evidence(IntEnum):
    """Rank of a failure as evidence of the cause; the lowest value is the strongest."""

    DIED = 0
    RAISED = 1
    HEARD = 2


@dataclass(frozen=True, order=True)
class Failure:
    """The end of one rank; the least of several is the cause (see [Note: the cause]).

    Attributes:
        evidence: kind of its end.
        at_s: time of its end, by any clock that all ranks share.
        rank: number of the rank.
        text: its end in words.
    """

    evidence: Evidence
    at_s: float
    rank: int
    text: str


def evidence_of(error: BaseException) -> Evidence:
    """Distinguishes an exception of a rank's own from one that only says that another rank has failed."""
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error))
    return Evidence.HEARD if isinstance(error, HeardFailure) or lost else Evidence.RAISED


def is_hearsay(failures: Iterable[Failure]) -> bool:
    """True if the cause of these failures may still come from a rank that has not ended."""
    return all(failure.evidence is Evidence.HEARD for failure in failures)


def is_ending(pid: int) -> bool:
    """True if a process is exiting, or has ended and is not reaped; False where the system does not tell (macOS)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)
    except (OSError, IndexError, ValueError):
        return False

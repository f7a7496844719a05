"""What each rank is doing, in memory that the launcher shares with the ranks it forks: read when one of them fails.

    | stop flag | rank 0: pid, step, phase, failure | rank 1: ... |

The memory is anonymous: nothing of it outlives the processes. A rank that torchrun started has a board for itself
alone.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

_HEADER_BYTES = 64
_SLOT = struct.Struct("<qqqqdd")  # pid, step, phase, failure kind, time of failure, time of the last change of phase
_SLOT_BYTES = 4096
_TEXT_BYTES = _SLOT_BYTES - _SLOT.size - 8


class Phase(IntEnum):
    """What a rank is doing; its text completes "failed while ..."."""

    STARTING = 0
    JOINING = 1
    BUILDING = 2
    LOADING = 3
    READING = 4
    FORWARD_BACKWARD = 5
    CLIPPING = 6
    OPTIMIZER = 7
    EVALUATING = 8
    SAVING = 9
    SAMPLING = 10
    REPORTING = 11
    DONE = 12
    EXAMINING = 13

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Phase.STARTING: "starting",
    Phase.JOINING: "joining the other ranks",
    Phase.BUILDING: "building the model",
    Phase.LOADING: "loading weights or a checkpoint",
    Phase.READING: "reading data",
    Phase.FORWARD_BACKWARD: "computing forward and backward",
    Phase.CLIPPING: "summing the gradient norm over ranks",
    Phase.OPTIMIZER: "updating the weights",
    Phase.EVALUATING: "evaluating held-out text",
    Phase.SAVING: "writing a checkpoint",
    Phase.SAMPLING: "writing the sample",
    Phase.REPORTING: "reporting",
    Phase.DONE: "leaving",
    Phase.EXAMINING: "examining its numbers",
}


class FailureKind(IntEnum):
    """Whose fault a rank's exception is."""

    NONE = 0
    INPUT = 1  # a ConfigError: the user's
    OWN = 2  # any other exception
    FINAL = 3  # one that would come again


@dataclass(frozen=True)
class RankStatus:
    """What the board says about one rank.

    Attributes:
        rank: whose it is.
        pid: its process, 0 before it started.
        step: the step it is in, 0 before the first.
        phase: what it is doing in it.
        failure: whether it ended with an exception.
        failed_at_s: when, in seconds since the epoch.
        since_s: since when it is doing that, in seconds since the epoch.
        message: the exception, in one line.
    """

    rank: int
    pid: int
    step: int
    phase: Phase
    failure: FailureKind
    failed_at_s: float
    since_s: float
    message: str

    def __str__(self) -> str:
        return f"in step {self.step}, {self.phase.text}" if self.step else self.phase.text

    @property
    def when(self) -> str:
        """Completes "failed ..."."""
        return str(self) if self.step else f"while {self.phase.text}"


class StatusBoard:
    """One slot for each of `num_ranks` ranks, and one flag that asks all of them to stop after their step."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.own_rank = 0
        self._memory = mmap.mmap(-1, _HEADER_BYTES + num_ranks * _SLOT_BYTES)

    def enter(self, rank: int, *, pid: int) -> None:
        """Called by a rank once, when it starts."""
        self.own_rank = rank
        self._write(pid=pid)

    def doing(self, phase: Phase, *, step: int | None = None) -> None:
        """Called by a rank whenever it begins something else."""
        changes = {"phase": phase, "since_s": time.time()}
        self._write(**changes if step is None else {**changes, "step": step})

    def fail(self, message: str, *, kind: FailureKind) -> None:
        """Called by a rank that ends with an exception."""
        text = message.encode(errors="replace")[:_TEXT_BYTES]
        start = self._start(self.own_rank) + _SLOT.size
        self._memory[start : start + 8 + len(text)] = struct.pack("<q", len(text)) + text
        self._write(failure=kind, failed_at_s=time.time())

    def read(self, rank: int) -> RankStatus:
        """Returns what the board says about a rank."""
        start = self._start(rank)
        pid, step, phase, failure, failed_at_s, since_s = _SLOT.unpack_from(self._memory, start)
        (length,) = struct.unpack_from("<q", self._memory, start + _SLOT.size)
        text = self._memory[start + _SLOT.size + 8 : start + _SLOT.size + 8 + length].decode(errors="replace")
        return RankStatus(rank, pid, step, Phase(phase), FailureKind(failure), failed_at_s, since_s, text)

    def all(self) -> list[RankStatus]:
        """Returns what the board says about every rank."""
        return [self.read(rank) for rank in range(self.num_ranks)]

    def request_stop(self) -> None:
        """Asks all ranks to write a checkpoint after the step they are in, and to leave. Safe in a signal handler."""
        self._memory[0] = 1

    @property
    def stop_requested(self) -> bool:
        return self._memory[0] == 1

    def _start(self, rank: int) -> int:
        return _HEADER_BYTES + rank * _SLOT_BYTES

    def _write(self, **changes: float) -> None:
        start = self._start(self.own_rank)
        names = ("pid", "step", "phase", "failure", "failed_at_s", "since_s")
        fields = dict(zip(names, _SLOT.unpack_from(self._memory, start), strict=True))
        fields.update(changes)
        _SLOT.pack_into(self._memory, start, *fields.values())

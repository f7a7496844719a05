"""Status of each rank, in memory that the launcher shares with the ranks it forks: read when one of them fails.

    | stop flag | rank 0: pid, step, phase, failure, position | rank 1: ... | names of rank 0's units | ... |

The memory is anonymous: nothing of it outlives the processes. A rank that torchrun started has a board for itself
alone.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from rotorch.comm.agreement import format_ranks
from rotorch.comm.status_word import STATUS_BYTES, StatusWord, describe_status

_HEADER_BYTES = 64
_SLOT = struct.Struct("<qqqqddq")  # pid, step, phase, failure kind, time of failure, of the last new phase, compiles
_SLOT_BYTES = 4096
_TEXT_START = _SLOT.size + STATUS_BYTES
_TEXT_BYTES = _SLOT_BYTES - _TEXT_START - 8
_NAMES_BYTES = 1 << 18  # pages that nobody writes take no memory
_STOP, _RECORD, _STOPPED = 0, 1, 2
_MOST_RANKS, _MOST_GROUPS = 16, 8


class RankPhase(IntEnum):
    """Activity of a rank; its text completes "failed while ..."."""

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
    COUNTING = 14

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    RankPhase.STARTING: "starting",
    RankPhase.JOINING: "joining the other ranks",
    RankPhase.BUILDING: "building the model",
    RankPhase.LOADING: "loading weights or a checkpoint",
    RankPhase.READING: "reading data",
    RankPhase.FORWARD_BACKWARD: "computing forward and backward",
    RankPhase.CLIPPING: "summing the gradient norm over ranks",
    RankPhase.OPTIMIZER: "updating the weights",
    RankPhase.EVALUATING: "evaluating held-out text",
    RankPhase.SAVING: "writing a checkpoint",
    RankPhase.SAMPLING: "writing the sample",
    RankPhase.REPORTING: "reporting",
    RankPhase.DONE: "leaving",
    RankPhase.EXAMINING: "examining its numbers",
    RankPhase.COUNTING: "counting what a step takes",
}


_PASSES = {RankPhase.FORWARD_BACKWARD, RankPhase.EVALUATING, RankPhase.SAMPLING, RankPhase.EXAMINING}
"""In which a position says something; after them it is what was left there."""
_COMPILES_ONCE = {RankPhase.FORWARD_BACKWARD, RankPhase.EVALUATING}
_COMPILES_AGAIN = {RankPhase.SAMPLING, RankPhase.EXAMINING}  # other lengths, and hooks


class FailureKind(IntEnum):
    """Party at fault for a rank's exception."""

    NONE = 0
    INPUT = 1  # a ConfigError: the user's
    OWN = 2  # any other exception
    FINAL = 3  # one that would come again
    HEARD = 4  # another rank's, which told this one


@dataclass(frozen=True)
class RankStatus:
    """Entry of one rank on the board.

    Attributes:
        rank: whose it is.
        pid: its process, 0 before it started.
        step: the step it is in, 0 before the first.
        phase: its activity in the step.
        failure: True if it ended with an exception.
        failed_at_s: time of that, in seconds since the epoch.
        since_s: since when it is doing that, in seconds since the epoch.
        message: the exception, in one line.
        position: in the pass, now or last: micro-batch, unit, slice, the rank it waits for; "" outside of one.
        compiles: True if it may be compiling, which takes long and says nothing.
    """

    rank: int
    pid: int
    step: int
    phase: RankPhase
    failure: FailureKind
    failed_at_s: float
    since_s: float
    message: str
    position: str = ""
    compiles: bool = False

    def __str__(self) -> str:
        return f"in step {self.step}, {self.phase.text}" if self.step else self.phase.text

    @property
    def when(self) -> str:
        """Completes "failed ..."."""
        return str(self) if self.step else f"while {self.phase.text}"


def in_groups(said: Mapping[int, str], *, verbs: tuple[str, str]) -> str:
    """`rank 1 was leaving; rank 3 was saving`: what is said of ranks, in one line.

    Of many ranks those of which the same is said stand together, and the first few of these groups are named.

    Args:
        said: by rank, in the order in which they are to stand.
        verbs: between ranks and text, for one and for several.
    """
    if len(said) <= _MOST_RANKS:
        return "; ".join(f"rank {rank} {verbs[0]} {text}" for rank, text in said.items())
    ranks_of: dict[str, list[int]] = {}
    for rank, text in said.items():
        ranks_of.setdefault(text, []).append(rank)
    shown = dict(list(ranks_of.items())[:_MOST_GROUPS])
    left = len(said) - sum(map(len, shown.values()))
    groups = [f"{format_ranks(sorted(ranks))} {verbs[len(ranks) > 1]} {text}" for text, ranks in shown.items()]
    return "; ".join(groups) + (f"; and {left} ranks more" if left else "")


class StatusBoard:
    """One slot for each of `num_ranks` ranks, and one flag that asks all of them to stop after their step."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.own_rank = 0
        self._to_compile: set[RankPhase] = set()
        self._memory = mmap.mmap(-1, _HEADER_BYTES + num_ranks * (_SLOT_BYTES + _NAMES_BYTES))

    def enter(self, rank: int, *, pid: int) -> None:
        """Called by a rank once, when it starts."""
        self.own_rank = rank
        self._write(pid=pid)

    def doing(self, phase: RankPhase, *, step: int | None = None) -> None:
        """Called by a rank whenever it begins something else."""
        changes = {"phase": phase, "since_s": time.time(), "compiles": phase in self._to_compile}
        if phase in _COMPILES_ONCE:
            self._to_compile.discard(phase)
        self._write(**changes if step is None else {**changes, "step": step})

    def will_compile(self) -> None:
        """Called by a rank whose model is compiled when it is first used: that may take as long as it likes."""
        self._to_compile = _COMPILES_ONCE | _COMPILES_AGAIN

    @property
    def position(self) -> StatusWord:
        """Word in which this rank records its position in a pass."""
        return StatusWord.from_buffer(self._memory, self._start(self.own_rank) + _SLOT.size)

    def name_units(self, names: Sequence[str]) -> None:
        """Called by a rank when it knows its units: the names that its positions speak of by number."""
        text = "\n".join(names).encode()[: _NAMES_BYTES - 1]
        start = self._names_start(self.own_rank)
        self._memory[start : start + len(text) + 1] = text + b"\0"

    def fail(self, message: str, *, kind: FailureKind) -> None:
        """Called by a rank that ends with an exception."""
        text = message.encode(errors="replace")[:_TEXT_BYTES]
        start = self._start(self.own_rank) + _TEXT_START
        self._memory[start : start + 8 + len(text)] = struct.pack("<q", len(text)) + text
        self._write(failure=kind, failed_at_s=time.time())

    def read(self, rank: int) -> RankStatus:
        """Returns a rank's status on the board."""
        start = self._start(rank)
        pid, step, phase, failure, failed_at_s, since_s, compiles = _SLOT.unpack_from(self._memory, start)
        position = StatusWord.from_buffer_copy(self._memory, start + _SLOT.size)
        start += _TEXT_START
        (length,) = struct.unpack_from("<q", self._memory, start)
        return RankStatus(
            rank,
            pid,
            step,
            RankPhase(phase),
            FailureKind(failure),
            failed_at_s,
            since_s,
            message=self._memory[start + 8 : start + 8 + length].decode(errors="replace"),
            position=self._words(rank, position) if phase in _PASSES else "",
            compiles=bool(compiles),
        )

    def mark(self, rank: int) -> tuple[float, ...]:
        """Numbers that change whenever a rank gets on."""
        start = self._start(rank)
        _, step, phase, _, _, since_s, _ = _SLOT.unpack_from(self._memory, start)
        position = StatusWord.from_buffer_copy(self._memory, start + _SLOT.size)
        return step, phase, since_s, position.now, position.micro_batch, position.passes

    def _words(self, rank: int, position: StatusWord) -> str:
        start = self._names_start(rank)
        end = self._memory.find(b"\0", start, start + _NAMES_BYTES)
        names = self._memory[start:end].decode(errors="replace").split("\n") if end > start else []
        return describe_status(position.now, position.micro_batch, position.peer, names=names)

    def all(self) -> list[RankStatus]:
        """Returns every rank's status on the board."""
        return [self.read(rank) for rank in range(self.num_ranks)]

    def request_stop(self, *, signal_number: int) -> None:
        """Asks all ranks to write a checkpoint after the step they are in, and to leave. Safe in a signal handler."""
        self._memory[_STOP] = self._memory[_STOP] or signal_number  # the first one is the reason

    @property
    def stop_requested(self) -> bool:
        return self._memory[_STOP] != 0

    @property
    def stop_signal(self) -> int:
        """The number of the signal that asked for it; 0 if none did."""
        return self._memory[_STOP]

    def note_stopped(self) -> None:
        """Called by a rank that leaves before the last step, since it was asked to."""
        self._memory[_STOPPED] = 1

    @property
    def stopped_early(self) -> bool:
        return self._memory[_STOPPED] == 1

    def request_record(self) -> None:
        """Asks all ranks to write down what torch has recorded of their collectives (see `watchdog.py`)."""
        self._memory[_RECORD] = 1

    @property
    def record_requested(self) -> bool:
        return self._memory[_RECORD] == 1

    def _start(self, rank: int) -> int:
        return _HEADER_BYTES + rank * _SLOT_BYTES

    def _names_start(self, rank: int) -> int:
        return _HEADER_BYTES + self.num_ranks * _SLOT_BYTES + rank * _NAMES_BYTES

    def _write(self, **changes: float) -> None:
        start = self._start(self.own_rank)
        names = ("pid", "step", "phase", "failure", "failed_at_s", "since_s", "compiles")
        fields = dict(zip(names, _SLOT.unpack_from(self._memory, start), strict=True))
        fields.update(changes)
        _SLOT.pack_into(self._memory, start, *fields.values())

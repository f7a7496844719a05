"""Ends of ranks, as the launcher sees them, and the choice of the one that failed first."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rotorch.core.errors import ConfigError, FinalFailure, RankFailure, RotorchError
from rotorch.core.first_failure import is_ending
from rotorch.train.launch.failure_report import process_state, take_records, take_stacks, write_report
from rotorch.train.launch.status import FailureKind, RankPhase, RankStatus, StatusBoard, in_groups
from rotorch.train.launch.watchdog import StallClock, explain_hang

_LOOK_EVERY_S = 0.02
_GRACE_S = 1.0
"""Seconds for the surviving ranks to write their state for the report, once the cause is known."""
_LONGEST_POST_MORTEM_S = 600.0
"""Seconds to wait for the rank that knows the cause while every rank that has ended only heard of a failure."""


@dataclass(frozen=True)
class ProcessExit:
    """End of a rank's process: by signal `signal_number`, or with `exit_code`; None if unknown."""

    exit_code: int | None = 0
    signal_number: int = 0

    def __str__(self) -> str:
        if self.exit_code is None:
            return "died"
        if not self.signal_number:
            return f"ended with exit code {self.exit_code}"
        try:
            name = signal.Signals(self.signal_number).name
        except ValueError:
            name = f"signal {self.signal_number}"
        why = " (the system does that when memory runs out)" if self.signal_number == signal.SIGKILL else ""
        return f"was killed by {name}{why}"


def exit_of(exit_code: int) -> ProcessExit:
    """The end that Python's `exitcode` of a process tells of: -9 is SIGKILL."""
    return ProcessExit(signal_number=-exit_code) if exit_code < 0 else ProcessExit(exit_code=exit_code)


class RankMonitor:
    """Looks how ranks are, and ends the others when one of them failed.

    Attributes:
        board: on which ranks note what they are doing.
        pids: the ranks' processes, by rank; empty before they are started.
        exits: ends of ranks that failed by themselves, in the order in which they were noticed.
        stacks: the directory in which ranks answer where they are (see failure_report.py).
        report: file for a page about a failure; not written if its directory is not there.
        timeout_s: when no rank has got on for so long, the job has failed.
    """

    def __init__(
        self,
        board: StatusBoard,
        *,
        stacks: Path | None = None,
        report: Path | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        self.board = board
        self.timeout_s = timeout_s
        self._progress = StallClock(board)
        self.stacks = stacks
        self.report = report
        self.pids: dict[int, int] = {}
        self.exits: dict[int, ProcessExit] = {}
        self._ended: set[int] = set()

    def look(self, pids: Mapping[int, int]) -> None:
        """Looks once. Call it before anyone reaps the processes, or it cannot tell how they ended.

        Raises:
            RankFailure: a rank failed: which, how, and what it was doing. The others have been killed.
            ConfigError: a rank found the input to be wrong.
        """
        self.pids = dict(pids)
        if not self._note():
            self._look_for_a_hang()
            return
        start = time.monotonic()
        while len(self._ended) < len(self.pids):
            limit_s = min(self.timeout_s, _LONGEST_POST_MORTEM_S) if self._only_heard() else _GRACE_S
            if time.monotonic() > start + limit_s and not self._are_ending():
                break
            time.sleep(_LOOK_EVERY_S)
            self._note()
        error = explain(self.board.all(), exits=self.exits)
        if not isinstance(error, ConfigError):
            error = self._report(error)
        self.kill()
        raise error

    def _only_heard(self) -> bool:
        """True if each rank that failed reports another rank's failure."""
        return all(self.board.read(rank).failure is FailureKind.HEARD for rank in self.exits)

    def _are_ending(self) -> bool:
        """True while a rank is exiting and its exit status is not known yet ([Note: the cause])."""
        return any(is_ending(pid) for rank, pid in self.pids.items() if rank not in self._ended)

    def _look_for_a_hang(self) -> None:
        """Raises if no rank gets on any more; what they wait for is as it is."""
        still_s = self._progress.look(skip=self._ended)
        if min(still_s.values(), default=0.0) < self.timeout_s:
            return
        states = {rank: process_state(pid) for rank, pid in self.pids.items() if rank in still_s}
        error = explain_hang([self.board.read(rank) for rank in still_s], still_s=still_s, states=states)
        if error is None:
            return
        failure = self._report(error, still_s=still_s)
        self.kill()
        raise failure

    def _report(self, error: RotorchError, *, still_s: Mapping[int, float] | None = None) -> RotorchError:
        """Writes the positions of all ranks to a file, and names the file in the error."""
        if self.stacks is None or self.report is None or not self.report.parent.is_dir():
            return error
        alive = {rank: pid for rank, pid in self.pids.items() if rank not in self._ended}
        stacks = take_stacks(self.stacks, pids=alive)
        self.board.request_record()
        written = write_report(
            self.report,
            headline=str(error),
            statuses=self.board.all(),
            stacks=stacks,
            records=take_records(self.stacks, ranks=alive),
            still_s=still_s or self._progress.still_s,
        )
        return type(error)(f"{error}. Who was where: {self.report}") if written else error

    def kill(self) -> None:
        """Kills all ranks that are alive."""
        for rank, pid in self.pids.items():
            if rank not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _note(self) -> bool:
        """Notes ranks that ended since; returns True if any failed."""
        for rank, pid in self.pids.items():
            end = None if rank in self._ended else _exit_status_of(pid)
            if end is None:
                continue
            self._ended.add(rank)
            is_done = self.board.read(rank).phase is RankPhase.DONE
            if not is_done or end not in (ProcessExit(), ProcessExit(exit_code=None)):
                self.exits[rank] = end
        return bool(self.exits)


def _exit_status_of(pid: int) -> ProcessExit | None:
    """Returns the end of a child's process, None while it lives. Does not reap it."""
    if not hasattr(os, "waitid"):  # macOS: then the elastic launcher has to notice, which takes longer
        return None
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # reaped: Python does that to a process that ends while another one is started
        return ProcessExit(exit_code=None)
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return ProcessExit(exit_code=ended.si_status)
    return ProcessExit(signal_number=ended.si_status)


def explain(statuses: list[RankStatus], *, exits: Mapping[int, ProcessExit]) -> RotorchError:
    """Says which rank failed first: one that vanished, since others then missed it; else the earliest exception."""
    vanished = [statuses[rank] for rank in exits if statuses[rank].failure is FailureKind.NONE]
    raised = [s for s in statuses if s.failure is not FailureKind.NONE]
    raised.sort(key=lambda s: (s.failure is FailureKind.HEARD, s.failed_at_s))  # who only heard of it may be earlier
    wrong_input = next((s for s in raised if s.failure is FailureKind.INPUT), None)
    if wrong_input is not None and not vanished:
        return ConfigError(wrong_input.message)
    kind = RankFailure
    if vanished:
        first = vanished[0]
        what = f"rank {first.rank} {exits[first.rank]} {first.when}"
    elif raised:
        first = raised[0]
        what = f"rank {first.rank} failed {first.when}: {first.message}"
        kind = FinalFailure if first.failure is FailureKind.FINAL else RankFailure
    else:
        return RankFailure("a rank failed, and none of them says why")
    others = in_groups({s.rank: str(s) for s in statuses if s.rank != first.rank}, verbs=("was", "were"))
    return kind(what + (f" ({others})" if others else ""))

"""Watch over the progress of ranks, and the messages when they make none.

[Note: who looks]
    The launcher sees the positions of all its ranks (`status.py`), so it notices a standstill while they still wait.
    Under torchrun no process sees all ranks: each rank watches itself, and writes its own part of the run's report.

[Note: what getting on is]
    A change of any number of a rank's status: its step and phase, and in a pass micro-batch, slice, block of the model,
    stage, or the rank it waits for. So a micro-batch may take any time, if no block of it takes `timeout_s`.
    A compiled model's blocks record nothing: there progress is a micro-batch (under rtp a slice, as ever). A rank
    that computes longer than that looks like one in an endless loop; the message says so.

[Note: what may take long]
    Only the steps of a run always make progress. Building a model, and reading or writing a checkpoint, may take
    longer than a message should, without any change of status; so may counting what a step takes, when a run has
    ended, and torch.compile in the first step, the first evaluation, and with new shapes or hooks. There only the
    timeouts of the process group find a hang, or the watchdog a stopped rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rotorch._torch_private import flight_record
from rotorch.core.errors import RankFailure
from rotorch.train.launch.failure_report import REPORT, RUNNING, describe_rank, process_state, record_file
from rotorch.train.launch.status import RankPhase, RankStatus, StatusBoard, in_groups

BACKSTOP_S = 20.0
"""How much later than the watchdog a rank gives up by itself."""

_MOVING = {
    RankPhase.READING,
    RankPhase.FORWARD_BACKWARD,
    RankPhase.CLIPPING,
    RankPhase.OPTIMIZER,
    RankPhase.EVALUATING,
    RankPhase.EXAMINING,
    RankPhase.SAMPLING,
    RankPhase.REPORTING,
}
"""See [Note: what may take long]."""
_LONGEST_LOOK_S = 1.0  # between two looks no more passes than that: the machine itself was asleep
_LOOK_EVERY_S = 0.25
_MOST_ENTRIES = 8
_RANK_FAILED = 3


class StallClock:
    """Time for which each rank of a board has made no progress.

    Attributes:
        still_s: seconds, by rank, as of the last look.
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._marks: dict[int, tuple[float, ...]] = {}
        self._looked_s = time.monotonic()
        self.still_s: dict[int, float] = {}

    def look(self, *, skip: Collection[int] = ()) -> dict[int, float]:
        """Looks at all ranks but `skip`, and returns for how long none of their numbers has changed."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        for rank in range(self._board.num_ranks):
            mark = self._board.mark(rank)
            self.still_s[rank] = self.still_s.get(rank, 0.0) + passed_s if self._marks.get(rank) == mark else 0.0
            self._marks[rank] = mark
        return {rank: still_s for rank, still_s in self.still_s.items() if rank not in skip}


def explain_hang(
    statuses: Sequence[RankStatus], *, still_s: Mapping[int, float], states: Mapping[int, str]
) -> RankFailure | None:
    """Names waiting ranks and the ranks they wait for, when none gets on; None where that may take long.

    Args:
        statuses: of all ranks that have not ended.
        still_s: for how long each has not got on.
        states: state of each process by the kernel.
    """
    stopped = [s for s in statuses if states.get(s.rank, "").startswith("stopped")]
    if not stopped and not all(map(_moves, statuses)):
        return None
    # Who is waited for stood still before those who wait for it.
    first, *others = sorted(statuses, key=lambda s: (s not in stopped, -still_s[s.rank]))
    kind = f" ({states[first.rank]})" if first in stopped else ""
    what = f"rank {first.rank}{kind} has not got on for {still_s[first.rank]:.0f} s: it is {_where(first)}"
    rest = in_groups({s.rank: f"{_where(s)}, for {still_s[s.rank]:.0f} s" for s in others}, verbs=("is", "are"))
    return RankFailure(what + (f" ({rest})" if rest else "") + _if_slow(states.get(first.rank, "")))


def _if_slow(state: str) -> str:
    """Returns the advice for a rank that may be slow rather than stuck, by its state in the kernel.

    Who waits for a GPU may do that in a loop, which the kernel calls running, too.
    """
    if state != RUNNING:
        return ""
    return ". It may be computing: if that may take so long, write a longer train.timeout_s"


def _moves(status: RankStatus) -> bool:
    return status.phase in _MOVING and not status.compiles


def _where(status: RankStatus) -> str:
    return f"{status}, {status.position}" if status.position else str(status)


# ---------------------------------------------------------------- inside of a rank


def keep_record(board: StatusBoard, *, directory: Path) -> None:
    """Has a thread of this rank write what torch recorded of its collectives into `directory`, once it is asked to."""
    file = record_file(directory, board.own_rank)

    def wait_to_be_asked() -> None:
        while not board.record_requested:
            time.sleep(_LOOK_EVERY_S)
        with contextlib.suppress(OSError):
            partial = file.with_suffix(".partial")
            partial.write_text(format_record(flight_record()), "utf-8")
            partial.rename(file)

    threading.Thread(target=wait_to_be_asked, name="rotorch-record", daemon=True).start()


def format_record(record: Mapping[str, Any]) -> str:
    """The last collectives of torch's flight recorder, unfinished ones first, in lines of text."""
    entries = record.get("entries", [])
    waiting = [entry for entry in entries if not entry.get("retired", True)]
    chosen = waiting[-_MOST_ENTRIES:] or entries[-1:]
    lines = ["torch's flight recorder:"] if chosen else []
    for entry in chosen:
        number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
        sizes = json.dumps(entry.get("input_sizes") or entry.get("output_sizes") or [])
        group = " ".join(entry.get("process_group", []))
        state = "done" if entry.get("retired") else entry.get("state", "under way")
        lines.append(f"  {entry.get('profiling_name', '?')} number {number} of group {group}, {sizes}: {state}")
    return "\n".join(lines)


class RankWatchdog:
    """Ends this process with exit code 3 when its rank makes no progress for `timeout_s`, within the block.

    Args:
        board: of this rank alone.
        rank: its number in the job.
        timeout_s: after so long.
        directory: the run's, where the report goes if it is there.
    """

    def __init__(self, board: StatusBoard, *, rank: int, timeout_s: float, directory: Path | None) -> None:
        self._board, self._rank, self._timeout_s, self._directory = board, rank, timeout_s, directory
        self._over = threading.Event()

    def __enter__(self) -> RankWatchdog:
        if math.isfinite(self._timeout_s):
            threading.Thread(target=self._look, name="rotorch-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _look(self) -> None:
        progress = StallClock(self._board)
        while not self._over.wait(_LOOK_EVERY_S):
            (still_s,) = progress.look().values()
            status = self._board.read(self._board.own_rank)
            if still_s >= self._timeout_s and _moves(status):
                break
        else:
            return
        message = f"rank {self._rank} has not got on for {still_s:.0f} s: it is {_where(status)}"
        message += _if_slow(process_state(os.getpid()))
        where = self._report(status, headline=message, still_s=still_s)
        print(f"rotorch: {message}{where}", file=sys.stderr, flush=True)
        os._exit(_RANK_FAILED)

    def _report(self, status: RankStatus, *, headline: str, still_s: float) -> str:
        """Appends this rank's part to the run's report, and says where that is."""
        if self._directory is None or not self._directory.is_dir():
            faulthandler.dump_traceback(sys.stderr)
            return ""
        path = self._directory / REPORT
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            about = [line.replace("rank 0", f"rank {self._rank}", 1) for line in describe_rank(status, still_s=still_s)]
            file.write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S"), headline, "", *about, ""]))
            file.flush()
            faulthandler.dump_traceback(file)
            file.write(format_record(flight_record()) + "\n\n")
        return f". Who was where: {path}"

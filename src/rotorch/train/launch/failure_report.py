"""Report of a failed run: a page with every rank's last word, state, place in its pass and Python stack.

A rank that is alive writes its stack when it gets SIGUSR1, from a handler in C, even while it waits. A stopped rank
cannot, and its state shows that; its place in the pass is in its status word (`comm/status_word.py`). A thread of the
rank writes torch's record of collectives (`watchdog.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rotorch.train.launch.status import RankStatus

REPORT = "failure.txt"
_PATIENCE_S, _LOOK_EVERY_S = 1.0, 0.02
RUNNING = "running"
_STATES = {
    "R": RUNNING,
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


def answer_with_stack(directory: Path, *, rank: int) -> None:
    """Has this rank write the stacks of its threads into `directory` when it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=_stack_file(directory, rank).open("w"), all_threads=True)


def take_stacks(directory: Path, *, pids: Mapping[int, int]) -> dict[int, str]:
    """Asks ranks that are alive where they are, and returns what they say within a second."""
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            if _stack_file(directory, rank).exists():  # before that the signal would end it
                os.kill(pid, signal.SIGUSR1)
    end, said = time.monotonic() + _PATIENCE_S, {}
    while time.monotonic() < end and len(said) < len(pids):
        time.sleep(_LOOK_EVERY_S)
        said = {rank: text for rank in pids if (text := _read(_stack_file(directory, rank)))}
    return said


def take_records(directory: Path, *, ranks: Iterable[int]) -> dict[int, str]:
    """Collects the records of collectives that ranks were asked for (`StatusBoard.request_record`), within a second."""
    wanted, end, said = set(ranks), time.monotonic() + _PATIENCE_S, {}
    while len(said) < len(wanted) and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)
        said = {rank: _read(path) for rank in wanted if (path := record_file(directory, rank)).exists()}
    return said


def record_file(directory: Path, rank: int) -> Path:
    """Path of the file for torch's record of a rank's collectives."""
    return directory / f"record-{rank}.txt"


def process_state(pid: int) -> str:
    """State of a process by the kernel; "" where the kernel does not say (macOS) or the process is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return _STATES.get(fields[0], fields[0]) if fields else ""


def write_report(
    path: Path,
    *,
    headline: str,
    statuses: Sequence[RankStatus],
    stacks: Mapping[int, str],
    records: Mapping[int, str],
    still_s: Mapping[int, float],
) -> bool:
    """Writes the page; returns whether that was possible. Call it while ranks that are alive still are.

    Args:
        path: of the page.
        headline: the failure, in a line.
        statuses: of all ranks.
        stacks: stacks that ranks wrote.
        records: records of collectives that ranks wrote.
        still_s: for how long each was seen at the place where it is.
    """
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), headline, ""]
    for status in statuses:
        rank = status.rank
        lines += describe_rank(status, still_s=still_s.get(rank, 0.0))
        lines += [f"  {line}" for line in (stacks.get(rank, "") + "\n" + records.get(rank, "")).splitlines() if line]
        lines.append("")
    try:
        path.write_text("\n".join(lines), "utf-8")
    except OSError:
        return False
    return True


def describe_rank(status: RankStatus, *, still_s: float) -> list[str]:
    """The lines of a page about one rank, less its stack."""
    state = process_state(status.pid) or "gone"
    since = f", for {time.time() - status.since_s:.1f} s" if status.since_s else ""
    lines = [f"rank {status.rank} (process {status.pid}, {state}): {status}{since}"]
    if status.position:
        lines.append(f"  {status.position}, for {still_s:.1f} s")
    if status.message:
        lines.append(f"  {status.message}")
    return lines


def _stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}.txt"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""

"""Who was where when a run failed: a page with every rank's last word, state and Python stack.

A rank that is alive writes its stack when it gets SIGUSR1, from a handler in C, whatever it is waiting for. One that is
stopped cannot, and its state says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rotorch.train.status import RankStatus

REPORT = "failure.txt"
_PATIENCE_S, _LOOK_EVERY_S = 1.0, 0.02
_STATES = {
    "R": "running",
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


def process_state(pid: int) -> str:
    """What the kernel says that a process is doing; "" where it does not (macOS) or the process is gone."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return _STATES.get(fields[0], fields[0]) if fields else ""


def write_report(path: Path, *, headline: str, statuses: Sequence[RankStatus], stacks: Mapping[int, str]) -> bool:
    """Writes the page; returns whether that was possible. Call it while ranks that are alive still are."""
    now_s, lines = time.time(), [time.strftime("%Y-%m-%d %H:%M:%S"), headline, ""]
    for status in statuses:
        state = process_state(status.pid) or "gone"
        since = f", for {now_s - status.since_s:.1f} s" if status.since_s else ""
        lines.append(f"rank {status.rank} (process {status.pid}, {state}): {status}{since}")
        if status.message:
            lines.append(f"  {status.message}")
        lines += [f"  {line}" for line in stacks.get(status.rank, "").splitlines()]
        lines.append("")
    try:
        path.write_text("\n".join(lines), "utf-8")
    except OSError:
        return False
    return True


def _stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}.txt"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""

"""Seconds from the start of `rotorch train` to its first line on a terminal, and to the first phase that takes long.

python benchmarks/first_line.py --json benchmarks/results/first-line.json

Each start is a new process on a pseudo-terminal, with bytecode of all modules, as an installation has it. The first
line is the first text that the terminal gets; the first phase the words "loading torch". A start is ended once both are
there. Beside wall-clock seconds the processor's seconds are written: on a machine that others use, these are what the
command itself took. Exit code 1 if a median is too long.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import signal
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from rotorch.bench.record import describe_origin, load_average

FIRST_LINE_S, FIRST_PHASE_S = 0.5, 1.0
PHASE = b"loading torch"
DEADLINE_S = 120.0
RUN = f'''
[model]
config = "{Path(__file__).resolve().parents[1] / "configs" / "tiny" / "llama.json"}"
[train]
steps = 1
'''


def measure(run_file: Path) -> dict[str, float]:
    """Starts the command once; returns seconds to its first line and phase, and the processor's until then."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(run_file.parent / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "rotorch", "train", str(run_file)]
        os.execve(sys.executable, command, environment)
    seen, found = b"", {}
    try:
        while "phase_s" not in found:
            if not select.select([terminal], [], [], DEADLINE_S)[0]:
                raise SystemExit(f"nothing more on the screen for {DEADLINE_S:g} s: {seen!r}")
            try:
                seen += os.read(terminal, 1 << 16)
            except OSError:
                raise SystemExit(f"the command ended before its first phase: {seen!r}") from None
            now = time.monotonic() - begin
            if "line_s" not in found:
                found |= {"line_s": now, "line_processor_s": processor_s(pid)}
            if PHASE in seen:
                found |= {"phase_s": now, "phase_processor_s": processor_s(pid)}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    return found


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has taken, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=15)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    origin = describe_origin()
    with tempfile.TemporaryDirectory() as directory:
        run_file = Path(directory, "run.toml")
        run_file.write_text(RUN, "utf-8")
        measure(run_file)  # files into the page cache, bytecode written
        starts = [measure(run_file) for _ in range(asked.starts)]
    medians = {key: round(statistics.median(start[key] for start in starts), 3) for key in starts[0]}
    least = {key: round(min(start[key] for start in starts), 3) for key in starts[0]}
    holds = {"line": medians["line_s"] < FIRST_LINE_S, "phase": medians["phase_s"] < FIRST_PHASE_S}
    record = {
        **origin,
        "versions": {**origin["versions"], **{name: version(name) for name in ("typer", "pydantic")}},
        "load_average_after": load_average(),
        "bars": {"line_s": FIRST_LINE_S, "phase_s": FIRST_PHASE_S},
        "medians": medians,
        "least": least,
        "holds": holds,
        "starts": [{key: round(value, 3) for key, value in start.items()} for start in starts],
    }
    for key, value in medians.items():
        print(f"{key:<18} {value:.3f} (least {least[key]:.3f})")
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

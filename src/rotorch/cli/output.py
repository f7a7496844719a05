"""Output of a command: values and lines, and two hard cases: its reader is gone, or the error was not foreseen.

Standard output and standard error may close while a command runs: `| head -1`, `>&-`, a terminal that is gone. Printed
text is never a command's only result: a run continues, with its metrics and checkpoints, and its exit code tells how it
ended. So output that cannot be written is dropped, from the first failure on.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase

_RUN_FILE = "run.json"  # marks a directory as a run's (`train/checks/preflight.py`, which would load numpy)
_STANDARD = (0, 1, 2)


def outlive_closed_output() -> None:
    """Has this process, and those that it forks, go on when nobody reads what they print. Call it once, first."""
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that anybody opens would get its number, and what is printed with it
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
    sys.stdout = _text(1, like=sys.stdout)
    sys.stderr = _text(2, like=sys.stderr)


class _Lasting(io.FileIO):
    """A file descriptor that leads nowhere once it cannot be written to."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:  # no reader, no terminal, no room: it will be so for what comes next, too
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)  # type: ignore[arg-type]


def _text(number: int, *, like: TextIO | None) -> io.TextIOWrapper:
    raw = _Lasting(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(like, "encoding", None) or "utf-8",
        errors="backslashreplace" if number == 2 else getattr(like, "errors", None) or "strict",
        line_buffering=number == 2 or raw.isatty(),
    )


def no_exceptions() -> tuple[type[BaseException], ...]:
    """Errors that derive from `BaseException` alone: torch's of checkpoints, if that module is loaded."""
    module = sys.modules.get("torch.distributed.checkpoint.api")
    return () if module is None else (module.CheckpointException,)


def leave_traceback(error: BaseException, *, run_directory: Path | None) -> str:
    """Writes an error's traceback to a file, and returns the words that say which; "" if that is not possible.

    Args:
        error: the exception.
        run_directory: directory for the traceback if it is a run's directory by now, else a temporary one is made.
    """
    text = "".join(traceback.format_exception(error))
    rank = os.environ.get("RANK", "")
    name = f"traceback-rank{rank}.txt" if rank.isdigit() else "traceback.txt"
    with suppress(OSError):
        if run_directory is not None and (run_directory / _RUN_FILE).is_file():
            path = run_directory / name
            path.write_text(text, "utf-8")
            return f". The traceback is in {path}"
    with suppress(OSError):
        path = Path(tempfile.mkdtemp(prefix="rotorch-traceback-")) / name
        path.write_text(text, "utf-8")
        return f". The traceback is in {path}"
    return ""


def show(values: dict[str, Any], *, hidden: Sequence[str] = ()) -> None:
    """Prints names and values, one a line; tables of names and values indented below their name."""
    tell_phase()
    from rich.console import Console  # here: it takes a tenth of what a command loads before its first phase

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name, value in values.items():
        if name in hidden:
            continue
        if isinstance(value, dict):
            console.print(name)
            for key, inner in value.items():
                console.print(f"  {key:<16} {inner}")
        else:
            console.print(f"{name:<18} {value}")


def print_now(line: str) -> None:
    """Prints a line of progress at once, also into a file."""
    tell_phase()
    print(line, flush=True)


def check_json(file: Path | None) -> None:
    """Raises `ConfigError` unless `file` can be written; called before the work that makes its numbers."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(f"--json {file}: its directory is missing, or it is one. Write a file's path")


def write_json(file: Path | None, values: dict[str, Any]) -> None:
    """Writes the numbers of a command, if they were asked for."""
    if file is not None:
        file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")

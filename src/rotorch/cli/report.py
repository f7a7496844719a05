"""`rotorch report`: reads directories of runs and writes one page. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.report.page import MADE_BY, page
from rotorch.report.read import RecordedRun, read_runs

_PAGE = "report.html"
_MOST_RUNS = 16


def report_command(directories: Sequence[Path], *, out: Path | None) -> tuple[Path, dict[str, Any]]:
    """Writes the page of some runs; returns its path and the numbers of `--json`.

    Args:
        directories: of the runs.
        out: the page; by default `report.html`, in the run's directory if there is one run, else in the present one.

    Raises:
        ConfigError: a run cannot be read, or the page cannot be written there. Nothing is written then.
    """
    if len(directories) > _MOST_RUNS:
        raise ConfigError(
            f"report: {len(directories)} runs, and at most {_MOST_RUNS} can be told apart. Write fewer of them"
        )
    if out is not None:
        _check_out(out)
    runs = read_runs(directories)
    if out is None:
        out = directories[0] / _PAGE if len(directories) == 1 else Path(_PAGE)
        _check_out(out)
    text = page(runs)
    _replace(out, text)
    return out, {"file": str(out), "num_bytes": len(text.encode()), "runs": [_numbers(run) for run in runs]}


def _check_out(out: Path) -> None:
    """The page can be written there, and replaces nothing but an earlier report."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: its directory is missing, or it is one. Write a file's path")
    if not os.access(out.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: its directory cannot be written. Write --out FILE.html somewhere else")
    if not out.exists():
        return
    if not out.is_file():
        raise ConfigError(f"--out {out}: not a file. Write a file's path")
    try:
        with out.open("rb") as stream:
            begins = stream.read(500)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be read, so it may be no report: {error.strerror}") from None
    if begins and MADE_BY.encode() not in begins:
        raise ConfigError(f"--out {out}: there already, and no report. Write another file's path, or remove it")


def _replace(out: Path, text: str) -> None:
    """Writes the page whole, or not at all."""
    number, name = tempfile.mkstemp(dir=out.absolute().parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as stream:
            stream.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, out)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise ConfigError(f"--out {out}: cannot be written: {error.strerror}. Write another path") from None
        raise


def _numbers(run: RecordedRun) -> dict[str, Any]:
    losses, held_out = run.values("loss"), run.values("held_out_bits_per_byte")
    return {
        "name": run.name,
        "directory": str(run.directory),
        "parallel": run.layout,
        "step": run.steps[-1],
        "tokens": run.tokens,
        "loss": losses[-1] if losses else None,
        "held_out_bits_per_byte": held_out[-1] if held_out else None,
        "num_events": len(run.events),
        "num_checkpoints": len(run.checkpoints),
        "remarks": list(run.remarks),
    }

"""`rotorch suite`: measures the cases of a suite that have no result yet, then writes the table and the plot of all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rotorch.bench.bar import parse_bar
from rotorch.bench.command import OK, RANK_FAILED, BenchOptions, check_model, exit_code, measure, read_layouts
from rotorch.bench.contender import LIMIT
from rotorch.bench.plot import to_html, to_svg
from rotorch.bench.suite import Case, load_suite, read_result, select
from rotorch.bench.summary import to_markdown
from rotorch.bench.table import render
from rotorch.bench.task import task_from_run
from rotorch.core.errors import ConfigError
from rotorch.models.held_warnings import held_warnings
from rotorch.run_config import load_run_config


def suite_command(
    suite: str | Path,
    *,
    cases: Sequence[str] = (),
    out: Path,
    rounds: int | None = None,
    steps: int | None = None,
    again: bool = False,
    console: Console | None = None,
) -> int:
    """Measures cases one after the other; returns the exit code.

    Every case leaves `<case>.json` in `out`; the suite leaves `<suite>.md`, `<suite>.svg` and `<suite>.html` of all
    of its cases that have a result, also of earlier calls, and after each case.

    Args:
        suite: the suite's TOML file.
        cases: patterns of names; none means all.
        out: directory of results; made if need be.
        rounds: in place of what the suite says.
        steps: in place of what the suite says.
        again: also measure what has a result already.
        console: console to print to.

    Returns:
        0; 1 if in some case a row is invalid or a bar does not hold; 3 if a row failed.

    Raises:
        ConfigError: before any rank is started, also for the last of the cases.
    """
    console = console or Console()
    every = load_suite(suite, rounds=rounds, steps=steps)
    chosen = select(every, patterns=cases)
    prepared = [_prepare(case) for case in chosen]
    for line in sorted({line for case in chosen for line in case.missing}):
        console.print(Text(f"left out: {line}", style="yellow"))
    out.mkdir(parents=True, exist_ok=True)
    code = OK
    for number, (case, checked) in enumerate(zip(chosen, prepared, strict=True), start=1):
        head, file, key = f"{number}/{len(chosen)} {case.name}", out / f"{case.name}.json", case.key()
        record = read_result(file)
        if record is not None and record["suite"]["key"] == key and not again:
            if exit_code(record) != RANK_FAILED:
                console.print(Text(f"{head}: measured already by this source (commit {_short(record)})"))
                code = max(code, exit_code(record))
                continue
            console.print(Text(f"{head}: a row failed the last time"))
        rows = len(case.rows.parallel) + len(case.rows.peers) + 1
        console.print(Text(f"{head}: {rows} rows, {case.rows.rounds} rounds of {case.rows.steps} steps"))
        started = time.monotonic()
        record = _measure(case, checked, console=console) | {"suite": {"case": case.name, "key": key}}
        console.print(render(record))
        console.print(Text(f"{head}: {time.monotonic() - started:.0f} s, {file}"))
        code = max(code, exit_code(record))
        file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        _summarise(every, out=out, name=Path(suite).stem)
    _summarise(every, out=out, name=Path(suite).stem)  # cases may have been taken out of the suite
    return code


def write_tables(suite: str | Path, *, out: Path) -> None:
    """Writes the table and the plots anew from the results that are there, and measures nothing."""
    if not out.is_dir():
        raise ConfigError(f"suite: --tables: no directory {str(out)!r}. Write --out with the directory of results")
    _summarise(load_suite(suite), out=out, name=Path(suite).stem)


def list_cases(suite: str | Path, *, out: Path, console: Console | None = None) -> None:
    """Prints the names of a suite's cases, and which have a result by this source."""
    console = console or Console()
    for case in load_suite(suite):
        record = read_result(out / f"{case.name}.json")
        same = record is not None and record["suite"]["key"] == case.key()
        state = "" if record is None else "measured" if same else "measured by another source"
        console.print(Text(f"{case.name:<36} {state}".rstrip()))


@held_warnings()
def _prepare(case: Case) -> dict[str, Any]:
    """Arguments of `measure` for a case.

    Raises:
        ConfigError: for what can be known to be wrong with it before it runs.
    """
    layouts, nproc = read_layouts(case.rows.parallel, peers=case.rows.peers, nproc=case.nproc)
    names = [LIMIT, *layouts, *case.rows.peers]
    bars = [parse_bar(text, rows=names, processes=case.rows.process_memory) for text in case.rows.bars]
    run = load_run_config(case.run, overrides=case.overrides)
    task = task_from_run(run, name=case.run.stem, num_ranks=nproc)
    spec = check_model(task, layouts=layouts, peers=case.rows.peers)
    return {"task": task, "spec": spec, "layouts": layouts, "bars": bars, "peers": case.rows.peers}


def _measure(case: Case, checked: Mapping[str, Any], *, console: Console) -> dict[str, Any]:
    rows = case.rows
    options = BenchOptions(rounds=rows.rounds, steps=rows.steps, process_memory=rows.process_memory)
    return measure(**checked, options=options, console=console)


def _summarise(cases: Sequence[Case], *, out: Path, name: str) -> None:
    """Writes table and plot of what has been measured, whenever it was."""
    found = {case.name: read_result(out / f"{case.name}.json") for case in cases}
    records = {case: record for case, record in found.items() if record is not None}
    missing = [case for case, record in found.items() if record is None]
    for ending, text in (
        ("md", to_markdown(records, missing=missing)),
        ("svg", to_svg(records)),
        ("html", to_html(records)),
    ):
        (out / f"{name}.{ending}").write_text(text, "utf-8")


def _short(record: dict[str, Any]) -> str:
    return str(record.get("commit") or "?")[:10]

"""Directories of runs, read: metrics, events, checkpoints, configuration. Nothing is written, and no torch is loaded.

[Note: what is left out with a word]
    A report is wanted most of runs that went wrong, so only what would make a curve wrong is refused: a damaged line of
    metrics. A last line that a kill has cut off, a configuration that cannot be read, a checkpoint without its
    manifest become remarks on the page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.small_files import read_small
from rotorch.report.trace import Trace, read_trace

METRICS, RUN_FILE, FAILURE, EVENTS = "metrics.jsonl", "run.json", "failure.txt", "events.jsonl"
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
"""Names of `train/`, whose modules load torch; a test holds them equal."""

SERIES = ("loss", "held_out_loss", "held_out_bits_per_byte", "grad_norm", "lr", "tokens_per_s", "step_s", "peak_bytes")
"""Fields of a line of metrics that are drawn."""

OF_PAIRS = ("reward_margin", "held_out_reward_margin", "reward_accuracy", "held_out_reward_accuracy")
"""Those of a run on preference pairs, drawn too."""

_OF_TEXT = re.compile(r"eval_([A-Za-z0-9_-]{1,64})_bits_per_byte")
"""Field of a text of `train.eval`, drawn too."""

CATEGORIES = ("weights", "gradients", "optimizer", "peak")
"""Of memory: tensors at rest, and the most that the process or its GPU has taken."""

MOST_RANKS = 64
"""Ranks whose memory and whose traced step are drawn."""

KINDS = ("started", "resumed", "rolled_back", "skipped", "not_finite", "note", "failed")
"""Kinds of events."""

_STEP_NAME = re.compile(r"step-(\d{8,})")
_HIGHEST, _LAST_STEP = 1e300, 10**15
_WITHIN_STEP = re.compile(r"\bin step (\d{1,15})\b")
_MOST_JSON_BYTES, _MOST_FAILURE_BYTES = 16 << 20, 1 << 20


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, at the end of a step.

    Attributes:
        kind: one of `KINDS`; on the time line also "checkpoint".
        step: the step after which it happened.
        text: words for it, without the step.
        at: date and time in UTC, "" if unknown.
    """

    kind: str
    step: int
    text: str
    at: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk: its step, its bytes, and its manifest without tensors ({} if unreadable)."""

    step: int
    num_bytes: int
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedRun:
    """A run as its directory tells it.

    Attributes:
        name: short name, different from those of other runs of the report.
        directory: the run's.
        steps: steps of `columns`, ascending.
        columns: values by field of `SERIES`, and of texts that are measured by name, one per step; None where there is
            none, or none that is finite.
        tokens: target tokens trained on.
        about: contents of `run.json`; {} without one.
        events: in the order of steps.
        checkpoints: by step.
        failure: text of the report of its last failure, "" if there is none.
        memory: bytes per rank by category, "predicted" and "measured", where the run has recorded them.
        rank_memory: the same of each rank, by rank; "measured" after the last step that tells it.
        memory_steps: steps after which ranks told their memory; ascending.
        memory_columns: by category, of the rank that has the most, one value per step of `memory_steps`.
        peaks: highest memory of each rank in bytes, where the run has recorded it.
        planned_peaks: of each rank's tensors, counted on fake ones, where the run has done so.
        versions: versions of packages, by name.
        trace: a traced step, None without one.
        remarks: what could not be read.
    """

    name: str
    directory: Path
    steps: Sequence[int]
    columns: Mapping[str, Sequence[float | None]]
    tokens: int
    about: Mapping[str, Any]
    events: Sequence[Event]
    checkpoints: Sequence[Checkpoint]
    failure: str
    memory: Mapping[str, Mapping[str, int]]
    rank_memory: Mapping[str, Sequence[Mapping[str, int]]]
    memory_steps: Sequence[int]
    memory_columns: Mapping[str, Sequence[float | None]]
    peaks: Sequence[int]
    planned_peaks: Sequence[int]
    versions: Mapping[str, str]
    trace: Trace | None
    remarks: Sequence[str]

    def values(self, name: str) -> list[float]:
        """The values of a field that are there."""
        return [value for value in self.columns.get(name, ()) if value is not None]

    @property
    def texts(self) -> Mapping[str, Sequence[float | None]]:
        """Bits per byte of each text that is measured by name, one per step."""
        return {found[1]: values for key, values in self.columns.items() if (found := _OF_TEXT.fullmatch(key))}

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration; {} if unknown."""
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def layout(self) -> str:
        """Its layout as `--parallel` text, "" if unknown."""
        layout = self.about.get("parallel")
        return layout if isinstance(layout, str) else ""


def read_runs(directories: Sequence[Path]) -> list[RecordedRun]:
    """Reads directories of runs, in their order.

    Raises:
        ConfigError: one is no run's or has no step, a line of its metrics is damaged, or it is named twice.
    """
    return [read_run(path, name=name) for path, name in zip(directories, _names(directories), strict=True)]


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    whole = [path.resolve() for path in directories]
    for number, path in enumerate(whole):
        if path in whole[:number]:
            raise ConfigError(f"report: {directories[number]}: named twice. Write each run once")
    for length in range(1, max((len(path.parts) for path in whole), default=0) + 1):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different parts")


def read_run(directory: Path, *, name: str) -> RecordedRun:
    """Reads one directory of a run.

    Raises:
        ConfigError: see `read_runs`.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"report: {directory}: no such directory. Write the directory of a run, e.g. its train.out"
            if not directory.exists()
            else f"report: {directory}: a file. Write the directory of a run, e.g. its train.out"
        )
    if not any((directory / known).exists() for known in (METRICS, RUN_FILE, CHECKPOINTS)):
        raise ConfigError(
            f"report: {directory}: not a run's directory (no {METRICS}). Write one that rotorch train has written"
        )
    remarks: list[str] = []
    records = _read_metrics(directory / METRICS, remarks)
    if not records:
        failure = directory / FAILURE
        where = f"{failure} says why it failed" if failure.exists() else f"{METRICS} is missing, or empty"
        raise ConfigError(f"report: {directory}: the run has done no step ({where}). Write a run that has")
    texts = dict.fromkeys(key for record in records for key in record if _OF_TEXT.fullmatch(key))
    about = _read_json(directory / RUN_FILE, remarks) or {}
    checkpoints = _read_checkpoints(directory, about, remarks)
    noted, extra = _read_events(directory / EVENTS, remarks)
    failure_text = _read_failure(directory / FAILURE, remarks)
    events = [*noted, *_events_of_metrics(records, noted)]
    if failure_text:
        headline = _headline(failure_text)
        within = _WITHIN_STEP.search(headline)
        step = min(int(within[1]), _LAST_STEP) if within else records[-1]["step"]
        events.append(Event("failed", step, headline, failure_text.partition("\n")[0]))
    of_checkpoints = [found for c in checkpoints if (found := _words(c.about.get("versions")))]
    return RecordedRun(
        name=name,
        directory=directory,
        steps=[record["step"] for record in records],
        columns={key: [_finite(record.get(key)) for record in records] for key in (*SERIES, *OF_PAIRS, *texts)},
        tokens=int(_finite(records[-1].get("tokens")) or 0),
        about=about,
        events=sorted(events, key=lambda event: event.step),
        checkpoints=checkpoints,
        failure=failure_text,
        memory=extra["memory"],
        rank_memory=extra["ranks"],
        memory_steps=sorted(extra["noted"]),
        memory_columns=_highest(extra["noted"]),
        peaks=extra["peaks"],
        planned_peaks=extra["planned"],
        versions=extra["versions"] or (of_checkpoints[-1] if of_checkpoints else {}),
        trace=read_trace(directory, remarks),
        remarks=remarks,
    )


def _finite(value: Any) -> float | None:
    """The number that a value is, None for any other; one beyond every figure of a run counts as infinite."""
    return value if isinstance(value, int | float) and abs(value) <= _HIGHEST else None


# ---------------------------------------------------------------- metrics


def _read_metrics(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"report: {path}: cannot be read: {error.strerror}. Write another run") from None
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
        remarks.append(f"{METRICS}: the last line was cut off as it was written; it is left out")
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None:
            raise ConfigError(
                f"report: {path}, line {number}: damaged (no step of a run). Repair the line, or remove it"
            )
        by_step[record["step"]] = record
    if len(by_step) < len(lines):
        remarks.append(f"{METRICS}: {len(lines) - len(by_step)} steps are there twice; the later line counts")
    return [by_step[step] for step in sorted(by_step)]


def _record(line: bytes) -> dict[str, Any] | None:
    """The step that a line tells of; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not _is_step(record.get("step")):
        return None
    if any(not isinstance(record[key], int | float | None) for key in (*SERIES, *OF_PAIRS, "tokens") if key in record):
        return None
    return record


def _is_step(step: Any) -> bool:
    return type(step) is int and 0 <= step <= _LAST_STEP


def _events_of_metrics(records: Sequence[Mapping[str, Any]], noted: Sequence[Event]) -> Iterator[Event]:
    """Skipped steps, and steps whose loss or gradient was not finite, unless the run has noted why."""
    told = {event.step for event in noted if event.kind == "skipped"}
    for record in records:
        step = record["step"]
        if record.get("skipped") and step not in told:
            yield Event("skipped", step, "the weights were left as they were")
        elif not record.get("skipped") and any(
            key in record and _finite(record[key]) is None for key in ("loss", "grad_norm")
        ):
            yield Event("not_finite", step, "the loss or the norm of the gradients was not finite")


# ---------------------------------------------------------------- what is beside them


def _read_json(path: Path, remarks: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(read_small(path, most_bytes=_MOST_JSON_BYTES, what=f"a run's {path.name}"))
    except FileNotFoundError:
        remarks.append(f"{path.name}: missing, so what it says is unknown")
        return None
    except ConfigError as error:
        remarks.append(str(error))
        return None
    except (OSError, ValueError, RecursionError):
        remarks.append(f"{path.name}: cannot be read, so what it says is unknown")
        return None
    if not isinstance(found, dict):
        remarks.append(f"{path.name}: not what a run writes, so it is left out")
        return None
    return found


def _read_checkpoints(directory: Path, about: Mapping[str, Any], remarks: list[str]) -> list[Checkpoint]:
    config = about.get("config")
    train = config.get("train") if isinstance(config, dict) else None
    saves_in = train.get("checkpoint_dir") if isinstance(train, dict) else None
    parent = directory
    if isinstance(saves_in, str) and saves_in:
        if "://" in saves_in:
            remarks.append(f"checkpoints: in the store {saves_in}, which a report does not read")
            return []
        parent = Path(saves_in)
    found = []
    try:
        paths = sorted((parent / CHECKPOINTS).iterdir())
    except (OSError, ValueError):  # no directory, or no path
        return []
    for path in paths:
        if (match := _STEP_NAME.fullmatch(path.name)) is None or not path.is_dir():
            continue
        told: list[str] = []
        manifest = _read_json(path / MANIFEST, told)
        kept = {key: value for key, value in (manifest or {}).items() if key not in ("tensors", "files")}
        try:
            num_bytes = _bytes_in(path)
        except OSError:  # a run that goes on has removed it meanwhile
            continue
        remarks.extend(f"{path.name}/{line}" for line in told)
        found.append(Checkpoint(min(int(match[1]), _LAST_STEP), num_bytes, kept))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _bytes_in(path: Path) -> int:
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())


def _read_events(path: Path, remarks: list[str]) -> tuple[list[Event], dict[str, Any]]:
    """The events that a run has noted; and the versions, the memory and the peaks that are told with them."""
    extra: dict[str, Any] = {"versions": {}, "memory": {}, "peaks": (), "planned": (), "ranks": {}, "noted": {}}
    events: list[Event] = []
    try:
        lines = read_small(path, most_bytes=_MOST_JSON_BYTES, what="a run's list of events").splitlines()
    except FileNotFoundError:
        return events, extra
    except (OSError, ConfigError) as error:
        remarks.append(f"{path.name}: cannot be read: {error}")
        return events, extra
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
            kind, step, text = found["event"], found["step"], str(found.get("text", ""))
        except (ValueError, RecursionError, KeyError, TypeError):
            kind, step, text = None, None, ""
        if not isinstance(kind, str) or not _is_step(step):
            remarks.append(f"{path.name}, line {number}: damaged; it is left out")
            continue
        if kind == "ended":
            if measured := _counts(found.get("memory")):
                extra["memory"] = {**extra["memory"], "measured": measured}
            extra["peaks"] = _list_of_counts(found.get("peaks"))
            planned = found.get("planned")
            extra["planned"] = _list_of_counts(planned.get("planned_bytes") if isinstance(planned, dict) else None)
        elif kind == "memory":
            if ranks := _by_rank(found):
                extra["noted"][step] = extra["ranks"]["measured"] = ranks  # of a repeated step the later one counts
        elif kind == "started":
            extra["versions"] = _words(found.get("versions"))
            if predicted := _counts(found.get("predicted")):
                extra["memory"] = {"predicted": predicted}
            by_rank = found.get("predicted_by_rank")
            if isinstance(by_rank, list) and (ranks := [_counts(of) for of in by_rank[:MOST_RANKS]]):
                extra["ranks"] = {"predicted": ranks}
            kind = "resumed" if step else "started"
        if kind not in ("ended", "memory"):
            kind = kind if kind in KINDS else "note"
            events.append(Event(kind, step, text, str(found.get("at", ""))))
    return events, extra


def _by_rank(found: Mapping[str, Any]) -> list[dict[str, int]]:
    """Bytes by category of each rank, of an event that has a list of all ranks for each category."""
    lists = {c: found[c][:MOST_RANKS] for c in CATEGORIES if isinstance(found.get(c), list)}
    num_ranks = min(map(len, lists.values()), default=0)
    return [{c: int(_finite(of[rank]) or 0) for c, of in lists.items()} for rank in range(num_ranks)]


def _highest(noted: Mapping[int, Sequence[Mapping[str, int]]]) -> dict[str, list[float | None]]:
    """By category the most that a rank has, of each noted step; None where the step does not tell."""
    steps = [noted[step] for step in sorted(noted)]
    return {c: [max((of[c] for of in ranks if c in of), default=None) for ranks in steps] for c in CATEGORIES}


def _list_of_counts(found: Any) -> Sequence[int]:
    return [int(_finite(each) or 0) for each in found] if isinstance(found, list) else ()


def _counts(found: Any) -> dict[str, int]:
    return {str(k): int(_finite(v) or 0) for k, v in found.items()} if isinstance(found, dict) else {}


def _words(found: Any) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _read_failure(path: Path, remarks: list[str]) -> str:
    try:
        return read_small(path, most_bytes=_MOST_FAILURE_BYTES, what="a report of a failure").decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except (OSError, ConfigError) as error:
        remarks.append(f"{path.name}: cannot be read: {error}")
        return ""


def _headline(failure: str) -> str:
    """The line of a failure report with the cause; its first line is the time."""
    lines = [line for line in failure.splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 else "".join(lines)

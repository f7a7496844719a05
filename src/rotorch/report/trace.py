"""A traced step, as `rotorch bench --trace` writes it for Perfetto: what each rank did at every moment.

[Note: one state at a time]
    Spans of a trace lie in each other: a wait within the forward of a block within the forward. At each moment the
    first of `STATES` that covers it counts, as in the shares of `bench/trace.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.small_files import read_small

OTHER = "other"
STATES = {
    "waiting for a slice": ("slice",),
    "waiting for a gradient": ("gradient",),
    "collectives": ("collective",),
    "optimizer": ("optimizer",),
    "compute": ("forward", "backward"),
    OTHER: (),
}
"""States of a rank, with the categories of spans that mean them."""

_LONGEST_MS = 1e12
_LIMIT = "limit.trace.json"  # of ranks that do not communicate: written beside each trace of a layout
_MOST_BYTES = 64 << 20

State = tuple[str, float, float]
"""A state, its start and its end in milliseconds."""


@dataclass(frozen=True)
class Trace:
    """One step of all ranks.

    Attributes:
        name: of its row, e.g. "rtp=2".
        length_ms: of the step.
        ranks: states of each rank, one after another, without gaps.
    """

    name: str
    length_ms: float
    ranks: Sequence[Sequence[State]]

    def shares(self, rank: int) -> dict[str, float]:
        """Shares of a rank's time by state; they add up to 1."""
        found = dict.fromkeys(STATES, 0.0)
        for state, start, end in self.ranks[rank]:
            found[state] += (end - start) / self.length_ms
        return found


def read_trace(directory: Path, remarks: list[str]) -> Trace | None:
    """Reads the newest `*.trace.json` in a run's directory, or in a directory in it; None if there is none."""
    found = [*directory.glob("*.trace.json"), *directory.glob("*/*.trace.json")]
    of_layouts = [path for path in found if path.name != _LIMIT]
    paths = sorted(of_layouts, key=lambda path: path.stat().st_mtime)
    if not paths:
        return None
    path = paths[-1]
    if len(paths) > 1:
        remarks.append(f"{len(paths)} traces; the newest, {path.relative_to(directory)}, is drawn")
    try:
        text = read_small(path, most_bytes=_MOST_BYTES, what="a trace")
        trace = trace_of(json.loads(text)["traceEvents"], name=path.name.removesuffix(".trace.json"))
    except ConfigError as error:
        remarks.append(str(error))
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
        remarks.append(f"{path.relative_to(directory)}: cannot be read as a trace; it is left out")
        return None
    if trace is None:
        remarks.append(f"{path.relative_to(directory)}: has no span of a rank; it is left out")
    return trace


def trace_of(events: Iterable[Mapping[str, Any]], *, name: str) -> Trace | None:
    """The step of median length among traced events; None if nothing lasted any time."""
    spans: dict[int, list[tuple[str, float, float]]] = {}
    for event in events:
        if event.get("ph") == "X":
            start, length = float(event["ts"]) / 1e3, float(event["dur"]) / 1e3
            if not (abs(start) < _LONGEST_MS and 0 <= length < _LONGEST_MS):
                raise ValueError("no time")
            spans.setdefault(int(event["pid"]), []).append((str(event["cat"]), start, start + length))
        elif event.get("name") == "process_name":
            name = str(event["args"]["name"]).rpartition(" rank ")[0] or name
    if not spans:
        return None
    window = _typical([found for _, found in sorted(spans.items())])
    if window[1] <= window[0]:
        return None
    return Trace(name, window[1] - window[0], [_states(found, window) for _, found in sorted(spans.items())])


def _typical(ranks: Sequence[Sequence[State]]) -> tuple[float, float]:
    """Start and end of the step of median length. A step ends with the optimizer of the last rank."""
    ends = [sorted(end for doing, _, end in spans if doing == "optimizer") for spans in ranks]
    first = min(start for spans in ranks for _, start, _ in spans)
    last = max(end for spans in ranks for _, _, end in spans)
    num_steps = min(len(of_rank) for of_rank in ends)
    if any(len(of_rank) != num_steps for of_rank in ends) or num_steps < 2:
        return first, last
    marks = [first, *(max(of_rank[step] for of_rank in ends) for step in range(num_steps))]
    steps = sorted(pairwise(marks), key=lambda step: step[1] - step[0])
    return steps[len(steps) // 2]


def _states(spans: Sequence[State], window: tuple[float, float]) -> list[State]:
    """States of a rank within a window, by a sweep over the ends of its spans; see [Note: one state at a time]."""
    start, end = window
    meaning = {category: number for number, of in enumerate(STATES.values()) for category in of}
    names = list(STATES)
    changes: list[tuple[float, int, int]] = []
    for doing, since, until in spans:
        if doing in meaning and until > start and since < end:
            changes.append((max(since, start), meaning[doing], 1))
            changes.append((min(until, end), meaning[doing], -1))
    changes.sort()
    open_now, at = [0] * len(names), start
    found: list[State] = []
    for moment, number, by in [*changes, (end, 0, 0)]:
        if moment > at:
            state = next((names[n] for n, count in enumerate(open_now) if count), OTHER)
            if found and found[-1][0] == state:
                found[-1] = (state, found[-1][1], moment - start)
            else:
                found.append((state, at - start, moment - start))
            at = moment
        open_now[number] += by
    return found

"""Traces as files: one for Perfetto (or chrome://tracing), one page to zoom into, one picture.

In all of them a rank has the same lanes: what it does (computing, waiting, the optimizer), slices under way to it, and
gradients under way to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rotorch.bench.action_looks import LOOKS, shade
from rotorch.bench.gantt import Bar, Kind, gantt_page
from rotorch.bench.trace import Interval, RankTrace, shares, together
from rotorch.comm.observe import Activity, Span
from rotorch.pipelining.actions import COMPUTE, MESSAGES, ActionKind

DOES, FETCHES, HOPS = LANES = ("does", "slice under way", "gradient under way")

_LANE_OF = {Activity.FETCH: FETCHES, Activity.HOP: HOPS}  # all else: DOES
_COLOURS = {
    Activity.FORWARD: "#cfe3f5",
    Activity.BACKWARD: "#d9ead3",
    Activity.BLOCK: "#a9cdea",
    Activity.VISIT: "#4a90c4",
    Activity.SLICE: "#d62728",
    Activity.GRADIENT: "#ff7f0e",
    Activity.COLLECTIVE: "#9467bd",
    Activity.OPTIMIZER: "#7f7f7f",
    Activity.FETCH: "#e8a0a0",
    Activity.HOP: "#f5c58c",
}
_LABELS = {
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.BLOCK: "forward of a block",
    Activity.VISIT: "computing with a slice",
    Activity.SLICE: "waiting for a slice",
    Activity.GRADIENT: "waiting for a gradient",
    Activity.COLLECTIVE: "waiting for a collective",
    Activity.OPTIMIZER: "optimizer",
    Activity.FETCH: "slice under way",
    Activity.HOP: "gradient under way",
}
_INWARDS = tuple(_COLOURS)
"""Drawn in this order, so that what is inside of something lies on it."""


@dataclass(frozen=True)
class RowTrace:
    """All ranks of one row.

    Attributes:
        row: "limit", or `--parallel` text.
        ranks: traces of its ranks.
    """

    row: str
    ranks: list[RankTrace]

    @property
    def steps(self) -> list[Interval]:
        """Steps of all ranks together."""
        return together(self.ranks)

    @property
    def shares_by_rank(self) -> list[dict[str, float]]:
        """See `trace.shares`."""
        return [shares(rank, steps=self.steps) for rank in self.ranks]

    @property
    def headline(self) -> list[str]:
        """Shares of each rank's time, one line per rank, in percent; shares of nothing are left out."""
        return [
            f"rank {number}: " + ", ".join(f"{name} {100 * part:.1f} %" for name, part in found.items() if part >= 5e-4)
            for number, found in enumerate(self.shares_by_rank)
        ]


def file_stem(row: str) -> str:
    """A row's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", row).strip("-")


def write_traces(trace: RowTrace, *, directory: Path) -> dict[str, str]:
    """Writes the files of a row into `directory`, of a pipeline its schedule too; returns their paths by kind."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = file_stem(trace.row)
    paths = {
        "perfetto": directory / f"{stem}.trace.json",
        "page": directory / f"{stem}.html",
        "picture": directory / f"{stem}.svg",
    }
    paths["perfetto"].write_text(json.dumps({"traceEvents": list(_events(trace)), "displayTimeUnit": "ms"}))
    paths["page"].write_text(_page(trace), "utf-8")
    paths["picture"].write_text(_picture(trace), "utf-8")
    if any(rank.actions for rank in trace.ranks):
        paths["schedule"] = directory / f"{stem}.schedule.html"
        paths["schedule"].write_text(_schedule(trace), "utf-8")
    return {kind: str(path) for kind, path in paths.items()}


def summary(trace: RowTrace, *, files: dict[str, str]) -> dict[str, Any]:
    """Returns the summary of a trace for the bench's record."""
    return {"num_steps": len(trace.steps), "shares_by_rank": trace.shares_by_rank, "files": files}


# ---------------------------------------------------------------- Perfetto


def _events(trace: RowTrace) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: a process per rank, a thread per lane, times in microseconds from the first step on."""
    zero = trace.steps[0][0]
    for rank, found in enumerate(trace.ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"{trace.row} rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        lanes: dict[str, int] = {}
        for lane, span in _laned(found.spans):
            if lane not in lanes:
                lanes[lane] = len(lanes)
                yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": lanes[lane], "args": {"name": lane}}
            yield {
                "name": span.name,
                "cat": str(span.doing),
                "ph": "X",
                "ts": 1e6 * (span.start_s - zero),
                "dur": 1e6 * (span.end_s - span.start_s),
                "pid": rank,
                "tid": lanes[lane],
            }


def _laned(spans: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """Yields each span with its lane; messages that are in flight at the same time get lanes of their own."""
    free_s: dict[str, list[float]] = {FETCHES: [], HOPS: []}
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        lane = _LANE_OF.get(span.doing, DOES)
        if lane != DOES:
            ends = free_s[lane]
            number = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
            ends[number:] = [span.end_s, *ends[number + 1 :]]
            lane = lane if number == 0 else f"{lane} ({number + 1})"
        yield lane, span


# ---------------------------------------------------------------- pictures


def _typical(trace: RowTrace) -> Interval:
    """The step of median length."""
    return sorted(trace.steps, key=lambda step: step[1] - step[0])[len(trace.steps) // 2]


def _drawn(trace: RowTrace) -> Iterator[tuple[int, str, Span, float, float]]:
    """Yields rank, lane, span, start and length in milliseconds of one step, in the order of drawing."""
    start, end = _typical(trace)
    for doing in _INWARDS:
        for rank, found in enumerate(trace.ranks):
            for span in found.spans:
                if span.doing is doing and span.end_s > start and span.start_s < end:
                    since, until = max(span.start_s, start), min(span.end_s, end)
                    yield rank, _LANE_OF.get(doing, DOES), span, 1e3 * (since - start), 1e3 * (until - since)


def _used_lanes(trace: RowTrace) -> list[str]:
    used = {_LANE_OF.get(span.doing, DOES) for rank in trace.ranks for span in rank.spans}
    return [lane for lane in LANES if lane in used]


def _title(trace: RowTrace) -> str:
    start, end = _typical(trace)
    return f"{trace.row}: who computes and who waits, one step of {1e3 * (end - start):.1f} ms"


def _page(trace: RowTrace) -> str:
    """A page of its own, to zoom and to point at."""
    rows = [f"rank {rank} {lane}" for rank in range(len(trace.ranks)) for lane in _used_lanes(trace)]
    drawn = list(_drawn(trace))
    kinds = [
        Kind(
            _LABELS[doing],
            _COLOURS[doing],
            [
                Bar(f"rank {rank} {lane}", start, length, span.name)
                for rank, lane, span, start, length in drawn
                if span.doing is doing
            ],
        )
        for doing in _INWARDS
    ]
    return gantt_page([_title(trace), *trace.headline], kinds, rows=rows, unit="ms")


def _schedule(trace: RowTrace) -> str:
    """A pipeline's step as `rotorch schedule --html` draws it: a row per rank, actions in their colours, and waits."""
    start, end = _typical(trace)

    def bar(rank: int, since: float, until: float, says: str, text: str = "") -> Bar:
        since, until = max(since, start), min(until, end)
        return Bar(f"rank {rank}", 1e3 * (since - start), 1e3 * (until - since), says, text)

    chunks = 1 + max(done.chunk for rank in trace.ranks for done in rank.actions)
    bars: dict[tuple[ActionKind, int], list[Bar]] = {}
    waits: list[Bar] = []
    for rank, found in enumerate(trace.ranks):
        for done in found.actions:
            kind, number = done.action.kind, done.action.micro_batch
            if done.end_s > start and done.start_s < end and kind in LOOKS and kind not in MESSAGES:
                says = f"chunk {done.action.stage} of the model" + ("" if number is None else f", micro-batch {number}")
                text = str(number) if kind in COMPUTE else ""
                bars.setdefault((kind, done.chunk), []).append(bar(rank, done.start_s, done.end_s, says, text))
        waits += [
            bar(rank, span.start_s, span.end_s, span.name)
            for span in found.spans
            if span.doing is Activity.COLLECTIVE and span.end_s > start and span.start_s < end
        ]
    kinds = [
        Kind(LOOKS[kind][0] + (f", chunk {chunk}" if chunks > 1 else ""), shade(kind, chunk, num_chunks=chunks), some)
        for (kind, chunk), some in sorted(bars.items(), key=lambda item: (list(LOOKS).index(item[0][0]), item[0][1]))
    ]
    rows = [f"rank {rank}" for rank in range(len(trace.ranks))]
    headlines = [_title(trace), *trace.headline]
    return gantt_page(headlines, [*kinds, Kind("waiting", "#dddddd", waits)], rows=rows, unit="ms")


_WIDTH, _LEFT, _ROW, _THIN, _GAP, _LINE = 1200, 70, 22, 7, 8, 16
_LABEL, _PER_LINE = 200, 5
_EDGED, _EDGE = {Activity.BLOCK, Activity.VISIT}, ' stroke="white" stroke-width="0.5"'


def _picture(trace: RowTrace) -> str:
    """Draws the trace as one SVG file."""
    start, end = _typical(trace)
    scale = (_WIDTH - _LEFT - 10) / (1e3 * (end - start))
    lanes, tops, top = _used_lanes(trace), {}, _LINE * (2 + len(trace.ranks)) + 10
    for rank in range(len(trace.ranks)):
        for lane in lanes:
            tops[rank, lane] = top
            top += (_ROW if lane == DOES else _THIN) + 1
        top += _GAP
    shapes = [_text(10, _LINE, _title(trace), weight="bold")]
    shapes += [_text(10, _LINE * (2 + n), line) for n, line in enumerate(trace.headline)]
    shapes += [_text(10, tops[rank, lanes[0]] + 15, f"rank {rank}") for rank in range(len(trace.ranks))]
    for rank, lane, span, since, length in _drawn(trace):
        height = _ROW if lane == DOES else _THIN
        shapes.append(
            f'<rect x="{_LEFT + scale * since:.2f}" y="{tops[rank, lane]}" width="{max(scale * length, 0.2):.2f}" '
            f'height="{height}" fill="{_COLOURS[span.doing]}"{_EDGE if span.doing in _EDGED else ""}>'
            f"<title>{escape(span.name)}, "
            f"{_LABELS[span.doing]}: {length:.3f} ms</title></rect>"
        )
    seen = {span.doing for rank in trace.ranks for span in rank.spans}
    for number, doing in enumerate(d for d in _INWARDS if d in seen):
        across, down = _LEFT + number % _PER_LINE * _LABEL, top + number // _PER_LINE * 18 + 6
        shapes.append(f'<rect x="{across}" y="{down}" width="12" height="12" fill="{_COLOURS[doing]}"/>')
        shapes.append(_text(across + 16, down + 10, _LABELS[doing]))
    height = top + 30 + 18 * (len([d for d in _INWARDS if d in seen]) // _PER_LINE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, *, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'

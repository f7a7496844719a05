"""The page of a report: one file, nothing from elsewhere, at most a megabyte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from rotorch.core.quantities import format_bytes, format_count, format_duration
from rotorch.report.chart import COLUMNS, NUM_COLOURS, Curve, Unit, chart, place_of_step, step_axis
from rotorch.report.read import CATEGORIES, MOST_RANKS, Event, RecordedRun
from rotorch.report.style import SCRIPT, STYLE
from rotorch.report.trace import STATES, Trace

MOST_BYTES = 1_000_000
MADE_BY = '<meta name="generator" content="rotorch report">'
"""Marks a page as a report, so that a report replaces nothing else."""

_MOST_LISTED, _MOST_MARKS, _MOST_TEXT = 100, 120, 8_000
_STATE_COLUMNS = 800
_FEWEST_COLUMNS = 25

_BYTES = Unit("bytes", "highest of all ranks so far", from_zero=True)
_AT_REST = Unit("bytes", "at rest, of the rank that has the most; predicted: dots", from_zero=True)
_NATS, _BITS = Unit("number", "nats per target token"), Unit("number", "bits per byte")
_PAIRS = Unit("number", "mean over pairs")
_PLAIN, _RATE = Unit("number", "global, before clipping"), Unit("number", "of each step")
_TOKENS, _SECONDS = Unit("count", "target tokens per second, all ranks", from_zero=True), Unit("number", "s", True)

_MARKS = {
    "failed": ("■", "failure"),
    "not_finite": ("✕", "not finite"),
    "skipped": ("✕", "step skipped"),
    "rolled_back": ("↩", "rolled back"),
    "resumed": ("↻", "resumed"),
    "started": ("▶", "start"),
    "note": ("•", "note"),
    "checkpoint": ("▲", "checkpoint on disk"),
}
"""Marks of events. Of several at one place the first of these is drawn, and all are told."""


def page(runs: Sequence[RecordedRun], *, most_bytes: int = MOST_BYTES) -> str:
    """Draws runs, with as many columns per chart as `most_bytes` has room for.

    Args:
        runs: at least one, each with at least one step.
        most_bytes: of the page in UTF-8; a page of many runs with long texts may exceed it with few columns.
    """
    columns = COLUMNS
    while True:
        text = _page(runs, columns=columns).encode("utf-8", "replace").decode()  # names may be no Unicode
        if len(text.encode()) <= most_bytes or columns <= _FEWEST_COLUMNS:
            return text
        columns = columns * 2 // 3


def _page(runs: Sequence[RecordedRun], *, columns: int) -> str:
    first = min(run.steps[0] for run in runs)
    last = max(run.steps[-1] for run in runs)
    names = ", ".join(run.name for run in runs)
    hidden = "".join(f"body:has(#r{n}:not(:checked)) .r{n}{{display:none}}" for n in range(len(runs)))
    sections = [
        f"<h1>{escape(names)}</h1>",
        *_remarks(runs),
        _legend(runs) if len(runs) > 1 else "",
        '<div class="cards">',
        *(_summary(run, number) for number, run in enumerate(runs)),
        "</div>",
        "<h2>Time line, in steps</h2>",
        _time_line(runs, first=first, last=last),
        "<h2>Curves</h2>",
        '<div class="cards">',
        *_charts(runs, first=first, last=last, columns=columns),
        "</div>",
        "<h2>Memory by category</h2>",
        _memory(runs, first=first, last=last, columns=columns),
        "<h2>Who computed, and who waited</h2>",
        _traces(runs),
        *_failures(runs),
        "<h2>Configuration</h2>",
        *_configuration(runs),
        "<h2>Versions</h2>",
        _versions(runs),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{MADE_BY}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(names)}</title><style>{STYLE}{hidden}</style></head><body>{''.join(sections)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _colour(number: int) -> str:
    return f"c{number % NUM_COLOURS}"


def _label(number: int, run: RecordedRun) -> str:
    return f'<span class="{_colour(number)}"><i class="key"></i>{escape(run.name)}</span>'


def _pairs(pairs: Mapping[str, str]) -> str:
    """Names and values, side by side; a value is HTML."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{value}</dd>' for name, value in pairs.items())}</dl>"


def _empty(text: str) -> str:
    return f'<p class="empty">{escape(text)}</p>'


# ---------------------------------------------------------------- at the top


def _remarks(runs: Sequence[RecordedRun]) -> Iterator[str]:
    told = [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    if told:
        yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in _shortened(told))}</ul>"


def _shortened(lines: Sequence[str]) -> list[str]:
    left = len(lines) - _MOST_LISTED
    return [*lines[:_MOST_LISTED], f"and {left} more"] if left > 0 else list(lines)


def _legend(runs: Sequence[RecordedRun]) -> str:
    entries = (
        f'<label><input type="checkbox" id="r{number}" checked> {_label(number, run)} '
        f"<small>{escape(run.layout)}</small></label>"
        for number, run in enumerate(runs)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _summary(run: RecordedRun, number: int) -> str:
    train = run.config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    seconds, speeds = run.values("step_s"), run.values("tokens_per_s")
    facts = {
        "directory": escape(str(run.directory)),
        "layout": escape(run.layout) or "unknown",
        "steps": f"{run.steps[-1]:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""),
        "target tokens": f"{run.tokens:,}",
        "loss": _ends(run, "loss", _nats),
        "held-out": _held_out(run),
        "speed": f"{format_count(median(speeds))} tokens/s (median)" if speeds else "not measured",
        "time in steps": _duration(sum(seconds)) if seconds else "not measured",
        "peak of a rank": format_bytes(max(peaks)) if any(peaks := run.values("peak_bytes")) else "not measured",
    }
    if run.planned_peaks:
        facts["planned peak"] = f"{format_bytes(max(run.planned_peaks))} of tensors"
    if len(run.peaks) > 1:
        facts["peak by rank"] = ", ".join(format_bytes(peak) for peak in run.peaks[:64])
    return f'<div class="card r{number}"><b>{_label(number, run)}</b>{_pairs(facts)}</div>'


def _held_out(run: RecordedRun) -> str:
    if run.values("held_out_bits_per_byte"):
        return _ends(run, "held_out_bits_per_byte", lambda v: f"{v:.4f} bits per byte")
    if run.values("held_out_reward_accuracy"):
        return _ends(run, "held_out_reward_accuracy", lambda v: f"{v:.1%} of pairs right")
    return "no held-out text measured in this run"


def _duration(seconds: float) -> str:
    return format_duration(seconds) + (" h" if seconds >= 3600 else " min")


def _nats(value: float) -> str:
    return f"{value:.4f} nats"


def _ends(run: RecordedRun, name: str, write: Callable[[float], str]) -> str:
    values = run.values(name)
    if not values:
        return "never finite"
    return f"{write(values[-1])} (lowest {write(min(values))})" if len(values) > 1 else write(values[-1])


# ---------------------------------------------------------------- the time line


def _time_line(runs: Sequence[RecordedRun], *, first: int, last: int) -> str:
    used = dict.fromkeys(
        kind for run in runs for kind in [*(["checkpoint"] if run.checkpoints else []), *(e.kind for e in run.events)]
    )
    keys = "".join(f"<span>{_MARKS[kind][0]} {_MARKS[kind][1]}</span>" for kind in _MARKS if kind in used)
    lanes = "".join(_lane(run, number, first=first, last=last) for number, run in enumerate(runs))
    words = "".join(_in_words(run, number) for number, run in enumerate(runs))
    return (
        f'<div class="card lanes"><div class="keys">{keys}</div>{lanes}{step_axis(first=first, last=last)}</div>{words}'
    )


def _lane(run: RecordedRun, number: int, *, first: int, last: int) -> str:
    left = place_of_step(run.steps[0], first=first, last=last)
    width = place_of_step(run.steps[-1], first=first, last=last) - left
    saves = [Event("checkpoint", c.step, format_bytes(c.num_bytes)) for c in run.checkpoints]
    marks = [
        f'<b class="{where}" style="left:{place / _MOST_MARKS:.2%}" title="{escape(_told(found))}">'
        f"{_MARKS[min((e.kind for e in found), key=list(_MARKS).index)][0]}</b>"
        for where, events in (("above", run.events), ("below", saves))
        for place, found in _by_place(events, first=first, last=last).items()
    ]
    return (
        f'<div class="r{number} {_colour(number)}"><small>{_label(number, run)}</small><div class="track">'
        f'<i style="left:{left:.2%};width:{width:.2%}"></i>{"".join(marks)}</div></div>'
    )


def _by_place(events: Sequence[Event], *, first: int, last: int) -> dict[int, list[Event]]:
    """Events by their place on the time line: marks that would lie on each other are one."""
    found: dict[int, list[Event]] = {}
    for event in events:
        place = place_of_step(min(max(event.step, first), last), first=first, last=last)
        found.setdefault(round(_MOST_MARKS * place), []).append(event)
    return found


def _told(events: Sequence[Event]) -> str:
    told = [f"step {e.step:,}, {_MARKS[e.kind][1]}: {e.text}"[:300] for e in events[:5]]
    return "\n".join(told) + (f"\nand {len(events) - 5} more" if len(events) > 5 else "")


def _in_words(run: RecordedRun, number: int) -> str:
    lines = [f"step {e.step:,}: {_MARKS[e.kind][1]}{_more(e)}" for e in run.events]
    saves = [f"step {c.step:,}: checkpoint, {format_bytes(c.num_bytes)}{_saved_by(c.about)}" for c in run.checkpoints]
    parts = [f"<summary>{_label(number, run)}: {_num(len(lines), 'event')}, {_num(len(saves), 'checkpoint')}</summary>"]
    parts.append(_list(lines) if lines else _empty("no note, skipped step, roll-back or restart is recorded"))
    parts.append(_list(saves) if saves else _empty("no checkpoint is in the run's directory"))
    return f'<details class="r{number}"{" open" if number == 0 else ""}>{"".join(parts)}</details>'


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _more(event: Event) -> str:
    return (f", {event.at}" if event.at else "") + (f": {event.text[:500]}" if event.text else "")


def _saved_by(about: Mapping[str, Any]) -> str:
    ranks, layout = about.get("num_ranks"), about.get("parallel")
    return f", by {_num(ranks, 'rank')} under {layout}" if isinstance(ranks, int) and isinstance(layout, str) else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in _shortened(lines))}</ul>"


# ---------------------------------------------------------------- curves


def _charts(runs: Sequence[RecordedRun], *, first: int, last: int, columns: int) -> Iterator[str]:
    def drawn(title: str, *names: str, unit: Unit, if_empty: str) -> str:
        curves = [
            Curve(
                run.name + (" held-out" if name.startswith("held_out") and len(names) > 1 else ""),
                number,
                run.steps,
                run.columns[name],
                dots=name.startswith("held_out"),
            )
            for name in names
            for number, run in enumerate(runs)
        ]
        return chart(title, curves, unit=unit, first=first, last=last, columns=columns, if_empty=if_empty)

    this = "this run" if len(runs) == 1 else "these runs"
    has_held_out = any(run.values("held_out_loss") for run in runs)
    title = "Loss in training, and on held-out text (dots)" if has_held_out else "Loss in training"
    yield drawn(title, "loss", "held_out_loss", unit=_NATS, if_empty=f"no finite loss in {this}")
    if any(run.values("reward_margin") for run in runs):
        for title, name in (("Reward margin of pairs", "reward_margin"), ("Share of pairs right", "reward_accuracy")):
            both = (name, f"held_out_{name}")
            yield drawn(f"{title}, and held out (dots)", *both, unit=_PAIRS, if_empty=f"no pairs in {this}")
    else:
        none = f"no held-out text measured in {this}"
        yield drawn("Held-out text", "held_out_bits_per_byte", unit=_BITS, if_empty=none)
    for text in dict.fromkeys(text for run in runs for text in run.texts):
        measured = [
            Curve(run.name, number, run.steps, run.texts[text], dots=True)
            for number, run in enumerate(runs)
            if text in run.texts
        ]
        if_empty = f"no finite loss of {text} in {this}"
        yield chart(f"Text {text}", measured, unit=_BITS, first=first, last=last, columns=columns, if_empty=if_empty)
    yield drawn("Norm of the gradients", "grad_norm", unit=_PLAIN, if_empty=f"no finite norm in {this}")
    yield drawn("Learning rate", "lr", unit=_RATE, if_empty=f"no learning rate recorded in {this}")
    yield drawn("Speed", "tokens_per_s", unit=_TOKENS, if_empty=f"no speed recorded in {this}")
    yield drawn("Time of a step", "step_s", unit=_SECONDS, if_empty=f"no times recorded in {this}")


# ---------------------------------------------------------------- memory, and a traced step


def _memory(runs: Sequence[RecordedRun], *, first: int, last: int, columns: int) -> str:
    this = "this run" if len(runs) == 1 else "these runs"
    whole = chart(
        "Peak memory of a rank",
        [  # 0 where the system does not tell
            Curve(run.name, number, run.steps, run.columns["peak_bytes"])
            for number, run in enumerate(runs)
            if any(run.values("peak_bytes"))
        ],
        unit=_BYTES,
        first=first,
        last=last,
        columns=columns,
        if_empty=f"the system did not tell the memory of {this}",
    )
    categories = list(dict.fromkeys(c for run in runs for found in _all_memory(run) for c in found if c != "peak"))
    if not categories:
        none = _empty("no memory by category recorded: a run writes it after its first step")
        return f'<div class="cards">{whole}</div>{none}'
    most = max((_total(found) for run in runs for found in _all_memory(run)), default=0) or 1
    keys = "".join(
        f'<span><i class="key s{n % 6}"></i>{escape(category)}</span>' for n, category in enumerate(categories)
    )

    def bar(found: Mapping[str, int]) -> str:
        return f'<div class="bar">{_segments({n % 6: found.get(c, 0) / most for n, c in enumerate(categories)})}</div>'

    parts = []
    for number, run in enumerate(runs):
        bars = [
            f"<p>{kind}: {format_bytes(sum(found.values()))} per rank"
            f" ({escape(', '.join(f'{c} {format_bytes(b)}' for c, b in found.items()))})</p>{bar(found)}"
            for kind, found in run.memory.items()
        ]
        none = _empty("no memory by category recorded")
        by_rank = (
            "".join(_memory_of_rank(run, rank, bar) for rank in range(max(map(len, run.rank_memory.values()))))
            if run.rank_memory
            else ""
        )
        parts.append(f'<div class="card r{number}"><b>{_label(number, run)}</b>{"".join(bars) or none}{by_rank}</div>')
    drawn = "".join([*_memory_charts(runs, first=first, last=last, columns=columns), whole])
    return f'<div class="cards">{drawn}</div><div class="keys">{keys}</div><div class="cards">{"".join(parts)}</div>'


def _all_memory(run: RecordedRun) -> list[Mapping[str, int]]:
    return [*run.memory.values(), *(of for ranks in run.rank_memory.values() for of in ranks)]


def _total(found: Mapping[str, int]) -> int:
    return sum(count for category, count in found.items() if category != "peak")


def _memory_of_rank(run: RecordedRun, rank: int, bar: Callable[[Mapping[str, int]], str]) -> str:
    """Bars of one rank, predicted above measured."""
    found = {kind: ranks[rank] for kind, ranks in run.rank_memory.items() if rank < len(ranks)}
    told = ", ".join(f"{kind} {format_bytes(_total(of))}" for kind, of in found.items())
    peak = next((f", peak {format_bytes(of['peak'])}" for of in found.values() if of.get("peak")), "")
    bars = "".join(bar(of) for of in found.values())
    return f'<p><small>rank {rank}: {told}{peak}</small></p><div class="pair">{bars}</div>'


def _memory_charts(runs: Sequence[RecordedRun], *, first: int, last: int, columns: int) -> Iterator[str]:
    """A chart per category: bytes of the rank with the most over the steps, and the predicted bytes."""
    for category in CATEGORIES[:-1]:
        curves = []
        for number, run in enumerate(runs):
            if not run.memory_steps:
                continue
            curves.append(Curve(run.name, number, run.memory_steps, run.memory_columns[category]))
            told = [of[category] for of in run.rank_memory.get("predicted", ()) if category in of]
            if told:
                ends = sorted({run.memory_steps[0], run.memory_steps[-1]})
                curves.append(Curve(f"{run.name} predicted", number, ends, [max(told)] * len(ends), dots=True))
        if curves:
            yield chart(
                f"Memory: {category}", curves, unit=_AT_REST, first=first, last=last, columns=columns,
                if_empty=f"no {category} recorded",
            )  # fmt: skip


def _segments(shares: Mapping[int, float]) -> str:
    return "".join(f'<i class="s{look}" style="width:{share:.2%}"></i>' for look, share in shares.items())


_LOOKS = {
    "compute": 0,
    "waiting for a slice": 1,
    "waiting for a gradient": 2,
    "collectives": 3,
    "optimizer": 4,
    "other": 5,
}


def _traces(runs: Sequence[RecordedRun]) -> str:
    if not any(run.trace for run in runs):
        return _empty(
            "no trace in the run's directory. rotorch bench RUN.toml --parallel LAYOUT --trace RUN_DIR/trace writes one"
        )
    keys = "".join(f'<span><i class="key s{look}"></i>{escape(state)}</span>' for state, look in _LOOKS.items())
    parts = [_trace(run.trace, number, run) for number, run in enumerate(runs) if run.trace is not None]
    return f'<div class="keys">{keys}</div><div class="cards">{"".join(parts)}</div>'


def _trace(trace: Trace, number: int, run: RecordedRun) -> str:
    lanes = []
    for rank, states in enumerate(trace.ranks[:MOST_RANKS]):
        shares = ", ".join(f"{name} {share:.1%}" for name, share in trace.shares(rank).items() if share >= 5e-4)
        rects = "".join(
            f'<rect class="s{_LOOKS[state]}" x="{start}" width="{end - start}" height="1"/>'
            for state, start, end in _in_columns(states, trace.length_ms)
        )
        lanes.append(
            f"<p><small>rank {rank}: {escape(shares)}</small></p>"
            f'<svg class="states" viewBox="0 0 {_STATE_COLUMNS} 1" preserveAspectRatio="none" role="img" '
            f'aria-label="states of rank {rank}">{rects}</svg>'
        )
    left = len(trace.ranks) - len(lanes)
    more = f"<p>and {_num(left, 'more rank')}</p>" if left else ""
    return (
        f'<div class="card r{number}"><b>{_label(number, run)}</b><p>one step of {trace.length_ms:.4g} ms, layout '
        f"<code>{escape(trace.name)}</code></p>{''.join(lanes)}{more}</div>"
    )


def _in_columns(states: Sequence[tuple[str, float, float]], length: float) -> Iterator[tuple[str, int, int]]:
    """States of columns of equal length; of each column the one that takes most of it."""
    parts: list[dict[str, float]] = [{} for _ in range(_STATE_COLUMNS)]
    for state, start, end in states:
        since, until = start / length * _STATE_COLUMNS, end / length * _STATE_COLUMNS
        for column in range(int(since), min(_STATE_COLUMNS, int(until) + 1)):
            inside = min(until, column + 1) - max(since, column)
            if inside > 0:
                parts[column][state] = parts[column].get(state, 0.0) + inside
    begun, doing = 0, ""
    for column, found in enumerate([*parts, {}]):
        state = max(STATES, key=lambda name: found.get(name, 0.0)) if found else ""
        if state != doing:
            if doing:
                yield doing, begun, column
            begun, doing = column, state


# ---------------------------------------------------------------- failures, configuration, versions


def _failures(runs: Sequence[RecordedRun]) -> Iterator[str]:
    failed = [(number, run) for number, run in enumerate(runs) if run.failure]
    if failed:
        yield "<h2>Failures</h2>"
    for number, run in failed:
        headline = next((event.text for event in reversed(run.events) if event.kind == "failed"), "")
        yield (
            f'<details class="r{number}"><summary>{_label(number, run)}: {escape(headline[:500])}</summary>'
            f"<pre>{escape(_cut(run.failure))}</pre></details>"
        )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}\n... {len(text) - _MOST_TEXT:,} characters more"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _configuration(runs: Sequence[RecordedRun]) -> Iterator[str]:
    flat = [dict(_flat(run.config)) for run in runs]
    if not any(flat):
        yield _empty("unknown: there is no run.json that can be read")
        return
    keys = list(dict.fromkeys(key for found in flat for key in found))
    same = {key: flat[0][key] for key in keys if all(found.get(key) == flat[0].get(key) for found in flat)}
    differ = [key for key in keys if key not in same]
    if differ:
        yield f"<p>{_num(len(differ), 'key')} in which the runs differ:</p>"
        yield _pairs({key: _of_each(runs, [found.get(key, "not set") for found in flat]) for key in differ})
    words = f"{_num(len(same), 'key')} {'that are the same in all runs' if len(runs) > 1 else 'of the run'}"
    listed = _pairs({key: escape(_cut(text)) for key, text in same.items()})
    yield f"<details><summary>{words}</summary>{listed}</details>"
    for number, run in enumerate(runs):
        command = run.about.get("command")
        if isinstance(command, str) and command:
            yield f'<p class="r{number}">{_label(number, run)} resumes with <code>{escape(command)}</code></p>'


def _of_each(runs: Sequence[RecordedRun], texts: Sequence[str]) -> str:
    return "<br>".join(
        f'<span class="r{number} {_colour(number)}">{escape(run.name)}: {escape(_cut(text))}</span>'
        for number, (run, text) in enumerate(zip(runs, texts, strict=True))
    )


def _versions(runs: Sequence[RecordedRun]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.versions))
    if not names:
        return _empty("unknown: the run's directory has no checkpoint that says them")
    of_runs = {name: [str(run.versions.get(name, "unknown")) for run in runs] for name in names}
    return _pairs(
        {name: escape(found[0]) if len(set(found)) == 1 else _of_each(runs, found) for name, found in of_runs.items()}
    )

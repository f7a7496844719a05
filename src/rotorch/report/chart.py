"""Charts over steps, as HTML around inline SVG: curves that are stretched, and labels that are not.

[Note: stretched curves]
    A chart has to be legible at 400 and at 1400 pixels, and its page has no script that draws. So the SVG holds curves
    and grid only, and is stretched to whatever room there is (`preserveAspectRatio="none"`, strokes excepted). Labels
    are HTML, placed in percent, and keep their size.

[Note: spikes]
    A chart has fewer columns than a run has steps. Of the points of one column the lowest and the highest stay, so a
    spike of a single step is seen, and its value told. `NaN` ends a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from rotorch.core.quantities import format_bytes, format_count

NUM_COLOURS = 8
COLUMNS = 600
"""Columns of a chart that is as wide as a screen."""

_SIZE = 1000  # of the view box: a thousandth of a chart is finer than a pixel
_TICKS = 5


@dataclass(frozen=True)
class Unit:
    """Unit of a chart's values.

    Attributes:
        kind: "bytes", "count" or "number": the way a value is written, here and by the page's script.
        text: words for it.
        from_zero: True if the axis begins at zero.
    """

    kind: str
    text: str
    from_zero: bool = False

    def write(self, value: float) -> str:
        """A value of an axis, without the unit's words."""
        if self.kind == "bytes":
            return format_bytes(value)
        if self.kind == "count" and abs(value) >= 1000:
            return format_count(value)
        return f"{value:.4g}"


@dataclass(frozen=True)
class Curve:
    """Values of one run over steps; None where there is none.

    Attributes:
        label: name of the run, and of the curve if the run has two.
        run: number of the run: its colour.
        steps: ascending.
        values: one per step.
        dots: True for few values, measured now and then: dots on a dashed line.
    """

    label: str
    run: int
    steps: Sequence[int]
    values: Sequence[float | None]
    dots: bool = False

    @property
    def points(self) -> list[tuple[int, float | None]]:
        """Its points; of a dotted curve only points with a value."""
        pairs = zip(self.steps, self.values, strict=True)
        return [pair for pair in pairs if pair[1] is not None] if self.dots else list(pairs)


def thinned(
    points: Sequence[tuple[int, float | None]], *, first: int, last: int, columns: int
) -> list[tuple[int, float | None]]:
    """Of each column's points the lowest, the highest and one without a value; and the first and the last of all.

    Args:
        points: step and value, ascending.
        first: the step at the left edge.
        last: the step at the right edge.
        columns: their number.
    """
    if len(points) <= 3 * columns:
        return list(points)
    kept: list[tuple[int, float | None]] = [points[0]]
    for _, column in groupby(points[1:-1], key=lambda point: (point[0] - first) * columns // max(1, last - first)):
        found = list(column)
        there = [(value, number) for number, (_, value) in enumerate(found) if value is not None]
        chosen = {min(there)[1], max(there)[1]} if there else set()
        if len(there) < len(found):
            chosen.add(next(number for number, (_, value) in enumerate(found) if value is None))
        kept += [found[number] for number in sorted(chosen)]
    return [*kept, points[-1]]


def ticks(low: float, high: float, *, base: float = 10.0) -> list[float]:
    """Round values between two, at most `_TICKS` + 1. `base` 1024 gives round numbers of KiB, MiB and so on."""
    if not high > low:
        return [low]
    raw = (high - low) / _TICKS
    power = base ** math.floor(math.log(raw, base))
    factors = (1, 2, 5, 10) if base == 10.0 else (1, 2, 5, 10, 20, 50, 100, 200, 500, 1024)
    unit = next((power * f for f in factors if power * f >= raw * (1 - 1e-9)), power * base)
    return [n * unit for n in range(math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two values; with twos and fives if these are few, and the ends if they are none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8)):
        found = [f * 10.0**p for p in powers for f in factors if low * (1 - 1e-9) <= f * 10.0**p <= high * (1 + 1e-9)]
        if len(found) >= 3:
            return found[:: -(-len(found) // (_TICKS + 1))]
    return [low, high] if high > low else [low]


@dataclass(frozen=True)
class _Scale:
    """Way of a value to its height, from 0 (at the top) to `_SIZE`."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = (
            (math.log(self.low), math.log(self.high), math.log(value)) if self.is_log else (self.low, self.high, value)
        )
        return _SIZE * (0.5 if high == low else (high - at) / (high - low))


def _linear(values: Sequence[float], unit: Unit) -> _Scale:
    low, high = min(values), max(values)
    low = min(0.0, low) if unit.from_zero else low
    if high == low:  # a curve that stays where it is lies in the middle
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
        low = max(0.0, low) if min(values) >= 0 else low
    marks = ticks(low, high, base=1024.0 if unit.kind == "bytes" else 10.0)
    margin = 0.03 * (high - low)
    return _Scale(low if low == 0 else low - margin, high + margin, marks)


def _log(values: Sequence[float]) -> _Scale | None:
    positive = [value for value in values if value > 0]
    if not positive or max(positive) == min(positive):
        return None
    low, high = min(positive), max(positive)
    return _Scale(low, high, log_ticks(low, high), is_log=True)


def place_of_step(step: int, *, first: int, last: int) -> float:
    """Distance of a step from the left edge, from 0 to 1."""
    return (step - first) / (last - first) if last > first else 0.5


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: Unit,
    first: int,
    last: int,
    columns: int = COLUMNS,
    if_empty: str,
) -> str:
    """Draws curves over the steps from `first` to `last`.

    Args:
        title: a noun.
        curves: of all runs; those without a value are left out.
        unit: of the values.
        first: the step at the left edge.
        last: the step at the right edge.
        columns: number of columns of which the lowest and the highest value are kept.
        if_empty: words in place of a chart without any value.
    """
    head = f"<figcaption><b>{escape(title)}</b> <span>{escape(unit.text)}</span></figcaption>"
    drawn = [(c, thinned(c.points, first=first, last=last, columns=columns)) for c in curves]
    drawn = [(c, points) for c, points in drawn if any(value is not None for _, value in points)]
    values = [value for _, points in drawn for _, value in points if value is not None]
    if not values:
        return f'<figure class="chart">{head}<p class="empty">{escape(if_empty)}</p></figure>'
    scales = [("lin", _linear(values, unit)), ("log", _log(values))]
    bodies, labels = [], []
    for name, scale in scales:
        if scale is not None:
            places = [scale.place(tick) for tick in scale.ticks]
            grid = "".join(f"M0 {place:.0f}H{_SIZE}" for place in places)
            lines = "".join(_path(c, points, scale, first=first, last=last) for c, points in drawn)
            bodies.append(f'<g class="{name}"><path class="grid" d="{grid}"/>{lines}</g>')
            labels += [
                f'<span class="{name}" style="top:{place / _SIZE:.2%}">{escape(unit.write(tick))}</span>'
                for place, tick in zip(places, scale.ticks, strict=True)
            ]
    switch = '<label class="switch"><input type="checkbox" class="islog"> log scale</label>'
    data = json.dumps({"kind": unit.kind, "first": first, "last": last, "curves": [_data(*pair) for pair in drawn]})
    return (
        f'<figure class="chart">{head}{switch if scales[1][1] is not None else ""}'
        f'<div class="frame"><div class="ys">{"".join(labels)}</div><div class="area">'
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)} over steps">{"".join(bodies)}</svg><i class="cursor"></i></div>'
        f'{step_axis(first=first, last=last)}</div><p class="tip"></p>'
        f'<script type="application/json">{data.replace("<", chr(92) + "u003c")}</script></figure>'
    )


def step_axis(*, first: int, last: int) -> str:
    """Numbers of steps below a chart."""
    found = [round(t) for t in ticks(first, last) if t == round(t)] or [first]
    places = ((place_of_step(step, first=first, last=last), step) for step in found)
    is_long = last >= 100_000 and not any(step % 1000 for step in found)
    marks = "".join(
        f'<span style="left:{place:.2%}">{format_count(step) if is_long else f"{step:,}"}</span>'
        for place, step in places
    )
    return f'<div class="xs">{marks}</div>'


def _path(curve: Curve, points: Sequence[tuple[int, float | None]], scale: _Scale, *, first: int, last: int) -> str:
    """A curve, line by line: a step without a value, or without one that the scale has, ends a line."""
    parts: list[str] = []
    dots: list[str] = []
    for line in _lines(points, drawable=lambda value: not scale.is_log or value > 0):
        across = [_SIZE * place_of_step(step, first=first, last=last) for step, _ in line]
        places = [f"{x:.1f} {scale.place(value):.1f}" for x, (_, value) in zip(across, line, strict=True)]
        parts.append(f"M{'L'.join(places)}" if len(places) > 1 else f"M{places[0]}h0")
        dots += [f"M{place}h0" for place in places] if curve.dots else []
    looks = f"r{curve.run} c{curve.run % NUM_COLOURS}"
    path = f'<path class="curve {looks}{" dashed" if curve.dots else ""}" d="{"".join(parts)}"/>' if parts else ""
    return path + (f'<path class="dots {looks}" d="{"".join(dots)}"/>' if dots else "")


def _lines(
    points: Sequence[tuple[int, float | None]], *, drawable: Callable[[float], bool]
) -> Iterator[list[tuple[int, float]]]:
    line: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None and drawable(value):
            line.append((step, value))
        elif line:
            yield line
            line = []
    if line:
        yield line


def _data(curve: Curve, points: Sequence[tuple[int, float | None]]) -> dict[str, object]:
    there = [(step, value) for step, value in points if value is not None]
    return {
        "label": curve.label,
        "run": curve.run,
        "x": [step for step, _ in there],
        "y": [float(f"{value:.6g}") for _, value in there],
    }

"""The results of a suite as a picture: tokens per second against peak bytes per rank, one panel per case.

Up and to the left is better. The SVG is written here, so that it needs no browser; the HTML is plotly's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = [
    "#d62728",
    "#1f77b4",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#17becf",
    "#bcbd22",
    "#4a6fa5",
    "#a3c586",
    "#c49c94",
    "#f7b6d2",
    "#393b79",
]
_GREY = "#7f7f7f"
_SHAPES = ("circle", "square", "diamond")
_PER_ROW = 3
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 200, 70, 30, 60
_LEGEND_LINE, _LEGEND_COLUMN = 20, 300


@dataclass(frozen=True)
class Point:
    """One row of one case: MiB at the highest moment of a step, tokens per second."""

    row: str
    kind: str
    peak_mib: float
    tokens_per_s: float


def points_of(record: Mapping[str, Any]) -> list[Point]:
    """The rows of a record that are to be believed and have both figures. `kind` is the row for any number of ranks."""
    return [
        Point(
            row["parallel"],
            re.sub(r"=\d+", "=n", row["parallel"]),
            row["peak_bytes_per_rank"] / 2**20,
            row["tokens_per_s"],
        )
        for row in (record["limit"], *record["rows"])
        if {"tokens_per_s", "peak_bytes_per_rank"} <= set(row) and not {"error", "invalid"} & set(row)
    ]


def to_svg(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The picture as an SVG; a point tells its figures where the mouse rests on it."""
    panels = {case: points_of(record) for case, record in records.items()}
    looks = _looks(panels)
    legend_columns = max(1, min(_PER_ROW, len(looks)))
    legend_lines = -(-len(looks) // legend_columns)
    top = 60 + legend_lines * _LEGEND_LINE
    width = _LEFT + _PER_ROW * (_WIDTH + _GAP)
    height = top + max(1, -(-len(panels) // _PER_ROW)) * (_HEIGHT + _TOP + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">tokens per second against peak MiB of tensors per rank</text>',
    ]
    for number, kind in enumerate(looks):
        x = _LEFT + number % legend_columns * _LEGEND_COLUMN
        y = 45 + number // legend_columns * _LEGEND_LINE
        parts += [_mark(x, y, *looks[kind]), f'<text x="{x + 10}" y="{y + 4}">{escape(kind)}</text>']
    for number, (case, points) in enumerate(panels.items()):
        x = _LEFT + number % _PER_ROW * (_WIDTH + _GAP)
        y = top + _TOP + number // _PER_ROW * (_HEIGHT + _TOP + _GAP)
        parts += _panel(case, points, looks=looks, x=x, y=y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def to_html(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the plot as a self-contained page, to zoom and to hide rows in."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    panels = {case: points_of(record) for case, record in records.items()}
    if not panels:
        return "<!doctype html><title>no results</title><p>Nothing is measured yet.</p>\n"
    looks, lines = _looks(panels), -(-len(panels) // _PER_ROW)
    figure: Figure = make_subplots(rows=lines, cols=min(_PER_ROW, len(panels)), subplot_titles=list(panels))
    shown: set[str] = set()
    for number, points in enumerate(panels.values()):
        for point in points:
            colour, shape = looks[point.kind]
            trace = Scatter(
                x=[point.peak_mib],
                y=[point.tokens_per_s],
                name=point.kind,
                legendgroup=point.kind,
                showlegend=point.kind not in shown,
                mode="markers",
                marker={"color": colour, "symbol": shape, "size": 11},
                hovertemplate=f"{point.row}<br>%{{x:.1f}} MiB<br>%{{y:,.0f}} tokens/s<extra></extra>",
            )
            figure.add_trace(trace, row=number // _PER_ROW + 1, col=number % _PER_ROW + 1)
            shown.add(point.kind)
    figure.update_xaxes(title_text="peak MiB per rank", rangemode="tozero")
    figure.update_yaxes(title_text="tokens/s", rangemode="tozero")
    figure.update_layout(height=120 + 330 * lines, template="plotly_white")
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def _looks(panels: Mapping[str, Sequence[Point]]) -> dict[str, tuple[str, str]]:
    """Colour and shape of each kind of row, the same in all panels."""
    kinds = list(dict.fromkeys(point.kind for points in panels.values() for point in points))
    looks = {}
    kinds.sort(key=lambda kind: not kind.startswith("rtp"))  # the first colours stand out most
    for number, kind in enumerate(k for k in kinds if k != "limit"):
        looks[kind] = (_COLOURS[number % len(_COLOURS)], _SHAPES[number % len(_SHAPES)])
    return ({"limit": (_GREY, "circle")} if "limit" in kinds else {}) | looks


def _panel(
    case: str, points: Sequence[Point], *, looks: Mapping[str, tuple[str, str]], x: float, y: float
) -> Iterator[str]:
    """One case, its plot's upper left corner at (x, y)."""
    right = _nice(max((p.peak_mib for p in points), default=1.0))
    upper = _nice(max((p.tokens_per_s for p in points), default=1.0))
    yield f'<text x="{x}" y="{y - 8}" font-size="12" font-weight="bold">{escape(case)}</text>'
    yield f'<text x="{x + _WIDTH}" y="{y + _HEIGHT + 28}" text-anchor="end" fill="{_GREY}">MiB per rank</text>'
    yield f'<text x="{x}" y="{y - 22}" fill="{_GREY}">tokens/s</text>'
    for step in range(5):
        at_x, at_y = x + step * _WIDTH / 4, y + _HEIGHT - step * _HEIGHT / 4
        yield f'<line x1="{at_x}" y1="{y}" x2="{at_x}" y2="{y + _HEIGHT}" stroke="#e5e5e5"/>'
        yield f'<line x1="{x}" y1="{at_y}" x2="{x + _WIDTH}" y2="{at_y}" stroke="#e5e5e5"/>'
        yield f'<text x="{at_x}" y="{y + _HEIGHT + 15}" text-anchor="middle">{right * step / 4:g}</text>'
        yield f'<text x="{x - 5}" y="{at_y + 4}" text-anchor="end">{upper * step / 4:,g}</text>'
    for point in points:
        at_x = x + _WIDTH * point.peak_mib / right
        at_y = y + _HEIGHT * (1 - point.tokens_per_s / upper)
        says = f"{point.row}: {point.tokens_per_s:,.0f} tokens/s, {point.peak_mib:.1f} MiB"
        yield _mark(at_x, at_y, *looks[point.kind], says=says)


def _mark(x: float, y: float, colour: str, shape: str, *, says: str | None = None) -> str:
    title = f"<title>{escape(says)}</title>" if says else ""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity="0.85">{title}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    corner = f'x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"'
    return f'<rect {corner} fill="{colour}" fill-opacity="0.85"{turn}>{title}</rect>'


def _nice(value: float) -> float:
    """The next number above `value` whose quarters are easy to read."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * factor for factor in (1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if unit * factor > value)

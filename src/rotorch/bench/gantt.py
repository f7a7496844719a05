"""Gantt chart of ranks as a page to zoom into, shared by measured traces and simulated schedules. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One span of time.

    Attributes:
        row: the name of its line of the chart.
        start: in the chart's unit of time.
        length: likewise.
        says: text shown under the mouse.
        text: text written in the bar.
    """

    row: str
    start: float
    length: float
    says: str
    text: str = ""


def add_bars(figure: Any, bars: Sequence[Bar], *, name: str, colour: str, unit: str, **place: Any) -> None:
    """Draws one kind of spans into a plotly figure, with an entry of the legend; `place` is a subplot's row and col."""
    figure.add_bar(
        name=name,
        orientation="h",
        y=[bar.row for bar in bars],
        base=[bar.start for bar in bars],
        x=[bar.length for bar in bars],
        width=0.85,
        marker={"color": colour, "line": {"width": 0}},
        customdata=[bar.says for bar in bars],
        text=[bar.text for bar in bars] if any(bar.text for bar in bars) else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="inside",
        hovertemplate=f"%{{customdata}}<br>from %{{base:.3f}} {unit} for %{{x:.3f}} {unit}"
        "<extra>%{fullData.name}</extra>",
        **place,
    )


def lay_out(figure: Any, *, headlines: Sequence[str], rows: Sequence[str], unit: str, height: int) -> None:
    """Gives a figure its title (the first of `headlines`), lines below it, and the chart's rows from top to bottom."""
    title, *lines = map(escape, headlines)
    figure.update_layout(
        barmode="overlay",
        title={
            "text": "<br>".join([f"<b>{title}</b>", *lines]),
            "font": {"size": 14},
            "yref": "container",
            "y": 0.97,
            "yanchor": "top",
        },
        margin={"t": 70 + 22 * len(lines)},
        xaxis={"title": unit},
        yaxis={"categoryorder": "array", "categoryarray": list(rows)[::-1]},
        height=height,
        plot_bgcolor="white",
    )

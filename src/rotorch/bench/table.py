"""The bench as people read it: two tables, and a line for whatever is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rotorch.bench.tensor_memory import CATEGORIES
from rotorch.core.quantities import format_bytes, format_count

_NONE = "-"


def render(record: Mapping[str, Any]) -> RenderableType:
    """The tables of a whole record (see `record.make_record`)."""
    rows = [record["limit"], *record["rows"]] if record["limit"] else record["rows"]
    parts: list[RenderableType] = [_speed(rows, record=record), _memory(rows)]
    for row in rows:
        for kind in ("error", "invalid"):
            if kind in row:
                parts.append(Text(f"{row['parallel']}: {kind}: {row[kind].strip().splitlines()[-1]}", style="bold red"))
    for bar in record["bars"]:
        reached = _NONE if bar["reached"] is None else f"{bar['reached']:.3f}"
        style = "green" if bar["ok"] else "bold red"
        parts.append(Text(f"{'holds' if bar['ok'] else 'does not hold'}: {bar['bar']} (reached {reached})", style=style))
    return Group(*parts)


def _speed(rows: Sequence[Mapping[str, Any]], *, record: Mapping[str, Any]) -> Table:
    title = f"{record['model']}: {format_count(record['tokens_per_step'])} tokens a step, {record['task']['num_ranks']} ranks"
    table = Table(title=title, title_justify="left", caption="per rank: the rank with the most", caption_justify="left")
    table.add_column("layout")
    for name in ("tokens/s", "of limit", "step", "best", "optimizer", "sent/rank", "by Layout"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["parallel"],
            f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else _NONE,
            f"{row['ratio_to_limit']:.3f}" if "ratio_to_limit" in row else _NONE,
            _milliseconds(row.get("step_s_median")),
            _milliseconds(row.get("step_s_best")),
            _milliseconds(row.get("optimizer_s_median")),
            _bytes(row.get("sent_bytes_per_rank")),
            _bytes(row.get("layout", {}).get("sent_bytes")),
            style="dim" if "error" in row or "invalid" in row else "",
        )
    return table


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title="bytes per rank: tensors exactly (resident = weights + gradients + optimizer), and the process as the kernel counts it",
        title_justify="left",
    )
    table.add_column("layout")
    for name in ("resident", "by Layout", "peak", *(f"at peak: {c}" for c in CATEGORIES), "process peak", "process rest"):
        table.add_column(name, justify="right")
    for row in rows:
        process = row.get("process", {})
        at_peak = row.get("peak_by_category", {})
        table.add_row(
            row["parallel"],
            _bytes(row.get("resident_bytes_per_rank")),
            _bytes(row.get("layout", {}).get("resident_bytes")),
            _bytes(row.get("peak_bytes_per_rank")),
            *(_bytes(at_peak.get(category)) for category in CATEGORIES),
            _bytes(max(process.get("peak_bytes_by_rank", []), default=None)),
            _bytes(max(process.get("resident_bytes_by_rank", []), default=None)),
        )
    return table


def _bytes(value: int | None) -> str:
    return _NONE if value is None else format_bytes(value)


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{1e3 * value:.1f} ms"

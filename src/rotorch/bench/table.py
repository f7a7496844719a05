"""The bench as people read it: three tables, and a line for each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rotorch.bench.trace import SHARES
from rotorch.core.quantities import format_count
from rotorch.traced.live_storages import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER

_NONE = "-"
_SPEED_CAPTION = (
    "medians; times in ms; bytes in MiB: sent, what the rank that sends most asks for, by the textbook's algorithms, "
    "and by the Layouts; wire, a rank's mean by the interface's counter (over gloo a reduce-scatter is an all-reduce, "
    "over NCCL it is not)"
)
_MEMORY_CAPTION = (
    "MiB of the rank with the most. rest: weights, gradients and optimizer state, exactly, and by the Layouts; peak: "
    "tensors at the highest moment of a step; plan: the same, by passes counted on fake tensors; process: at its peak, "
    "as the kernel counts it, shared pages once"
)
_LEDGER_CAPTION = (
    "MiB of the rank with the most. peak: what the tensors of the highest moment of a step are (gradients may be freed "
    "then, and not made yet); saved: what autograd keeps; slots: what slices of a ring pass through; other: the rest, "
    "also in percent; plan: the highest moment by counted passes, gathered weights and temporaries left out; rest: "
    "between backward and the optimizer; Layout: what the formulas say, where there is one"
)
_TIMELINE_CAPTION = (
    "percent of traced steps: computing; waiting for a slice of weights, for a gradient that rides home, for "
    "collectives; optimizer; other: making the batch, ranks that begin or end later"
)
_LINES = ("measured", "peak"), ("planned", "plan"), ("at_rest", "rest"), ("predicted", "Layout")
_SHORT = {GRADIENTS: "grads", OPTIMIZER: "optim", ACTIVATIONS: "saved"}


def render(record: Mapping[str, Any]) -> RenderableType:
    """The tables of a whole record (see `record.make_record`)."""
    rows = [row for row in (record["limit"], *record["rows"]) if row]
    parts: list[RenderableType] = [_speed(rows, record=record), _memory(rows), _ledger(rows)]
    if any("timeline" in row for row in rows):
        parts.append(_timeline(rows))
    for row in rows:
        for kind in ("error", "invalid"):
            if kind in row:
                parts.append(Text(f"{row['parallel']}: {kind}: {_last_line(row[kind])}", style="bold red"))
    if "warning" in record:
        parts.append(Text(f"warning: {record['warning']}", style="yellow"))
    for bar in record["bars"]:
        reached = _NONE if bar["reached"] is None else f"{bar['reached']:.3f}"
        says = "holds" if bar["ok"] else "does not hold"
        style = "green" if bar["ok"] else "bold red"
        parts.append(Text(f"{says}: {bar['bar']} (reached {reached})", style=style))
    return Group(*parts)


def _speed(rows: Sequence[Mapping[str, Any]], *, record: Mapping[str, Any]) -> Table:
    tokens, num_ranks = format_count(record["tokens_per_step"]), record["task"]["num_ranks"]
    said = ", blocks compiled" if record["task"].get("compile") else ""
    if (virtual := record.get("virtual_time")) is not None:
        said += f", products of {virtual['products_s']:g} s on a device's clock"
    table = _table(
        f"{escape(record['model'])}: {tokens} tokens a step, {num_ranks} ranks{said}",
        columns=("tokens/s", "of limit", "step", "best", "optimizer", "sent", "Layout", "wire"),
        caption=_SPEED_CAPTION,
    )
    for row in rows:
        _add(
            table,
            row,
            f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else _NONE,
            f"{row['ratio_to_limit']:.3f}" if "ratio_to_limit" in row else _NONE,
            _milliseconds(row.get("step_s_median")),
            _milliseconds(row.get("step_s_best")),
            _milliseconds(row.get("optimizer_s_median")),
            _mebibytes(row.get("sent_bytes_per_rank")),
            _mebibytes(row.get("layout", {}).get("sent_bytes")),
            _mebibytes(wire_bytes_per_rank(row)),
        )
    return table


def wire_bytes_per_rank(row: Mapping[str, Any]) -> float | None:
    """Bytes on the interface per step, the mean over ranks; None if they were not counted."""
    return row["wire_bytes_all_ranks"] / row["nproc"] if "wire_bytes_all_ranks" in row else None


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("rest", "Layout", "peak", "plan", "process")
    table = _table("memory per rank", columns=columns, caption=_MEMORY_CAPTION)
    for row in rows:
        _add(
            table,
            row,
            _mebibytes(row.get("resident_bytes_per_rank")),
            _mebibytes(row.get("layout", {}).get("resident_bytes")),
            _mebibytes(row.get("peak_bytes_per_rank")),
            _mebibytes(max(row.get("planned_peak_bytes_by_rank", []), default=None)),
            _mebibytes(max(row.get("process", {}).get("peak_bytes_by_rank", []), default=None)),
        )
    return table


def _ledger(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", *(_SHORT.get(name, name) for name in CATEGORIES), "%")
    table = _table("memory ledger per rank", columns=columns, caption=_LEDGER_CAPTION)
    for row in rows:
        for number, (line, title) in enumerate(_LINES):
            found = row.get("ledger", {}).get(line)
            if found is None:
                continue
            share = f"{100 * row['ledger']['other_share']:.1f}" if line == "measured" else ""
            cells = [_mebibytes(found.get(category)) for category in CATEGORIES]
            _add(table, row if number == 0 else {**row, "parallel": ""}, title, *cells, share)
    return table


def _timeline(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("rank", "compute", "slice", "gradient", "coll.", "optim", "other")
    table = _table("who computes and who waits", columns=columns, caption=_TIMELINE_CAPTION)
    for row in rows:
        for rank, parts in enumerate(row.get("timeline", {}).get("shares_by_rank", [])):
            cells = [f"{100 * parts[share]:.1f}" for share in SHARES]
            _add(table, row if rank == 0 else {**row, "parallel": ""}, str(rank), *cells)
    return table


def _table(title: str, *, columns: Sequence[str], caption: str) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", padding=(0, 1), box=None)
    table.add_column("layout", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", min_width=5)
    return table


def _add(table: Table, row: Mapping[str, Any], *cells: str) -> None:
    table.add_row(Text(row["parallel"]), *cells, style="dim" if "error" in row or "invalid" in row else "")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _mebibytes(value: float | None) -> str:
    return _NONE if value is None else f"{value / 2**20:.2f}" if value < 100 * 2**20 else f"{value / 2**20:.0f}"


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{1e3 * value:.1f}"

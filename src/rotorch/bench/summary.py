"""The results of a suite as one Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rotorch.bench.table import wire_bytes_per_rank

_NONE = "-"
_UNLIKE = (
    "Measured before the processes of all rows were set alike: layouts keep what a step frees and let gloo's threads "
    "wait, other libraries' processes are as torch leaves them."
)
_COLUMNS = (
    *("case", "row", "tokens/s", "of limit", "peak MiB", "rest MiB", "process MiB", "sent MiB", "on the wire MiB"),
    "losses off by",
)
_HEAD = """\
Made by `rotorch suite`; every figure, the machine and the method are in the JSON files beside this one.
Compare rows within a case only: they took turns in one run. **of limit**: tokens per second against as many
ranks that send nothing, the median over rounds. **peak**, **rest**: tensors of the rank with the most, at the highest
moment of a step, and weights with gradients and optimizer state. **process**: the kernel's figure at the peak.
**sent**: what the rank that sends most asks of torch.distributed, at what a ring algorithm sends. **on the wire**: a
rank's mean by the counter of the interface. gloo makes a reduce-scatter of an all-reduce, so FSDP2's is more than it
sent; NCCL does not, so a forecast for GPUs is **sent**.
**losses off by**: the largest relative difference from one process that trains on the whole global batch.
"""


def to_markdown(records: Mapping[str, Mapping[str, Any]], *, missing: Sequence[str] = ()) -> str:
    """The table.

    Args:
        records: results of `bench`, by case.
        missing: cases that were not measured.
    """
    lines = [
        _HEAD,
        *_origins(records),
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'|'.join('---' for _ in _COLUMNS[:2])}{'|---:' * 8}|",
    ]
    notes = []
    for case, record in records.items():
        for number, row in enumerate([record["limit"], *record["rows"]]):
            if row:
                lines.append(f"| {' | '.join([f'**{case}**' if not number else '', *_cells(row)])} |")
        commit, machine = str(record.get("commit") or "?")[:10], record["machine"]
        date = record.get("date")
        # Records have had their date since their load is that of before they were made.
        load = f"load {'before' if date else 'after'} {machine['load_average'][0]}"
        notes.append(
            f"- {case}: {record['tokens_per_step']} tokens a step, commit {commit}, {f'{date}, ' if date else ''}"
            f"{machine['cores']} cores ({machine['cpu']}), {load}"
        )
        for row in [record["limit"], *record["rows"]]:
            notes += [
                f"  - {row['parallel']}: {kind}: {_last(row[kind])}" for kind in ("error", "invalid") if kind in row
            ]
        for bar in record["bars"]:
            reached = _NONE if bar["reached"] is None else f"{bar['reached']:.3f}"
            notes.append(f"  - {'holds' if bar['ok'] else 'does not hold'}: `{bar['bar']}` (reached {reached})")
    lines += ["", *notes]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def _origins(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Caveats that hold for all cases: several commits, and processes with unequal settings."""
    commits = {str(record.get("commit") or "?")[:10] for record in records.values()}
    unlike = [
        case for case, record in records.items() if any("process_settings" not in row for row in _measured(record))
    ]
    lines = []
    if len(commits) == 1:
        lines.append(f"All cases are of commit {commits.pop()}.")
    elif commits:
        lines.append(f"**The cases are of {len(commits)} commits**: each one's is below the table.")
    if unlike and len(unlike) == len(records):
        lines.append(f"**{_UNLIKE}**")
    elif unlike:
        lines.append(f"**{_UNLIKE}** That is so of {', '.join(unlike)}.")
    elif records:
        lines.append("Processes of all rows are set alike, but for those of rows that end in -as-is.")
    return [*lines, ""] if lines else []


def _measured(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in [record["limit"], *record["rows"]] if "step_s_median" in row]


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = row["parallel"]
    if row.get("library", "torch") != "torch":
        name = f"{name} ({row['library_version']})"
    if "error" in row:
        return [f"`{name}`", "failed", *[_NONE] * 7]
    process = max(row.get("process", {}).get("peak_bytes_by_rank", []), default=None)
    return [
        f"`{name}`",
        "invalid" if "invalid" in row else f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else _NONE,
        f"{row['ratio_to_limit']:.3f}" if "ratio_to_limit" in row and "invalid" not in row else _NONE,
        *map(_mebibytes, (row.get("peak_bytes_per_rank"), row.get("resident_bytes_per_rank"), process)),
        *map(_mebibytes, (row.get("sent_bytes_per_rank"), wire_bytes_per_rank(row))),
        f"{row['loss_max_rel_err']:.0e}" if "loss_max_rel_err" in row else _NONE,
    ]


def _mebibytes(value: float | None) -> str:
    return _NONE if value is None else f"{value / 2**20:.1f}"


def _last(text: str) -> str:
    return text.strip().splitlines()[-1]

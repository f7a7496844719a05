"""Profile of a layout's step: torch's profiler on rank 0, as a table and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from rotorch.bench.contender import Contender

_NUM_OPS = 60


def profile_steps(contender: Contender, *, steps: Sequence[int], file: str | None) -> None:
    """Runs `steps`; where `file` is given, under the profiler: its table goes there, its trace beside it. All ranks."""
    with nullcontext() if file is None else profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in steps:
            contender.forward_backward(step)
            contender.update()
    if file is None or profiler is None:
        return
    averages = profiler.key_averages()
    table = averages.table(sort_by="self_cpu_time_total", row_limit=_NUM_OPS, max_name_column_width=70)
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{len(steps)} steps\n{table}\n")
    profiler.export_chrome_trace(str(path.with_suffix(".trace.json")))

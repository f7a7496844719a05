"""The `--json` file: the task, the machine, and every figure of every row.

Fields that other tools rely on: `machine`, `model`, `tokens_per_step`, `rows` and `limit`, whose entries have
`parallel`, `nproc`, `tokens_per_s`, `step_s_median`, `step_s_all`, `peak_bytes_per_rank`, `resident_bytes_per_rank`,
`sent_bytes_per_rank`, `loss_last`. A figure "per rank" is that of the rank with the most; `..._by_rank` has all;
`ledger` has its bytes by category, measured, predicted by formulas at rest, and planned at the highest moment.
A row that failed has `error`; one whose losses are wrong, or whose ranks hold more weights than it claims, has
`invalid`. Rows of other libraries have their name in `parallel`, and `library` and `library_version`.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from rotorch.bench.contender import LIMIT
from rotorch.bench.gate import GATE_STEPS, TOLERANCES, Verdict
from rotorch.bench.peers import Peer
from rotorch.bench.process_memory import MALLOC_ENVIRONMENT, ProcessMemory
from rotorch.bench.process_settings import ProcessSettings
from rotorch.bench.rank import Traffic
from rotorch.bench.rounds import STEPS_TO_WAKE, WARM_UP_STEPS, Times, ratio
from rotorch.bench.task import NUM_BATCHES, Task
from rotorch.bench.tensor_memory import TensorMemory
from rotorch.bench.wire import WireBytes
from rotorch.planner.memory import Memory
from rotorch.planner.prediction import Prediction
from rotorch.source import source_commit
from rotorch.traced.counted_memory import by_category

METHOD = (
    f"Rows take turns in one run; {WARM_UP_STEPS} first steps of each are dropped, and {STEPS_TO_WAKE} of each turn; "
    "the ranks of a row meet before each step; a step lasts from the first rank's start to the last rank's end, "
    "optimizer included.",
    "tokens_per_s is from step_s_median (all steps); ratio_to_limit is the median over rounds of the ratio of the "
    "rounds' medians.",
    "limit: as many ranks, each a replica in plain torch with its own share of the data, nothing sent.",
    "On CPU the processes of all rows keep what they free, and their threads of gloo wait for their turn, as "
    "`parallelize` has it; only peers whose name ends in -as-is run as torch leaves them.",
    f"Random tokens, {NUM_BATCHES} global batches in turn; AdamW(fused=True) in every row, constant learning rate, no "
    "dropout.",
    "virtual_time, if it is there: products took FLOPs / rate on a device's clock; messages and the optimizer took "
    "what they took.",
    f"Gate: the first {GATE_STEPS} losses against one process with the whole global batch; and the weights that ranks "
    "hold between them against what the row says that it cuts.",
    "peak_bytes and resident_bytes: exact bytes of tensors, each rank counting the weights and gradients that it is "
    "home to; resident is weights + gradients + optimizer state; peak is the highest moment of a step.",
    "process: the kernel's figures above the process's own before the model was built, shared pages divided among "
    f"those that map them (PSS), in a run of its own with {' '.join(map('='.join, MALLOC_ENVIRONMENT.items()))}.",
    "sent_bytes: operations of torch.distributed as issued, at what a ring algorithm sends; reads of shared memory "
    "send nothing, and a small sum that is made there counts as the all-reduce that it stands for.",
    "wire_bytes_all_ranks: what the loopback interface counted in a step, of all ranks, headers and acknowledgements "
    "included. gloo makes a reduce-scatter of an all-reduce, so it may be more than was asked for; NCCL does not, so a "
    "forecast for GPUs is sent_bytes.",
)


@dataclass
class Row:
    """Figures of one row; those that could not be measured are missing.

    Attributes:
        name: "limit", `--parallel` text, or a peer's name.
        num_ranks: number of its ranks.
        threads: threads of each rank.
        transport: transport of slices, if there is a choice.
        transport_within: of the ranks inside of a ring that share a batch.
        times: None if the row failed.
        verdict: on its losses.
        tensors, traffic: by rank.
        process: by rank: before the model was built, and after some steps.
        predictions: of the Layouts, by rank; none for the limit.
        planned: memory at the highest moment by rank, by counted passes; none without `tensors`, or uncounted.
        timeline: shares of ranks' time in traced steps, and the files of the trace (see `trace_files.py`).
        error: why it failed.
        peer: the other library's way to train that it is; None for rotorch's own.
        held_elements: of weights at rest, by rank.
        settings: of its processes.
        wire: bytes that the interface counted in one step; None if they were not counted.
    """

    name: str
    num_ranks: int
    threads: int = 1
    transport: str | None = None
    transport_within: str | None = None
    times: Times | None = None
    verdict: Verdict | None = None
    tensors: list[TensorMemory] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    process: list[tuple[ProcessMemory, ProcessMemory]] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    planned: list[Memory] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    error: str | None = None
    peer: Peer | None = None
    held_elements: list[int] = field(default_factory=list)
    settings: ProcessSettings | None = None
    wire: WireBytes | None = None

    @property
    def problem(self) -> str | None:
        """Reason why the row's figures are not to be used, or None."""
        return self.error or (self.verdict.reason if self.verdict else None)

    @property
    def heaviest(self) -> TensorMemory | None:
        """Tensors of the rank with the highest peak."""
        return max(self.tensors, key=lambda t: t.peak_bytes, default=None)

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes sent by each rank, of all kinds."""
        return [sum(traffic.sent_bytes.values()) for traffic in self.traffic]

    def process_bytes(self) -> dict[str, list[int]]:
        """Memory of each rank's process beyond that without the model: at rest, at the peak, and private at rest."""
        return {
            "resident": [after.pss_bytes - before.pss_bytes for before, after in self.process],
            "peak": [after.peak_bytes - before.pss_bytes for before, after in self.process],
            "private": [after.private_bytes - before.private_bytes for before, after in self.process],
        }

    def memory_bytes(self) -> dict[str, int]:
        """Memory of the rank with the most: tensors at their peak and at rest, the process at its peak."""
        found = {}
        if self.tensors:
            found["peak"] = max(t.peak_bytes for t in self.tensors)
            found["rest"] = max(t.resident_bytes for t in self.tensors)
        if self.process:
            found["process"] = max(self.process_bytes()["peak"])
        return found


def row_record(row: Row, *, task: Task, limit: Times | None) -> dict[str, Any]:
    """Returns a row as JSON."""
    found: dict[str, Any] = {"parallel": row.name, "nproc": row.num_ranks, "threads_per_rank": row.threads}
    if row.peer is not None:
        found |= {"library": row.peer.library, "library_version": row.peer.library_version}
    if row.transport is not None:
        found["transport"] = row.transport
    if row.settings is not None:
        found["process_settings"] = asdict(row.settings)
    if row.times is not None and row.times.rounds:
        found |= _time_record(row.times, task=task, limit=limit)
    heaviest_prediction = max(row.predictions, key=lambda p: p.weights_bytes, default=None)
    if row.tensors and row.heaviest is not None:
        peaks, residents = [t.peak_bytes for t in row.tensors], [t.resident_bytes for t in row.tensors]
        found |= {
            "peak_bytes_per_rank": row.memory_bytes()["peak"],
            "resident_bytes_per_rank": row.memory_bytes()["rest"],
            "peak_bytes_by_rank": peaks,
            "resident_bytes_by_rank": residents,
            "peak_by_category": row.heaviest.peak,
            "resident_by_category": row.heaviest.resident,
            "ledger": ledger(row.heaviest, predicted=heaviest_prediction.ledger if heaviest_prediction else None),
        }
    if row.planned:
        found["planned_peak_bytes_by_rank"] = [round(memory.total_bytes) for memory in row.planned]
        heaviest = max(range(len(row.tensors)), key=lambda rank: row.tensors[rank].peak_bytes)
        found["ledger"]["planned"] = by_category(row.planned[heaviest])
    if row.held_elements:
        found["weight_elements_by_rank"] = row.held_elements
    if row.traffic:
        most = max(row.traffic, key=lambda t: sum(t.sent_bytes.values()))
        found |= {
            "sent_bytes_per_rank": max(row.sent_bytes),
            "sent_bytes_by_rank": row.sent_bytes,
            "sent_by_kind": most.sent_bytes,
            "messages_by_kind": most.num_messages,
        }
    if row.wire is not None:
        found |= {"wire_bytes_all_ranks": row.wire.total, "wire_counter": row.wire.counter}
    if row.process:
        found["process"] = {f"{name}_bytes_by_rank": by_rank for name, by_rank in row.process_bytes().items()}
    if heaviest_prediction is not None:
        found["layout"] = {
            "weights_bytes": heaviest_prediction.weights_bytes,
            "resident_bytes": 4 * heaviest_prediction.weights_bytes,  # weights, gradients, two moments
            "transient_bytes": heaviest_prediction.transient_bytes,
            "sent_bytes": max(p.total_sent_bytes for p in row.predictions),
        }
    if row.timeline is not None:
        found["timeline"] = row.timeline
    if row.verdict is not None:
        found["loss_max_rel_err"] = row.verdict.max_rel_err
        if row.verdict.reason:
            found["invalid"] = row.verdict.reason
    if row.error:
        found["error"] = row.error
    return found


def ledger(measured: TensorMemory, *, predicted: Mapping[str, int | None] | None) -> dict[str, Any]:
    """Returns a rank's bytes at the peak of a step and at rest, as measured and as predicted by the Layouts.

    `highest` has the most of each category, each at its own moment.
    `predicted` has null where no formula says it; `other_made_by` names the operations behind "other".
    """
    return {
        "measured": measured.peak,
        "highest": measured.highest,
        "at_rest": {**measured.resident, "slots": measured.slots_bytes},
        "predicted": None if predicted is None else dict(predicted),
        "other_share": measured.peak["other"] / measured.peak_bytes,
        "other_made_by": measured.other,
    }


def _time_record(times: Times, *, task: Task, limit: Times | None) -> dict[str, Any]:
    step_s = median(times.all_s)
    losses = [sum(by_rank) / len(by_rank) for by_rank in times.losses]
    found = {
        "tokens_per_s": task.tokens_per_step / step_s,
        "step_s_median": step_s,
        "step_s_best": min(times.all_s),
        "step_s_all": times.all_s,
        "step_s_rounds": [median(turn) for turn in times.rounds],
        "optimizer_s_median": median(times.optimizer_s),
        "loss_last": losses[-1],
        "losses": losses,
    }
    if limit is not None and limit.rounds:
        against = ratio(times, to=limit)
        found |= {
            "ratio_to_limit": against.median,
            "ratio_to_limit_best": against.best,
            "ratio_to_limit_rounds": against.rounds,
        }
    return found


def make_record(
    rows: Sequence[Row],
    *,
    task: Task,
    reference: Sequence[float],
    bars: Sequence[Mapping[str, Any]],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole file; `origin` is `describe_origin` as it was before anything was measured."""
    limit = next((row.times for row in rows if row.name == LIMIT), None)
    records = {row.name: row_record(row, task=task, limit=limit) for row in rows}
    return {
        **origin,
        "load_average_after": load_average(),
        "model": task.name,
        "tokens_per_step": task.tokens_per_step,
        "rows": [record for name, record in records.items() if name != LIMIT],
        "limit": records.get(LIMIT, {}),
        "bars": list(bars),
        "reference_losses": list(reference),
        "loss_tolerance": TOLERANCES[task.precision],
        "task": task.to_json(),
        "method": list(METHOD),
    }


def describe_origin() -> dict[str, Any]:
    """Origin of a record's figures. Call it before measuring, while the load is that of other processes."""
    return {
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "commit": source_commit(),
        "command": _command(),
    }


def _command() -> str:
    """The command of this process, as a shell takes it; for readers elsewhere absolute paths are cut to their names."""
    program = Path(sys.argv[0])
    words = [program.parent.name if program.name == "__main__.py" else program.name, *map(_with_names, sys.argv[1:])]
    return shlex.join(words)


def _with_names(word: str) -> str:
    """An argument whose absolute paths, also in lists and as URLs of files, are their last names."""
    parts = re.split(r"""([=,\s"'\[\]{}])""", word)
    return "".join(Path(part).name if part.startswith(("/", "file:///")) else part for part in parts)


def load_average() -> list[float]:
    """Load averages of the machine over one, five and fifteen minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def describe_machine() -> dict[str, Any]:
    """Describes the machine behind the figures: processor, usable cores, memory, present load."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": load_average(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for one that runs from its source, not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("rotorch", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "?"

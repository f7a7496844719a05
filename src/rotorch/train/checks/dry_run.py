"""Bytes that each rank of a run would read and hold, against its memory. Starts nothing.

[Note: counted and by formulas]
    At rest, and in buffers, ranks hold what the Layouts' formulas say. What passes keep is counted on fake tensors
    (`counted_memory`), and a rank's highest moment found: not everything is there at once in it. Where passes cannot be
    counted, formulas are all that there is.

[Note: what a resume reads]
    Every file is read once, by one of the ranks, to check its digest. Then each rank reads its chunks of the
    weights and of the optimizer's state per element, the optimizer's whole state per weight (AdamW's number of
    steps), the buffers, and its own random states if equally many ranks wrote the checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rotorch.core.quantities import format_bytes, format_count
from rotorch.core.stage_balance import layer_costs
from rotorch.core.stages import whole_layers
from rotorch.mesh import device_type
from rotorch.models.decay import num_decayed_parameters
from rotorch.pipelining.stage_strategy import StageStrategy, written
from rotorch.planner.memory import Memory
from rotorch.planner.prediction import Prediction, predict_ranks
from rotorch.process.host_memory import address_space_left_bytes, available_bytes
from rotorch.shard.materialize import on_meta
from rotorch.strategies import format_parallel
from rotorch.traced.counted_memory import by_category
from rotorch.train.checkpoint.manifest import BUFFER, MODEL, OPTIMIZER, Manifest
from rotorch.train.checks.counted_memory import counted_ranks, optimizer_bytes
from rotorch.train.checks.preflight import CheckedRun, micro_batch_of
from rotorch.train.module import make_module
from rotorch.train.state import WEIGHT, rng_name


@dataclass(frozen=True)
class RankPlan:
    """Bytes that one rank would read and hold.

    Attributes:
        rank: number of the rank.
        checks_bytes: read from the checkpoint's files to hold them against their digests.
        reads_bytes: read into tensors.
        weights_bytes, gradients_bytes, optimizer_bytes: held at rest.
        passes_bytes: buffers and gathered weights in a pass, at most.
        activations_bytes: beyond these four at the highest moment of a step; None if that was not counted.
        copies_bytes: of what is saved while training goes on (`train.async_save`), in host memory; at most, since
            of ranks that hold the same each copies its share.
    """

    rank: int
    checks_bytes: int
    reads_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    passes_bytes: int
    activations_bytes: int | None
    copies_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes on the device; without activations and temporaries if these were not counted."""
        by_formulas = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.passes_bytes
        return by_formulas + (self.activations_bytes or 0)

    @property
    def in_pass_bytes(self) -> int:
        """Bytes beyond those at rest, as far as they were counted."""
        return self.passes_bytes + (self.activations_bytes or 0)

    @property
    def host_bytes(self) -> int:
        """Host memory of the rank if it trains on the CPU."""
        return self.needed_bytes + self.copies_bytes


_SUMS = ("needed_bytes", "in_pass_bytes", "host_bytes")
"""Of a plan's bytes, in the record of a dry run."""

_EXACT = {"adamw", "lion", "sgd"}
"""Names of optimizers whose state has a formula."""


def dry_run(run: CheckedRun) -> dict[str, Any]:
    """Computes the bytes that the ranks of a checked run would read and hold; returns plain JSON values."""
    predictions = predict_ranks(run.spec, strategies=run.strategies_in_passes)
    read = None if run.resume is None else _Reading(run, run.resume.manifest)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", run.num_ranks))
    counted, not_counted = counted_ranks(run)
    ranks = [
        _plan(run, found, read, highest, rank=rank)
        for rank, (found, highest) in enumerate(zip(predictions, counted, strict=True))
    ]
    on_gpus = device_type(run.config.train.device) == "cuda"
    on_host = [plan.copies_bytes if on_gpus else plan.host_bytes for plan in ranks]
    together = max(sum(on_host[first : first + local]) for first in range(0, len(ranks), local))
    limits: list[tuple[str, int, int]] = []
    if on_gpus:
        largest = max(plan.needed_bytes for plan in ranks)
        limits.append(("rank's GPU", largest, torch.cuda.get_device_properties(0).total_memory))
    if together:
        limits.append(("machine", together, available_bytes()))
        if (left := address_space_left_bytes()) is not None:
            limits.append(("rank's address space (ulimit -v)", max(on_host), left))
    with on_meta():
        module = make_module(run.model_config, lora=run.config.lora)
    return {
        "parallel": format_parallel(run.strategies),
        "num_trained_parameters": run.spec.num_trained_parameters,
        "num_decayed_parameters": num_decayed_parameters(module, run.spec.weights),
        "resume": None if run.resume is None else str(run.resume.checkpoint),
        "step": 0 if run.resume is None else run.resume.manifest.step,
        "stages": _stages(run),
        "highest": [None if each is None else by_category(each) for each in counted],
        "not_counted": not_counted,
        "ranks": [{**asdict(plan), **{name: getattr(plan, name) for name in _SUMS}} for plan in ranks],
        "limits": [{"of": what, "needed_bytes": needed, "available_bytes": there} for what, needed, there in limits],
        "optimizer_at_least": run.config.optimizer.name not in _EXACT,
        "fits": all(needed <= there for _, needed, there in limits),
    }


def _stages(run: CheckedRun) -> dict[str, Any] | None:
    """Numbers of layers of each stage of a pipeline, and its part of all operations; None without a pipeline."""
    for strategy in run.strategies:
        if isinstance(strategy, StageStrategy):
            costs = layer_costs(run.spec, batch=micro_batch_of(run.config), halves=True)
            each = []
            for stage, places in enumerate(strategy.places_of(run.spec)):
                again = strategy.recomputed(stage, part=whole_layers(places))
                each.append(sum(costs[place].flops for place in places) + sum(costs[2 * n].again_flops for n in again))
            return {
                "layers": written(strategy.places_of(run.spec), halves=True),
                "parts_of_operations": [flops / sum(each) for flops in each],
            }
    return None


def _plan(run: CheckedRun, found: Prediction, read: _Reading | None, highest: Memory | None, *, rank: int) -> RankPlan:
    ledger, activations = found.ledger, None
    if highest is not None:
        by_formulas = found.weights_bytes + found.padding_bytes + found.copies_bytes + found.trained_bytes
        rest = highest.total_bytes - highest.by_category["optimizer"]
        activations = max(0, round(rest) - by_formulas - found.transient_bytes)
    state = optimizer_bytes(run, found)
    checks, reads = (0, 0) if read is None else (read.checks_bytes(rank), read.reads_bytes(found, rank=rank))
    return RankPlan(
        rank=rank,
        checks_bytes=checks,
        reads_bytes=reads,
        weights_bytes=ledger["weights"] or 0,
        gradients_bytes=ledger["gradients"] or 0,
        optimizer_bytes=state,
        passes_bytes=found.transient_bytes,
        activations_bytes=activations,
        copies_bytes=found.weights_bytes + found.padding_bytes + state if run.config.train.async_save else 0,
    )


class _Reading:
    """Bytes that ranks read to check, and to load (see [Note: what a resume reads]).

    What is the same for all ranks is found once: a manifest has entries, and files, of every rank that wrote it.
    """

    def __init__(self, run: CheckedRun, manifest: Manifest) -> None:
        self._num_ranks, self._manifest = run.num_ranks, manifest
        self._file_bytes = [manifest.files[name].num_bytes for name in sorted(manifest.files)]
        whole = {MODEL + weight.name for weight in run.spec.weights if weight.trained}
        self._trained_bytes = max(1, sum(manifest.tensors[name].num_bytes for name in whole & manifest.tensors.keys()))
        self._whole_bytes = sum(entry.num_bytes for entry in manifest.names(BUFFER).values())
        self._element_bytes: list[int] = []
        for key, kind in (manifest.optimizer.kinds if manifest.optimizer is not None else {}).items():
            of_key = sum(entry.num_bytes for entry in manifest.names(f"{OPTIMIZER}{key}/").values())
            if kind == WEIGHT:
                self._element_bytes.append(of_key)
            else:
                self._whole_bytes += of_key

    def checks_bytes(self, rank: int) -> int:
        """Bytes that a rank reads to hold files against their digests."""
        return sum(self._file_bytes[rank :: self._num_ranks])

    def reads_bytes(self, found: Prediction, *, rank: int) -> int:
        """Bytes that a rank reads into tensors."""
        reads = found.weights_bytes + self._whole_bytes
        reads += sum(of_key * found.trained_bytes // self._trained_bytes for of_key in self._element_bytes)
        if self._manifest.num_ranks == self._num_ranks and rng_name(rank) in self._manifest.tensors:
            reads += self._manifest.tensors[rng_name(rank)].num_bytes
        return reads


def show_dry_run(found: dict[str, Any], *, console: Console) -> None:
    """Prints what `dry_run` found."""
    columns = {
        "checks": "checks_bytes",
        "reads": "reads_bytes",
        "weights": "weights_bytes",
        "gradients": "gradients_bytes",
        "optimizer": "optimizer_bytes",
        "in a pass": "in_pass_bytes",
        "copy to save": "copies_bytes",
        "together": "host_bytes",
    }
    shown = {name: key for name, key in columns.items() if found["resume"] or name not in ("checks", "reads")}
    if not any(plan["copies_bytes"] for plan in found["ranks"]):
        del shown["copy to save"]
    table = Table("rank", *shown, box=None)
    for column in table.columns:
        column.justify = "right"
    for plan in found["ranks"]:
        table.add_row(str(plan["rank"]), *(format_bytes(plan[key]) for key in shown.values()))
    console.print(table)
    decayed, trained = (format_count(found[f"num_{which}_parameters"]) for which in ("decayed", "trained"))
    console.print(f"weight decay: on {decayed} of {trained} trained parameters", highlight=False)
    for limit in found["limits"]:
        needed, there = limit["needed_bytes"], limit["available_bytes"]
        verdict = "fits" if needed <= there else "does not fit"
        console.print(
            f"{verdict}: {format_bytes(needed)} of this {limit['of']}, which has {format_bytes(there)} left",
            markup=False,
            highlight=False,
        )
    if (stages := found["stages"]) is not None:
        parts = ", ".join(f"{100 * part:.0f} %" for part in stages["parts_of_operations"])
        console.print(
            f"stages: layers={stages['layers']}, by operations {parts} of a step", markup=False, highlight=False
        )
    if found["optimizer_at_least"]:
        console.print("optimizer: at least so much; there is a formula for adamw, lion and sgd only")
    if found["not_counted"]:
        why = found["not_counted"]
        console.print(f"not counted: activations and temporaries: {why}", markup=False, highlight=False)
    else:
        most = max(range(len(found["highest"])), key=lambda rank: sum(found["highest"][rank].values()))
        parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in found["highest"][most].items())
        console.print(f"at the highest moment of a step rank {most} has {parts}", markup=False, highlight=False)
    console.print("nothing was started")

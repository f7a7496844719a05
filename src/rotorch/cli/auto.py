"""`rotorch train --parallel auto`: a run's layout and micro-batch are planned, and the forecast held to what came.

[Note: elastic runs]
    A restart on fewer ranks is planned again, for the part of the cluster that is left, with the same global batch. The
    launcher does so in a forked process: where it sees a GPU, a traced model's backward would keep it from forking
    ranks. Under torchrun each rank plans at every start, so there the run itself must name its global batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rotorch.cli.output import print_now
from rotorch.cli.plan import task_of
from rotorch.core.errors import ConfigError
from rotorch.core.quantities import format_bytes
from rotorch.mesh import device_type
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.cluster import Cluster, load_cluster
from rotorch.planner.search import Batch, Plan, search, why_nothing_fits
from rotorch.process.forking import call_forked
from rotorch.run_config import RunConfig, batch_sizes
from rotorch.strategies import AUTO, batch_ranks, cuts_context, num_ranks, parse_parallel, with_grids

_FIRST_STEPS = 2


@dataclass(frozen=True)
class Chosen:
    """A planned run.

    Attributes:
        plan: the best one; of preference pairs its rows are two of each.
        micro_batch: samples of a rank in one pass.
        changes: of the run's configuration, as on the command line.
        told: lines that say what was chosen, and why not others.
        layout: as the user wrote it.
    """

    plan: Plan
    micro_batch: int
    changes: tuple[str, ...]
    told: tuple[str, ...]
    layout: str

    @property
    def resize(self) -> Callable[..., RunConfig]:
        """Plans the run again for fewer ranks, as `planned_again` does."""
        return partial(planned_again, layout=self.layout)


def planned(config: RunConfig, *, nproc: int | None) -> Chosen:
    """Plans a run whose layout is `auto`, or has the grid `atp=auto`.

    Args:
        config: of the run.
        nproc: ranks; None: what a launcher says, or one per core.

    Raises:
        ConfigError: no cluster is known, or nothing fits.
    """
    train = config.train
    started = int(os.environ.get("WORLD_SIZE", "0"))
    if started and train.elastic is not None and train.global_batch is None:
        raise ConfigError(
            f"train.elastic = {train.elastic!r} with layout = {config.parallel.layout}: a launcher's ranks plan at "
            "every start, and must keep the global batch. Write train.global_batch=..."
        )
    ranks = nproc or started or os.cpu_count() or 1
    cluster = _cluster(config, ranks=ranks)
    rows_each = 2 if config.data.kind == "preferences" else 1
    rows = (train.global_batch or train.micro_batch * (train.accumulation or 1) * ranks) * rows_each
    task = task_of(
        _model(config),
        cluster=cluster,
        batch=Batch(rows, config.data.sequence_length),
        budget_bytes=cluster.device.memory.reached,
        precision=train.precision,
    )
    layout = config.parallel.layout
    found = search(task, texts=None if layout == AUTO else with_grids(layout, ranks=ranks))
    fitting = [plan for plan in found.plans if plan.fits]
    if rows_each > 1:  # no pass has half of a pair, and no pipeline computes their loss
        fitting = [plan for plan in fitting if plan.micro_batch % rows_each == 0 and not _has_stages(plan)]
    if rows_each > 1 or train.compile:
        fitting = [plan for plan in fitting if not cuts_context(parse_parallel(plan.parallel))]
    best = next(iter(fitting), None)
    if best is None:
        raise ConfigError(
            f"parallel: layout = {layout} on {ranks} ranks: {why_nothing_fits(found, task)}. Write that, a smaller "
            "train.global_batch, or a layout"
        )
    others: dict[str, Plan] = {}
    for plan in found.plans:
        if plan.parallel != best.parallel:
            others.setdefault(plan.parallel.partition("=")[0] if layout == AUTO else plan.parallel, plan)
    micro_batch = best.micro_batch // rows_each
    told = [
        f"auto: {best.parallel} with a micro-batch of {micro_batch} x {best.accumulation}, of {len(found.plans)} "
        f"plans: {best.step_s:.3g} s a step and {format_bytes(best.memory.total_bytes)} per rank predicted",
        *(f"auto: not {plan.parallel}: {plan.why_not}" for plan in list(others.values())[:3]),
    ]
    changes = (
        f"parallel.layout={best.parallel}",
        f"train.micro_batch={micro_batch}",
        f"train.accumulation={best.accumulation}",
    )
    return Chosen(best, micro_batch, changes, tuple(told), layout)


def planned_again(config: RunConfig, *, num_ranks: int, layout: str) -> RunConfig:
    """Plans a run for another number of ranks, with its global batch, and says what was chosen.

    Args:
        config: the run as it was planned before.
        num_ranks: ranks that are left.
        layout: as the user wrote it, with a choice to make.

    Raises:
        ConfigError: nothing fits, or the global batch does not divide.
    """
    sizes = batch_sizes(config.train, batch_ranks=batch_ranks(parse_parallel(config.parallel.layout)))
    train = config.train.model_copy(update={"global_batch": sizes.global_batch, "accumulation": None})
    parallel = config.parallel.model_copy(update={"layout": layout})
    asked = config.model_copy(update={"train": train, "parallel": parallel})
    chosen = call_forked(partial(planned, asked, nproc=num_ranks))
    print_now("\n".join(chosen.told))
    sizes_now = {"micro_batch": chosen.micro_batch, "accumulation": chosen.plan.accumulation}
    parallel = config.parallel.model_copy(update={"layout": chosen.plan.parallel})
    return config.model_copy(update={"train": train.model_copy(update=sizes_now), "parallel": parallel})


def _cluster(config: RunConfig, *, ranks: int) -> Cluster:
    if config.parallel.cluster:
        cluster = load_cluster(config.parallel.cluster)
        if config.train.elastic is not None and ranks < cluster.num_devices:
            return cluster.with_ranks(ranks)
        if cluster.num_devices != ranks:
            raise ConfigError(
                f"parallel: cluster = {config.parallel.cluster} has {cluster.num_devices} ranks, and the run {ranks}. "
                f"Write --nproc {cluster.num_devices}, or another cluster"
            )
        return cluster
    if device_type(config.train.device) != "cpu":
        raise ConfigError(
            f"parallel: layout = {config.parallel.layout} on {config.train.device} plans for a cluster. Write "
            "parallel.cluster, a TOML file or a name that `rotorch plan --help` lists, or train.device=cpu"
        )
    here = load_cluster("cpu2")
    link = here.links[0].model_copy(update={"devices": ranks})
    named = {"name": f"{ranks} ranks on this machine", "devices_per_node": ranks, "links": (link,)}
    return here.model_copy(update=named)


def _has_stages(plan: Plan) -> bool:
    return any(isinstance(strategy, StageStrategy) for strategy in parse_parallel(plan.parallel))


def _model(config: RunConfig) -> str | dict[str, Any]:
    return config.model.config


def compared(chosen: Chosen, *, run_directory: Path) -> str:
    """A line with what was predicted beside what was measured; "" if nothing was, or not under this plan alone."""
    steps: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):
        now = json.loads((run_directory / "run.json").read_text("utf-8"))["parallel"]
        if num_ranks(parse_parallel(now)) != num_ranks(parse_parallel(chosen.plan.parallel)):
            return ""  # planned again on the way
    with suppress(OSError, ValueError):
        text = (run_directory / "metrics.jsonl").read_text("utf-8")
        steps = [json.loads(line) for line in text.splitlines()][_FIRST_STEPS:]
    seconds = [step["tokens"] / step["tokens_per_s"] for step in steps if step.get("tokens_per_s")]
    peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes")]
    if not seconds or chosen.plan.step_s is None:
        return ""
    line = f"auto: {chosen.plan.step_s:.3g} s a step predicted, {median(seconds):.3g} s measured"
    if peaks:
        predicted, measured = format_bytes(chosen.plan.memory.total_bytes), format_bytes(max(peaks))
        line += f"; {predicted} of tensors predicted, {measured} in the rank's peak"
    return line

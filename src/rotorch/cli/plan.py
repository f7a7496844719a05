"""`rotorch plan`: which layout of a cluster a model should be trained under, and why not under the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rotorch.cli.plan_page import page
from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase
from rotorch.core.precision import Precision, as_precision, copies_itemsize, dtype_of_passes
from rotorch.core.quantities import format_bytes, format_count
from rotorch.core.spec import ModelSpec
from rotorch.models.held_warnings import held_warnings
from rotorch.planner.cluster import Cluster, load_cluster
from rotorch.planner.known_models import KnownModel, known_file
from rotorch.planner.search import Batch, Plan, SearchResult, Task, search, why_nothing_fits
from rotorch.planner.speeds import speeds_of
from rotorch.planner.traced import Traced
from rotorch.strategies import AUTO, num_ranks, parse_parallel, to_be_planned, with_grids

OBJECTIVES = ("speed", "memory", "frontier")
_SHOWN = 12


def plan_command(
    model_path: str,
    *,
    cluster_name: str,
    batch_text: str,
    budget_text: str | None,
    objective: str,
    precision: str,
    parallel: Sequence[str],
    nodes: int | None,
    html: Path | None = None,
    keeps: bool = True,
) -> dict[str, Any]:
    """Plans, prints tables, and returns what `--json` writes.

    Raises:
        ConfigError: the model, the cluster, the batch or the budget cannot be; or nothing fits.
    """
    passes = as_precision(precision, of="--precision")
    if objective not in OBJECTIVES:
        raise ConfigError(f"--objective {objective}: write one of {', '.join(OBJECTIVES)}")
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: no directory {html.absolute().parent}")
    batch = parse_batch(batch_text)
    cluster = load_cluster(cluster_name)
    if nodes is not None:
        if nodes < 1:
            raise ConfigError(f"--nodes {nodes}: write 1 or more")
        cluster = cluster.with_nodes(nodes)
    budget_bytes = _budget(budget_text, cluster=cluster)
    layouts = {text: _layouts(text, cluster=cluster) for text in parallel}
    task = task_of(model_path, cluster=cluster, batch=batch, budget_bytes=budget_bytes, precision=passes, keeps=keeps)
    found = search(task, texts=[layout for each in layouts.values() for layout in each] or None)
    for text, each in layouts.items():
        if all(layout in found.refused for layout in each):
            raise ConfigError(f"--parallel {text}: {found.refused[each[0]]}")
    chosen = _chosen(found, objective=objective)
    if chosen is None:
        raise ConfigError(f"plan: {why_nothing_fits(found, task)}. Write a larger --budget, or that")
    if html is not None:
        html.write_text(page(found, chosen, task=task), encoding="utf-8")
    _show(found, chosen, task=task, objective=objective, console=Console())
    return {
        "model": model_path,
        "cluster": cluster.name,
        "num_ranks": cluster.num_devices,
        "batch": {"rows": batch.rows, "tokens": batch.tokens},
        "budget_bytes": round(budget_bytes),
        "precision": passes,
        "plans": [plan.to_json() for plan in found.plans],
        "refused": found.refused,
        "frontier": [plan.parallel for plan in found.frontier],
        "chosen": chosen.parallel,
    }


def _layouts(text: str, *, cluster: Cluster) -> tuple[str, ...]:
    """A layout that was asked for; of one with a grid to be chosen, all that it stands for."""
    if text != AUTO and to_be_planned(text):
        return with_grids(text, ranks=cluster.num_devices)
    if (asked := num_ranks(parse_parallel(text))) != cluster.num_devices:
        raise ConfigError(
            f"--parallel {text}: {asked} ranks, but {cluster.name!r} has {cluster.num_devices}. Write a layout of "
            f"{cluster.num_devices} ranks, or --nodes"
        )
    return (text,)


def parse_batch(text: str) -> Batch:
    """Reads `64x4096`: sequences of a step, by tokens of each."""
    rows, _, tokens = text.partition("x")
    if not (rows.isdecimal() and tokens.isdecimal() and int(rows) > 0 and int(tokens) > 0):
        raise ConfigError(f"--batch {text}: write sequences of a step by tokens of each, for example 64x4096")
    return Batch(int(rows), int(tokens))


def task_of(
    model: str | dict[str, Any],
    *,
    cluster: Cluster,
    batch: Batch,
    budget_bytes: float,
    precision: Precision,
    keeps: bool = True,
) -> Task:
    """The model described and its passes traced; it is a `config.json`'s path, or the contents of one.

    Args:
        model: see above.
        cluster: to train it on.
        batch: of a step.
        budget_bytes: that a rank may hold.
        precision: of passes.
        keeps: take a description that an earlier plan has kept, and keep a new one (planner/known_models.py).

    Raises:
        ConfigError: the model cannot be read or has too short a context, or the cluster has no figures for `precision`.
    """
    speeds = speeds_of(cluster, dtype=dtype_of_passes(precision) or "float32")

    def known(context: int) -> tuple[ModelSpec, Traced]:
        file = known_file(model, tokens=batch.tokens, precision=precision, context=context) if keeps else None
        found = None if file is None else file.read()
        if found is None:
            tell_phase("loading torch")
            with held_warnings():
                found = _traced(model, batch=batch, precision=precision, context=context)
            if file is not None:
                file.write(found)
        return found.spec.with_copies(copies_itemsize(precision)), found.traced

    spec, traced = known(1)
    return Task(
        spec=spec,
        traced=traced,
        cluster=cluster,
        speeds=speeds,
        batch=batch,
        precision=precision,
        budget_bytes=budget_bytes,
        shared=known,
    )


def _traced(model: str | dict[str, Any], *, batch: Batch, precision: Precision, context: int) -> KnownModel:
    """The model, and its passes of whole sequences, or of the parts that `context` ranks have of one."""
    from rotorch.models.describe import describe
    from rotorch.models.hf import causal_lm, config_from_dict, load_config, longest_sequence
    from rotorch.planner.workload import fold
    from rotorch.traced.passes import trace_memory, traced_parts, without_values

    tell_phase("tracing the model")
    config = load_config(model) if isinstance(model, str) else config_from_dict(model, source="[model.config]")
    longest = longest_sequence(config)
    if longest is not None and batch.tokens > longest:
        raise ConfigError(f"--batch: sequences of {batch.tokens} tokens, but the model takes {longest}. Write fewer")
    if context > 1:
        spec, traced = traced_parts(config, tokens=batch.tokens, num_ranks=context, precision=precision)
        tell_phase()
        return KnownModel(spec, traced)
    spec = describe(without_values(partial(causal_lm, config)), features=True, tokens=True)
    traced = trace_memory(config, fold(spec), tokens=batch.tokens, precision=precision)
    tell_phase()
    return KnownModel(spec, traced)


def _budget(text: str | None, *, cluster: Cluster) -> float:
    there = cluster.device.memory.reached
    if text is None:
        return there
    try:
        asked = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(f"--budget {text}: no number of bytes. Write for example 40GiB") from None
    if asked <= 0:
        raise ConfigError(f"--budget {text}: write more than 0 bytes")
    if asked > cluster.device.memory.value:
        raise ConfigError(
            f"--budget {text}: a rank on {cluster.device.name} has {format_bytes(cluster.device.memory.value)}. "
            "Write that or less"
        )
    return float(asked)


def _chosen(found: SearchResult, *, objective: str) -> Plan | None:
    fit = [plan for plan in found.plans if plan.fits]
    if objective == "memory" and fit:
        return min(fit, key=lambda plan: plan.memory.total_bytes)
    return found.chosen


def _show(found: SearchResult, chosen: Plan, *, task: Task, objective: str, console: Console) -> None:
    spec, cluster, batch = task.spec, task.cluster, task.batch
    console.print(
        f"{spec.name}, {format_count(spec.num_parameters)} parameters, on {cluster.name} "
        f"({cluster.num_devices} ranks): {batch.rows} x {batch.tokens} tokens a step, "
        f"{format_bytes(task.budget_bytes)} per rank",
        highlight=False,
        markup=False,
    )
    shown = list(found.frontier) if objective == "frontier" else _alternatives(found)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("step", "tokens/s", "memory", "micro-batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout, and why not", overflow="fold")
    for plan in shown[:_SHOWN]:
        style = "bold green" if plan.parallel == chosen.parallel and plan.micro_batch == chosen.micro_batch else ""
        table.add_row(*_numbers(plan), _named(plan), style=style)
    console.print(table)
    too_large = sum(not plan.fits for plan in found.plans)
    console.print(
        f"chosen: --parallel {chosen.parallel} train.micro_batch={chosen.micro_batch}. {len(found.plans)} plans, "
        f"{too_large} too large; layouts that cannot hold the model: {len(found.refused)} (--json has all)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _alternatives(found: SearchResult) -> list[Plan]:
    """The best plan of each kind of layout, then of those that do not fit the nearest."""
    shown: list[Plan] = []
    kinds: set[tuple[str, ...]] = set()
    """Kinds of strategies, with a word more where some units are whole."""
    for plan in found.plans:
        kind = (
            *(strategy.kind for strategy in parse_parallel(plan.parallel)),
            *(["mixed"] * ("memory=" in plan.parallel)),
        )
        if kind not in kinds:
            kinds.add(kind)
            shown.append(plan)
    return shown


def _numbers(plan: Plan) -> list[str]:
    """Seconds of a step, tokens per second, bytes of a rank, and micro-batch x accumulation."""
    step, tokens = ("", "")
    if plan.step_s is not None and plan.tokens_per_s is not None:
        step, tokens = f"{plan.step_s:.3g} s", format_count(plan.tokens_per_s)
    return [step, tokens, format_bytes(plan.memory.total_bytes), f"{plan.micro_batch} x {plan.accumulation}"]


def _named(plan: Plan) -> Text:
    """The layout, and on a line of its own why another one was chosen: the row stays readable in 80 columns."""
    return Text(plan.parallel) + Text(f"\n{plan.why_not}" if plan.why_not else "", style="dim not bold")

"""Search for the best layout of a cluster, by memory and step time, with reasons against the others.

[Note: stages of a search]
    First the compositions: every way to write the number of ranks as replicas x stages x ranks of an innermost
    strategy, of those that compose and can hold the model. Then memory: it grows with the rows of a micro-batch, so
    each composition has a largest one that fits. Then time, for that one and the next smaller one; pipelines by the
    recurrence of their table. The best pipelines are tried again with other schedules, the best rings between GPUs with
    fewer and larger visits, and the best rings and gathered models with units that are whole on every rank, within
    shares of the memory that they leave (`_budgets`). Where no ring, gathered model or replicas alone fit, or the batch
    has too few rows for them, ranks share sequences.

[Note: reasons]
    A plan that does not fit names its largest category of memory. A slower plan names the part of a step on which it
    spends more time than the chosen plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision, dtype_of_passes, itemsize_of_passes
from rotorch.core.quantities import format_bytes
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy, sharing, with_visits
from rotorch.core.traffic import MicroBatch
from rotorch.core.whole_experts import WholeExperts
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.cluster import Cluster
from rotorch.planner.compositions import compositions, sharing_sequences
from rotorch.planner.held_model import HeldModel, with_transports
from rotorch.planner.memory import Memory
from rotorch.planner.memory_at_rest import at_rest
from rotorch.planner.planned import Planned
from rotorch.planner.speeds import Speeds
from rotorch.planner.step_time import StepTime, step_time_if
from rotorch.planner.traced import Traced
from rotorch.planner.workload import FoldedModel, Numerics, fold
from rotorch.strategies import batch_ranks, check_composition, context_ranks, parse_parallel
from rotorch.strategies.single.plan import Single

MICRO_BATCHES_TRIED = 2
"""Sizes of a micro-batch that are timed, the largest that fits first."""

REFINED = 12
"""Plans with stages that are tried again with other schedules."""

MIXED = 2
"""Plans that rotate or gather weights, of each kind, that are tried again with budgets for units that are whole."""

MOST_LAYERS_MIXED = 128
"""Of a model for which the search tries such budgets: the choice of units takes a fifth of a second with 300 layers."""

SPARE_SHARES = (1.0, 0.5, 0.25)
"""Shares of a plan's spare memory that are tried as budgets."""

_HELD = ("weights", "gradients", "optimizer")
"""Categories of memory from step to step."""

_SCHEDULES = ("zb_h1", "interleaved_1f1b", "zbv")


@dataclass(frozen=True)
class Batch:
    """Global batch of a step.

    Attributes:
        rows: sequences of all ranks together.
        tokens: of each.
    """

    rows: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Task:
    """A model and a batch, to be trained on a cluster.

    Attributes:
        spec: the model's units.
        traced: its passes.
        cluster: the cluster.
        speeds: of that, for products in the precision of the passes.
        batch: of a step.
        precision: of passes; `spec` says what copies of weights they compute with.
        budget_bytes: bytes that a rank may hold.
        shared: gives the model as ranks have it so many of which share a sequence, and the passes of a rank's part;
            None: it cannot be asked.
    """

    spec: ModelSpec
    traced: Traced
    cluster: Cluster
    speeds: Speeds
    batch: Batch
    precision: Precision
    budget_bytes: float
    shared: Callable[[int], tuple[ModelSpec, Traced]] | None = None

    @cached_property
    def model(self) -> FoldedModel:
        """With one layer of each class only."""
        return self.folded.short()

    @cached_property
    def folded(self) -> FoldedModel:
        return fold(self.spec)


@dataclass(frozen=True)
class Plan:
    """One layout with its micro-batch, and its predicted memory and time.

    Attributes:
        parallel: as `--parallel` takes it.
        micro_batch: rows of a rank at once.
        accumulation: micro-batches of a step.
        memory: of the rank that holds most.
        time: of a step; None if it was not worth asking.
        tokens: of a step.
        fits: within the budget.
        why_not: why it was not chosen; "" for the one that was.
    """

    parallel: str
    micro_batch: int
    accumulation: int
    memory: Memory
    time: StepTime | None
    tokens: int
    fits: bool
    why_not: str = ""

    @property
    def step_s(self) -> float | None:
        return None if self.time is None else self.time.step_s

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.time is None else self.tokens / self.time.step_s

    def to_json(self) -> dict[str, object]:
        """Fields that other tools rely on, and what they consist of."""
        return {
            "parallel": self.parallel,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "memory_bytes": round(self.memory.total_bytes),
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "fits": self.fits,
            "why_not": self.why_not,
            "memory_by_category": {name: round(value) for name, value in self.memory.by_category.items()},
            "time_by_part": {} if self.time is None else parts_of_time(self.time),
        }


def parts_of_time(time: StepTime) -> dict[str, float]:
    """Splits a step's seconds into their parts; together they are all of it."""
    return {
        "computing": time.compute_s,
        "waiting for messages": time.waiting_s,
        "the pipeline's bubble": time.bubble_s,
        "sums of gradients over replicas": time.sums_s,
        "the optimizer": time.optimizer_s,
    }


@dataclass(frozen=True)
class SearchResult:
    """Result of a search, the best plan first.

    Attributes:
        plans: plans that fit by speed, then plans that do not fit by the bytes that they lack.
        refused: layouts that cannot hold the model, and why.
    """

    plans: tuple[Plan, ...]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> Plan | None:
        return next((plan for plan in self.plans if plan.fits), None)

    @property
    def frontier(self) -> tuple[Plan, ...]:
        """Plans that fit of which no other one is both faster and smaller, fastest first."""
        found: list[Plan] = []
        for plan in self.plans:
            if plan.fits and (not found or plan.memory.total_bytes < found[-1].memory.total_bytes):
                found.append(plan)
        return tuple(found)


@dataclass(frozen=True)
class _Candidate:
    """A layout that can hold the model, with what does not depend on the batch."""

    text: str
    held: HeldModel
    task: Task

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return self.held.strategies


class _Search:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.refused: dict[str, str] = {}
        self._parts: dict[int, tuple[range, ...]] = {}
        self._unable: dict[tuple[Strategy, int], ConfigError | None] = {}
        self._shared: dict[int, Task] = {1: task}
        """By the number of ranks that share a sequence."""

    def run(self, texts: Sequence[str] | None = None) -> SearchResult:
        """Returns all plans, the best one first."""
        task = self.task
        layers = 0 if task.spec.order.refused else len(task.spec.order.layers)
        wide = 2 * task.cluster.devices_per_node
        experts = min((note.number for unit in task.spec.experts if (note := unit.note(WholeExperts))), default=0)
        every = texts or list(compositions(task.cluster.num_devices, num_layers=layers, wide=wide, num_experts=experts))
        plans = [plan for text in every for plan in self._plans(text)]
        if texts is None:
            if not any(plan.fits and _is_alone(plan, kind=kind) for plan in plans for kind in ("ddp", "rtp", "fsdp")):
                num_ranks, per_node = task.cluster.num_devices, task.cluster.devices_per_node
                shared = sharing_sequences(num_ranks, rows=task.batch.rows, per_node=per_node)
                plans += [plan for text in shared for plan in self._plans(text)]
            plans += self._rescheduled(plans)
            rings = self._in_other_visits(plans)
            plans += [*rings, *self._mixed(plans, rings)]
        return SearchResult(_with_reasons(plans, task), self.refused)

    def _rescheduled(self, plans: Sequence[Plan]) -> list[Plan]:
        """The best pipelines with other schedules, unless another plan is faster and no larger whatever the table."""
        best = sorted((p for p in plans if p.fits and _pipeline(p.parallel)), key=_by_speed)[:REFINED]
        others = {
            p.parallel.replace(stages, _with_option(stages, f"schedule={name}")): None
            for p in best
            for stages in [_pipeline(p.parallel)]
            if "]" not in stages
            for name in _SCHEDULES
        }
        found: dict[str, list[Plan]] = {}
        for text in others:  # from the fastest on, which rule out most of the others
            found[text] = self._plans(text, rivals=[*plans, *(plan for each in found.values() for plan in each)])
        return [plan for text in sorted(found) for plan in found[text]]

    def _in_other_visits(self, plans: Sequence[Plan]) -> list[Plan]:
        """The fastest rings again, with several slices in one visit; CPU ranks read slices where they are."""
        if self.task.cluster.device.type == "cpu":
            return []
        rings = {p.parallel: parse_parallel(p.parallel)[-1] for p in _fastest(plans, kind="rtp")}
        return [
            plan
            for text, ring in rings.items()
            for visits in range(1, ring.num_ranks)  # as many as ranks: what the ring is without the option, or as good
            if ring.num_ranks % visits == 0
            for plan in self._plans(_with_option(text, f"visits={visits}"))
        ]

    def _plans(self, text: str, *, rivals: Sequence[Plan] = ()) -> list[Plan]:
        """Plans of a layout, but for those that one of `rivals` is sure to beat in time, and is no larger."""
        try:
            candidate = self.candidate(text)
        except ConfigError as error:
            self.refused[text] = str(error)
            return []
        tried: list[Plan | None] = []
        smallest: Plan | None = None
        for rows, accumulation in self._micro_batches(candidate):
            try:
                memory = self.memory(candidate, rows, accumulation)
            except ConfigError as error:
                self.refused.setdefault(text, str(error))
                continue
            fits = memory.total_bytes <= self.task.budget_bytes
            plan = Plan(text, rows, accumulation, memory, None, self.task.batch.num_tokens, fits)
            if not fits:
                smallest = plan
                continue
            as_small = [p.step_s for p in rivals if p.step_s and p.memory.total_bytes <= memory.total_bytes]
            time = self.time(candidate, rows, accumulation, less_than=min(as_small, default=inf))
            tried.append(None if time is None else replace(plan, time=time))
            if len(tried) == MICRO_BATCHES_TRIED:
                break
        if not tried and smallest is not None:
            return [smallest]
        if not tried:
            why = f"{self.task.batch.rows} rows are no multiple of its {batch_ranks(candidate.strategies)} batch ranks"
            self.refused.setdefault(text, why)
        return [plan for plan in tried if plan is not None]

    def _mixed(self, *groups: Sequence[Plan]) -> list[Plan]:
        """The fastest plans of each group again, with units that are whole in the memory that is left beside them."""
        found: list[Plan] = []
        known = {_figures(plan) for plans in groups for plan in plans}
        for text in dict.fromkeys(text for plans in groups for text in self._budgets(plans)):
            for plan in self._plans(text):
                if _figures(plan) not in known:  # else no unit fits into the budget, or the same ones do
                    known.add(_figures(plan))
                    found.append(plan)
        return found

    def _budgets(self, plans: Sequence[Plan]) -> list[str]:
        found: list[str] = []
        if self.task.folded.num_layers > MOST_LAYERS_MIXED:
            return found
        (whole,) = at_rest(self.task.model, strategies=(Single(),))
        most = sum(whole.by_category[name] for name in _HELD)
        for kind in ("rtp", "fsdp"):
            for plan in _fastest(plans, kind=kind):
                (held,) = self.candidate(plan.parallel).held.ranks
                least = sum(held.by_category[name] for name in _HELD)
                spare = self.task.budget_bytes - plan.memory.total_bytes
                budgets = [int(least + share * spare) for share in SPARE_SHARES]
                budgets = [budget for budget in budgets if budget < most]  # else all units are whole
                found += [_with_option(plan.parallel, _budget_text(budget)) for budget in budgets]
        return found

    def candidate(self, text: str) -> _Candidate:
        """A layout, or why it cannot hold the model."""
        strategies = parse_parallel(text)
        check_composition(strategies)
        task = self._of_sharing(context_ranks(strategies))
        device, per_host = task.cluster.device.type, task.cluster.devices_per_node
        strategies = with_transports([s.on_device(device) for s in strategies], device=device, per_host=per_host)
        strategies = tuple(strategy.at_precision(dtype_of_passes(task.precision)) for strategy in strategies)
        strategies = tuple(self._with_layers(strategy) for strategy in strategies)
        for strategy in strategies:
            self._check(strategy, task)
        held = HeldModel.of(task.spec, folded=task.folded, short=task.model, strategies=strategies)
        return _Candidate(text, held, task)

    def _of_sharing(self, num_ranks: int) -> Task:
        """The task as ranks have it so many of which share a sequence; asked for only where a layout needs it."""
        if num_ranks not in self._shared:
            if self.task.shared is None:
                raise ConfigError("nothing is known of the model on parts of a sequence. Leave context out")
            if self.task.batch.tokens < num_ranks:
                raise ConfigError(
                    f"{self.task.batch.tokens} tokens are fewer than the {num_ranks} ranks that share them"
                )
            refused = next((task for task in self._shared.values() if task.spec.sequences_stay_whole), None)
            if refused is not None:  # with any number of ranks
                return refused
            spec, traced = self.task.shared(num_ranks)
            self._shared[num_ranks] = replace(self.task, spec=spec, traced=traced)
        return self._shared[num_ranks]

    def _check(self, strategy: Strategy, task: Task) -> None:
        """Raises `ConfigError` if a strategy cannot hold the model; looks at all layers once, not in each layout."""
        key = strategy, id(task)
        if key not in self._unable:
            self._unable[key] = None
            try:
                strategy.check(task.spec)
            except ConfigError as error:
                self._unable[key] = error
        if (why := self._unable[key]) is not None:
            raise why

    def _with_layers(self, strategy: Strategy) -> Strategy:
        """Stages with their layers written down: to balance them takes long, and is the same for all."""
        if not isinstance(strategy, StageStrategy) or strategy.layers is not None:
            return strategy
        number = strategy.num_stages
        if number not in self._parts:
            self._check(strategy, self.task)
            self._parts[number] = strategy.parts_of(self.task.spec)
        return strategy.model_copy(update={"layers": "-".join(str(len(part)) for part in self._parts[number])})

    def _micro_batches(self, candidate: _Candidate) -> Iterator[tuple[int, int]]:
        """Rows of a micro-batch and how many there are, the largest first."""
        each, rest = divmod(self.task.batch.rows, batch_ranks(candidate.strategies))
        if rest or not each:
            return
        for rows in sorted((n for n in range(1, each + 1) if each % n == 0), reverse=True):
            accumulation = each // rows
            try:
                for strategy in candidate.strategies:
                    if isinstance(strategy, StageStrategy) and accumulation < strategy.stages:
                        raise ConfigError("fewer micro-batches than stages leave ranks idle")
            except ConfigError as error:
                self.refused.setdefault(candidate.text, str(error))
                continue
            self.refused.pop(candidate.text, None)
            yield rows, accumulation

    def _micro_batch(self, rows: int) -> MicroBatch:
        return MicroBatch(rows, self.task.batch.tokens, itemsize=itemsize_of_passes(self.task.precision))

    def memory(self, candidate: _Candidate, rows: int, accumulation: int) -> Memory:
        """Returns the memory of the rank that holds most."""
        found = candidate.held.peaks(
            candidate.task.traced,
            batch=self._micro_batch(rows),
            accumulation=accumulation,
            device=self.task.cluster.device.type,
        )
        return max(found, key=lambda memory: memory.total_bytes)

    def time(self, candidate: _Candidate, rows: int, accumulation: int, *, less_than: float = inf) -> StepTime | None:
        """Predicts the time of a step; None if a bound shows that it is more than `less_than` seconds."""
        strategies = candidate.strategies
        computes_again = any(s.recomputes_layers for s in (*sharing(strategies), strategies[-1]))
        again = computes_again or bool(getattr(with_visits(strategies), "recomputes_units", False))
        plan = Planned(
            model=candidate.held.model,
            strategies=candidate.strategies,
            batch=self._micro_batch(rows),
            accumulation=accumulation,
            speeds=self.task.speeds,
            numerics=Numerics(recompute=again),
            parts=candidate.held.parts,
        )
        return step_time_if(plan, worth=lambda least_s: least_s <= less_than)


def search(task: Task, *, texts: Sequence[str] | None = None) -> SearchResult:
    """Searches all plans of a task; returns the best one first.

    Args:
        task: model, batch and cluster.
        texts: layouts to judge; None: all that there are.

    Raises:
        ConfigError: a layout that was asked for cannot hold the model.
    """
    return _Search(task).run(texts)


def why_nothing_fits(found: SearchResult, task: Task) -> str:
    """Says in a line why no plan of a search fits, the least memory that would do and its layout, and what helps."""
    where = f"within {format_bytes(task.budget_bytes)} per rank"
    if not found.plans:
        why = next(iter(found.refused.values()), "no layout has that many ranks").rstrip(".")
        return f"no layout of {task.cluster.num_devices} ranks can hold {task.spec.name}: {why}"
    least = min(found.plans, key=lambda plan: plan.memory.total_bytes)
    held = sum(least.memory.by_category[name] for name in _HELD)
    itemsize = max(weight.itemsize for weight in task.spec.weights)
    helps = "more ranks" if held > task.budget_bytes / 2 else "shorter sequences"
    if held > task.budget_bytes / 2 and itemsize > 2:
        helps = f"weights of 2 bytes each instead of {itemsize} (torch_dtype of its config.json), or more ranks"
    return (
        f"nothing fits {where}: the least is {format_bytes(least.memory.total_bytes)}, {least.parallel} with a "
        f"micro-batch of {least.micro_batch} (most of it {least.memory.largest()}). What helps: {helps}"
    )


def judged(task: Task, text: str, *, rows: int, accumulation: int) -> Plan:
    """Predicts one layout with a micro-batch of so many rows.

    Raises:
        ConfigError: it cannot hold the model.
    """
    asked = _Search(task)
    candidate = asked.candidate(text)
    memory = asked.memory(candidate, rows, accumulation)
    time = asked.time(candidate, rows, accumulation)
    return Plan(text, rows, accumulation, memory, time, task.batch.num_tokens, memory.total_bytes <= task.budget_bytes)


def _pipeline(parallel: str) -> str:
    """The text of `pp` in a layout's; "" if there is none."""
    return next((text for text in parallel.split(",") if text.startswith("pp=")), "")


def _figures(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch, plan.accumulation, plan.memory.total_bytes, plan.step_s


def _is_alone(plan: Plan, *, kind: str) -> bool:
    """True if a layout's innermost strategy is of this kind, without stages around it, and sequences are whole."""
    strategies = parse_parallel(plan.parallel)
    has_stages = any(isinstance(strategy, StageStrategy) for strategy in strategies)
    return strategies[-1].kind == kind and not has_stages and context_ranks(strategies) == 1


def _fastest(plans: Sequence[Plan], *, kind: str) -> list[Plan]:
    """The plans that are tried again, of those that fit and rotate or gather weights by themselves."""
    return sorted((p for p in plans if p.fits and _is_alone(p, kind=kind)), key=_by_speed)[:MIXED]


def _budget_text(num_bytes: int) -> str:
    """An option for units that are whole, in whole MiB where that is precise enough."""
    return f"memory={num_bytes >> 20}MiB" if num_bytes >= 1 << 30 else f"memory={num_bytes}"


def _with_option(text: str, option: str) -> str:
    return f"{text[:-1]},{option}]" if text.endswith("]") else f"{text}[{option}]"


def _by_speed(plan: Plan) -> float:
    return plan.step_s if plan.step_s is not None else float("inf")


def _with_reasons(plans: Sequence[Plan], task: Task) -> tuple[Plan, ...]:
    """Returns the plans in order, with a reason for each that is not the best (see [Note: reasons])."""
    fit = sorted((plan for plan in plans if plan.fits), key=_by_speed)
    rest = sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.memory.total_bytes)
    best = fit[0] if fit else None
    told = [replace(plan, why_not="" if plan is best else _why_slower(plan, best)) for plan in fit]
    for plan in rest:
        too_much = plan.memory.total_bytes - task.budget_bytes
        told.append(replace(plan, why_not=f"{format_bytes(too_much)} too much: {plan.memory.largest()}"))
    return tuple(told)


def _why_slower(plan: Plan, best: Plan | None) -> str:
    assert plan.time is not None and best is not None and best.time is not None
    mine, others = parts_of_time(plan.time), parts_of_time(best.time)
    what = max(mine, key=lambda name: mine[name] - others[name])
    return f"{100 * (plan.time.step_s / best.time.step_s - 1):.0f} % slower: {what}"

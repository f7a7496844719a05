"""A pipeline's step by the executor's own table: its seconds, and the micro-batches that stages keep.

[Note: many micro-batches]
    The first and the last ones of a step are simulated; those between them are evenly spaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from rotorch.pipelining.lower import lower
from rotorch.pipelining.makespan import Makespan
from rotorch.pipelining.simulate import Link, StageCosts
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.workload import FoldedModel


def without_layers(stages: StageStrategy) -> StageStrategy:
    """Returns the strategy with defaults for all options that do not change its table."""
    return stages.model_copy(update={"layers": None, "rank_memory": None, "recompute": "none"})


def layers_passed(model: FoldedModel, stages: StageStrategy, *, stage: int, part: range) -> Counter[int]:
    """Counts a stage's layers by class; where some are computed again, these have classes of their own, behind all."""
    again = stages.recomputed(stage, part=part) if stages.recomputes_some else part[:0]
    others = model.counts_of(range(again.stop, part.stop))
    return others + Counter({len(model.classes) + n: count for n, count in model.counts_of(again).items()})


def in_flight(stages: StageStrategy, accumulation: int) -> tuple[int, ...]:
    """Micro-batches that each stage keeps at a time: no more of many than of a few pipelines full."""
    return _kept(without_layers(stages), _few(stages, accumulation))


def kept_together(stages: StageStrategy, accumulation: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    """The same of each rank's stages at the same time (`StageStrategy.kept_together`)."""
    return _kept_together(without_layers(stages), _few(stages, accumulation))


def _few(stages: StageStrategy, accumulation: int) -> int:
    return min(accumulation, accumulation % stages.stages + 4 * stages.stages * stages.num_chunks)


@lru_cache(maxsize=1024)
def _kept(stages: StageStrategy, num_micro_batches: int) -> tuple[int, ...]:
    if getattr(stages, "schedule", "") == "1f1b":
        return tuple(min(num_micro_batches, stages.stages - stage) for stage in range(stages.stages))
    return stages.kept_by_stages(num_micro_batches)


@lru_cache(maxsize=256)
def _kept_together(
    stages: StageStrategy, num_micro_batches: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    return stages.kept_together(num_micro_batches)


def pipeline_s(
    stages: StageStrategy, num_micro_batches: int, *, ahead: bool, costs: Sequence[StageCosts], link: Link
) -> float:
    """Seconds of a step (see [Note: many micro-batches])."""
    if stages.stages > _MOST_SIMULATED and getattr(stages, "schedule", "") == "1f1b":
        hops_s = sum(link.duration_s(cost.message_bytes) for cost in costs[1:])
        each = [cost.forward_s + cost.backward_input_s + cost.backward_weight_s for cost in costs]
        gathers_s = max(cost.unshard_s + cost.reduce_s for cost in costs)
        return sum(each) + 2 * hops_s + (num_micro_batches - 1) * max(each) + gathers_s
    period = stages.stages * stages.num_chunks
    if stages.kind == "zeropp":
        period = _table(stages, min(num_micro_batches, 4 * period), ahead).schedule.unit
    more, few = divmod(num_micro_batches, period)
    if more <= _MOST_PERIODS:
        return _table(stages, num_micro_batches, ahead).seconds(costs, link=link)
    few += _MOST_PERIODS * period
    most_s, less_s = (_table(stages, few - k * period, ahead).seconds(costs, link=link) for k in (0, 1))
    return most_s + (more - _MOST_PERIODS) * (most_s - less_s)


_MOST_SIMULATED = 16
"""Stages of 1F1B; more are counted: the slowest stage works without a break once the pipeline is full."""

_MOST_PERIODS = 3
"""Of a table that are simulated (see `pipeline_s`)."""


@lru_cache(maxsize=512)
def _table(stages: StageStrategy, num_micro_batches: int, ahead: bool) -> Makespan:
    return Makespan(lower(stages.table(num_micro_batches), ahead=ahead))

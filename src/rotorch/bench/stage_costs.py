"""Memory that stages of a pipeline keep per micro-batch, measured in a short step: a table's memory follows from it.

For stages with gathered weights (`zeropp`, `fsdp` inside of `pp`). Bytes of weights and gradients follow from the
model; tensors saved by autograd, tensors pending between the two halves of a backward, and temporaries are measured by
following storages (`traced/live_storages.py`) from action to action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rotorch.bench.contender import UnderLayout
from rotorch.bench.task import Task
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.hold.gathered_stages import hides_sums
from rotorch.hold.pipeline import PipelinedModel
from rotorch.models.losses import Batch
from rotorch.parallel_model import ParallelModel
from rotorch.pipelining.actions import COMPUTE, Action, ActionKind
from rotorch.pipelining.simulate import StageCosts, simulate
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.shard.storages import owned_bytes
from rotorch.strategies import parse_parallel
from rotorch.traced.live_storages import OPTIMIZER, WEIGHTS, LiveStorages


@dataclass(frozen=True)
class _Seen:
    """Bytes of tensors made in the step: before an action, after it, at most; of its stage's gradients, after it."""

    action: Action
    before: int
    after: int
    most: int
    gradients: int


def predicted_transient_bytes(
    model: ParallelModel, micro_batches: Sequence[Batch], *, num_micro_batches: int, ranks_per_stage: int
) -> float:
    """The most that a step takes on this rank beyond weights and optimizer at rest, by simulation. All ranks.

    Args:
        model: under a pipeline with gathered stages; its gradients are cleared.
        micro_batches: a few of a step, as large as all: two or more, so that gradients are added to gradients.
        num_micro_batches: of the step that is predicted.
        ranks_per_stage: number of ranks that share a stage's weights.
    """
    sharded = model.sharded
    assert isinstance(sharded, PipelinedModel)
    rank = model.mesh.get_local_rank(0)
    seen = _watch_a_step(model, sharded, micro_batches)
    first = next(iter(micro_batches[0].values()))
    message_bytes = first.shape[0] * first.shape[1] * model.spec.order.width * model.spec.weights[0].itemsize
    table = sharded.table(num_micro_batches)
    costs = [StageCosts(message_bytes=message_bytes)] * table.num_stages
    for stage in table.stages_of(rank):
        costs[stage] = _costs(
            [one for one in seen if one.action.stage == stage],
            of_model=_of_model(model, stage, ranks_per_stage=ranks_per_stage),
            received=message_bytes if stage > 0 else 0,
            given=message_bytes if stage + 1 < table.num_stages else 0,
            by_message=stage > 0 and table.rank_of(stage - 1) != rank,
        )
    return simulate(table, costs=costs, hides_sums=hides_sums(model.device)).peak_bytes(rank)


def measured_and_predicted_peak(task: Task, parallel: str, ranks_per_stage: int) -> tuple[int, float]:
    """The most bytes of tensors that this rank holds in a step, and what the simulation says of it. All ranks."""
    few = micro_batches_to_measure(parallel)
    contender = UnderLayout(task, parallel=parallel)
    for step in range(2):  # gradients and the optimizer's state are there from then on
        contender.forward_backward(step)
        contender.update()
    model = contender.model
    batches = task.batches(0, share=model.batch_rank, num_shares=model.num_batch_ranks)
    transient = predicted_transient_bytes(
        model, batches[:few], num_micro_batches=task.accumulation, ranks_per_stage=ranks_per_stage
    )
    found = measure_tensors(contender, step=2)
    contender.close()
    return found.peak_bytes, found.resident[WEIGHTS] + found.resident[OPTIMIZER] + transient


def micro_batches_to_measure(parallel: str) -> int:
    """Returns the micro-batches needed to measure stages: one unit, and at least two, so that gradients accumulate."""
    units = [one.unit or 1 for one in parse_parallel(parallel) if isinstance(one, StageStrategy)]
    return max(2, *units)


def _watch_a_step(model: ParallelModel, sharded: PipelinedModel, micro_batches: Sequence[Batch]) -> list[_Seen]:
    seen: list[_Seen] = []
    live = LiveStorages()

    def gradients(stage: int) -> int:
        mine = {w.name for unit in model.spec.units if stage in unit.stages for w in unit.weights}
        return owned_bytes([p.grad for n, p in model.module.named_parameters() if n in mine and p.grad is not None])

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        live.most_made_bytes(since=0)
        before = live.made_bytes()
        yield
        if action.kind in COMPUTE or action.kind is ActionKind.REDUCE_GRAD:
            seen.append(
                _Seen(action, before, live.made_bytes(), live.most_made_bytes(since=before), gradients(action.stage))
            )

    with live, sharded.watched(watch):
        model.forward_backward(micro_batches)
    for parameter in model.parameters():
        parameter.grad = None
    return seen


def _of_model(model: ParallelModel, stage: int, *, ranks_per_stage: int) -> StageCosts:
    """Bytes of a stage's weights and gradients, and of this rank's part of them."""
    weights = [w for unit in model.spec.units if stage in unit.stages for w in unit.weights]
    trained = [w for w in weights if w.trained]
    part = sum(w.num_bytes // max(w.shape[0], 1) * -(-w.shape[0] // ranks_per_stage) for w in trained)
    return StageCosts(
        weight_bytes=sum(w.num_bytes for w in weights),
        gradient_bytes=sum(w.num_bytes for w in trained),
        gradient_part_bytes=part,
    )


def _costs(seen: Sequence[_Seen], *, of_model: StageCosts, received: int, given: int, by_message: bool) -> StageCosts:
    """Returns the bytes that a stage's actions allocated and left behind."""
    by_kind: dict[ActionKind, list[_Seen]] = {}
    for one in seen:
        by_kind.setdefault(one.action.kind, []).append(one)
    forward, first_sum = by_kind[ActionKind.FORWARD][0], by_kind[ActionKind.REDUCE_GRAD][0]
    activation = forward.after - forward.before + (received if by_message else 0)
    found = replace(
        of_model,
        message_bytes=received,
        activation_bytes=activation,
        forward_extra_bytes=max(one.most - max(one.after, one.before) for one in by_kind[ActionKind.FORWARD]),
        reduce_extra_bytes=max(0, first_sum.most - first_sum.before - of_model.gradient_part_bytes),
    )
    inputs = by_kind.get(ActionKind.BACKWARD_INPUT)
    if inputs is None:
        backwards = by_kind[ActionKind.BACKWARD]
        extra = [
            one.most - one.before - (of_model.gradient_bytes if number == 0 else 0)
            for number, one in enumerate(backwards)
        ]
        return replace(found, backward_extra_bytes=max(0, *extra))
    first = inputs[0]
    weights = by_kind[ActionKind.BACKWARD_WEIGHT]
    early = first.gradients
    pending = first.after - first.before - early + activation + given - received
    extra = [one.most - one.before - (early if number == 0 else 0) for number, one in enumerate(inputs)]
    late = of_model.gradient_bytes - early
    weight_extra = [one.most - one.before - (late if number == 0 else 0) for number, one in enumerate(weights)]
    return replace(
        found,
        early_gradient_bytes=early,
        pending_bytes=pending,
        backward_extra_bytes=max(0, *extra),
        weight_extra_bytes=max(0, *weight_extra),
    )

"""Models cut into stages (`pp`, `zeropp`): the stages of one rank, and a step as a row of actions.

Another sharded model, `inner`, holds the units of this rank's stages. A weight of another stage is a DTensor too, with
an empty shard on this rank: so names, optimizers, clipping and checkpoints are those of any layout.

[Note: weights of two stages]
    An embedding tied to a head is used in the first stage and in the last. The first owns it. The last borrows it: its
    own `inner` has memory for it, which receives the owner's values when a step starts, and its gradient goes to the
    owner at the end: as many bytes as a sum of gradients, one optimizer state, and values that cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from rotorch.comm.observe import Activity, Observer
from rotorch.comm.stage_messages import StageMessages
from rotorch.core.spec import ModelSpec, Unit, Weight
from rotorch.hold.inner_memory import InnerMemory
from rotorch.hold.pipeline_step import PipelineStep, Watch
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import OuterShardedModel, Result, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.mesh import sum_in_one_message
from rotorch.models.losses import Batch
from rotorch.models.stages import StagedModule
from rotorch.ops.deferred_weight_gradients import DeferredWeightGradients
from rotorch.pipelining.actions import COMPUTE, Action, ActionKind, Schedule
from rotorch.pipelining.lower import lower
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.shard.sharded_weight import cut_chunks, dtensor_like


class WholeStages(SimpleShardedModel, ShardedStages):
    """The weights of this rank's stages, whole: the inside of a pipeline without another strategy."""

    weight_gradients_wait = True

    def __init__(self, setup: Setup, *, spec: ModelSpec) -> None:
        placements = [
            ShardPlacement(w, cut_chunks(w, num_slices=1, index=0), w.shape, (Replicate(),)) for w in spec.weights
        ]
        super().__init__(setup.module, setup.shards(placements))

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        return ()


class PipelinedModel(OuterShardedModel):
    """One rank's stages of a model.

    Args:
        inner: holds the units of this rank's stages.
        setup: of the strategy that cuts the model: its `strategy` has the stages, their ranks and the table of a step;
            its `spec` has all units, with the stages that use each.
        mesh: of the pipeline, one axis.
    """

    _inner: ShardedStages

    def __init__(self, inner: ShardedStages, *, setup: Setup, mesh: DeviceMesh) -> None:
        super().__init__(inner)
        strategy, spec = setup.strategy, setup.spec
        inside = setup.mesh if setup.inside is None else setup.inside
        self.no_plain_call = (
            f"{strategy}: a forward of one rank ends where its stage does, so the model is not called: write "
            "model.forward_backward(micro_batches, loss=...), and model.evaluate or model.predict without gradients"
        )
        self._strategy: StageStrategy = strategy
        self._tables: dict[int, Schedule] = {}
        self._watch: Watch | None = None
        self._mesh, self._inside = mesh, inside
        sum_in_one_message(inside, device=setup.device)
        self._position = mesh.get_local_rank()
        self._staged = StagedModule(setup.module, order=spec.order, places=strategy.places_of(spec))
        # Layers inside of other strategies are run by those: their gradients are all computed at once.
        defers = inner.weight_gradients_wait and strategy.splits_backward
        self._deferred = DeferredWeightGradients(setup.module) if defers else None
        self._messages = StageMessages(mesh, device=setup.device)
        if inner.loss_scale != 1.0:
            raise AssertionError("the last stage's backward begins with the loss as it is")
        owners = {w.name: strategy.rank_of(u.stages[0]) for u in spec.units for w in u.weights}
        self._owned = {name for name, owner in owners.items() if owner == self._position}
        self._shared: list[tuple[str, int]] = []
        """Weights used on two ranks: pairs of a name and the other rank's position (a borrower's, or the owner's)."""
        for unit in spec.units:
            # The first stage's rank owns a weight; two stages of one rank share it without messages.
            owner, *others = dict.fromkeys(strategy.rank_of(stage) for stage in unit.stages)
            if self._position == owner:
                self._shared += [(w.name, other) for w in unit.weights for other in others]
            elif self._position in others:
                self._shared += [(w.name, owner) for w in unit.weights]
        memory = InnerMemory(inner.weights, owned=self._owned)
        placements = [self._placement(weight, unit=unit) for unit in spec.units for weight in unit.weights]
        self.shards = setup.shards(placements, memory=memory, mesh=inside)
        self.weights = self.shards.held
        self._free_borrowed()

    def _placement(self, weight: Weight, *, unit: Unit) -> ShardPlacement:
        """This rank's shard of a weight among all ranks of the pipeline, over which it is cut in name only."""
        own = self._inner.placements_of(weight, unit=unit)
        # Axes of one rank lie between, where a stage's own shards would be.
        placements = (*[Shard(0)] * (self._inside.ndim - len(own)), *own)
        if weight.name not in self._owned:
            return ShardPlacement(weight, (), (0, *weight.shape[1:]), placements)
        inner = self._inner.weights[weight.name]
        return ShardPlacement(
            weight, inner.chunks, tuple(inner.local.shape), placements, inner.num_holders, inner.holder
        )

    # ---------------------------------------------------------------- weights

    @property
    def computed(self) -> Iterable[str]:
        return self._inner.weights  # of this rank's stages

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        try:
            with self.shards.unsharded(), self._inner.unsharded() as callee:
                yield callee
        finally:
            self._free_borrowed()

    def _free_borrowed(self) -> None:
        # Values and gradients are the owner's between steps; here the tensor keeps its shape, and no memory.
        for name in self._inner.weights.keys() - self._owned:
            self._inner.weights[name].free()

    def start(self) -> None:
        self.shards.start()
        # Before the inner model starts, which may publish its weights to other ranks.
        self._values_to_borrowers()
        self._inner.start()

    def _values_to_borrowers(self) -> None:
        """Sends owners' values to borrowers. All ranks of the pipeline (see [Note: weights of two stages])."""
        mine = [(other, self._inner.weights[name].local) for name, other in self._shared if name in self._owned]
        borrowed = [(owner, name) for name, owner in self._shared if name not in self._owned]
        for _, name in borrowed:
            # Freed after each pass: between steps a borrowed weight takes no memory.
            self._inner.weights[name].allocate()
        theirs = [(owner, self._inner.weights[name].local) for owner, name in borrowed]
        self._messages.exchange(mine, theirs)
        if borrowed:
            # The values are new, as after a load: copies that the inner model made of them must follow.
            self._inner.values_changed()
            self._inner.borrowed_ready()

    def _gradients_to_owners(self) -> None:
        """Sends borrowers' gradients to the owners, who add them. All ranks of the pipeline."""
        trained = [(name, other) for name, other in self._shared if self.weights[name].parameter.requires_grad]
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        for name, other in trained:
            inner = self._inner.weights[name]
            if name in self._owned:
                incoming.append((other, torch.empty_like(inner.local)))
            else:
                found = inner.local_grad
                # Zeros if unused here: the owner has posted a receive in any case.
                outgoing.append((other, torch.zeros_like(inner.local) if found is None else found.contiguous()))
                inner.parameter.grad = None  # the owner accumulates it; here it would count twice
        self._messages.exchange(outgoing, incoming)
        mine = [name for name, _ in trained if name in self._owned]
        for name, (_, gradient) in zip(mine, incoming, strict=True):
            inner = self._inner.weights[name]
            if inner.local_grad is None:
                inner.parameter.grad = dtensor_like(inner.parameter, gradient)
            else:
                inner.local_grad.add_(gradient)

    def finish(self) -> None:
        # First: a borrower's gradient is complete only once its stage's ranks have summed theirs.
        self._inner.finish()
        self._gradients_to_owners()
        self.shards.finish()

    # ---------------------------------------------------------------- running

    def table(self, num_micro_batches: int) -> Schedule:
        """The lowered table of actions of all ranks, for a step of `num_micro_batches`."""
        if num_micro_batches not in self._tables:
            plain = self._strategy.table(num_micro_batches)
            # A weight gradient is a product of an input and an output's gradient: the weights may be freed before it.
            self._tables[num_micro_batches] = lower(plain, weight_gradients_need_weights=False, ahead=True)
        return self._tables[num_micro_batches]

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        table = self.table(len(micro_batches))
        step = self._step(partial(loss_of, callee), micro_batches)
        step.run(table.rows[self._position], table)
        total = torch.zeros((), dtype=torch.float64)
        for _, loss in step.results:
            total = total.to(loss.device) + loss.detach().double()
        return total * self._mesh.size()  # the other ranks of the pipeline, which share its batch, have none

    def forward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], run: Callable[[nn.Module, Batch], Result]
    ) -> list[Result]:
        table = lower(_forwards(self._strategy, num_micro_batches=len(micro_batches)))
        step = self._step(partial(run, callee), micro_batches)
        last = self._strategy.rank_of(self._strategy.num_stages - 1)
        try:
            step.run(table.rows[self._position], table)
        except Exception:
            # Others may be waiting for the last stage's results: if this is its rank, they must hear that none come.
            self._messages.no_value(source=last)
            raise
        if self._position != last:
            return self._messages.from_one(source=last)  # type: ignore[no-any-return]
        results: list[Result] = [result for _, result in sorted(step.results, key=lambda found: found[0])]
        # Every rank returns the last stage's results, so callers need not know which rank has it.
        self._messages.to_all(results)
        return results

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Makes `watch` enclose every action of a row within the block. This rank only."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        @contextmanager
        def watch(action: Action) -> Iterator[None]:
            backward = action.kind in COMPUTE and action.kind is not ActionKind.FORWARD
            with (
                observer.acting(action, chunk=action.stage // self._mesh.size()),
                observer.during(Activity.BACKWARD, str(action)) if backward else nullcontext(),
            ):
                yield

        with self._inner.observed(observer), self.watched(watch):
            yield

    def _step(self, run: Callable[[Batch], Any], micro_batches: Sequence[Batch]) -> PipelineStep:
        return PipelineStep(
            self._inner,
            staged=self._staged,
            messages=self._messages,
            run=run,
            micro_batches=micro_batches,
            deferred=self._deferred,
            status=self.status,
            ranks=self._mesh.mesh.flatten().tolist(),
            watch=self._watch,
        )


def hold_stages(setup: Setup, *, mesh: DeviceMesh, alone: Callable[[ModelSpec], ShardedStages]) -> PipelinedModel:
    """Cuts a model into stages; this rank's are held by the inner strategy, or else by what `alone` makes.

    Args:
        setup: of the strategy.
        mesh: of the pipeline, one axis.
        alone: makes the model of this rank's units if there is no inner strategy.
    """
    inner, strategy = setup.inner, setup.strategy
    if inner is None:
        setup.prepare_blocks()
        inner = alone(strategy.part_of(setup.spec, position=mesh.get_local_rank() * strategy.ranks_per_stage))
    if not isinstance(inner, ShardedStages):
        raise AssertionError(f"{type(inner).__name__} cannot be inside of a pipeline")
    return PipelinedModel(inner, setup=setup, mesh=mesh)


def _forwards(strategy: StageStrategy, *, num_micro_batches: int) -> Schedule:
    """The plain table of forwards alone, chunk by chunk."""
    rows = [
        tuple(
            Action(ActionKind.FORWARD, stage, micro_batch)
            for stage in range(strategy.num_stages)
            if strategy.rank_of(stage) == rank
            for micro_batch in range(num_micro_batches)
        )
        for rank in range(strategy.stages)
    ]
    return Schedule(
        name="forwards",
        num_ranks=strategy.stages,
        num_chunks=strategy.num_chunks,
        num_micro_batches=num_micro_batches,
        unit=num_micro_batches,
        placement=strategy.placement,
        most_in_flight=0,
        rows=tuple(rows),
    )

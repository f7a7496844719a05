"""How strategies that cut a model into stages hold it (`pp`, `zeropp`), and run a step: actions, row by row.

Another Holding, `inner`, holds the units of this rank's stages. A weight of other stages is a DTensor here all the
same, of which this rank has nothing: so names, optimizers, clipping and checkpoints are those of any layout.

[Note: weights of two stages]
    An embedding tied to a head is used in the first stage and in the last. Its home is the first. The last has a guest,
    lent by its own `inner`, which gets the values of the home when a step starts, and sends its gradient home at the
    end: as many bytes as a sum of gradients, one optimizer state, and values that cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from rotorch.comm.observe import Doing, Observer
from rotorch.comm.stage_messages import StageMessages
from rotorch.core.spec import ModelSpec, UnitKind, Weight
from rotorch.hold.pipeline_step import PipelineStep, Watch
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.hold.shards_holding import ShardsHolding
from rotorch.mesh import sum_in_one_message
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.models.losses import Batch
from rotorch.models.stages import StagedModule
from rotorch.ops.later_gradients import LaterGradients
from rotorch.parallel_model import Holding, OuterHolding, Result
from rotorch.pipelining.actions import COMPUTE, Action, ActionKind, Schedule
from rotorch.pipelining.lower import lower
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.shard.sharded_weight import ShardedWeight, cut_pieces, dtensor_at_rest, dtensor_like
from rotorch.shard.sites import find_sites


class WholeStages(ShardsHolding):
    """The weights of this rank's stages, whole: what is inside of a pipeline if nothing else is.

    Args:
        module: the model.
        spec: the units of this rank's stages.
        mesh: of the pipeline.
        device: where to hold them.
    """

    weight_gradients_wait = True

    def __init__(self, module: nn.Module, *, spec: ModelSpec, mesh: DeviceMesh, device: torch.device) -> None:
        placements = [
            ShardPlacement(w, cut_pieces(w, num_slices=1, index=0), w.shape, (Replicate(),)) for w in spec.weights
        ]
        super().__init__(module, ShardedWeights(placements, sites=find_sites(module), mesh=mesh, device=device))

    def take_memory(self, name: str) -> None:
        self.weights[name].take_memory()

    def give_memory_back(self, name: str) -> None:
        self.weights[name].give_memory_back()


class PipelineHolding(OuterHolding):
    """One rank's stages of a model.

    Args:
        inner: holds the units of this rank's stages.
        module: the model.
        spec: all its units, with the stages that use each.
        strategy: says which stages there are, which rank has which, and the table of a step.
        mesh: of the pipeline, one axis.
        inside: the axes of the pipeline and of `inner`.
        device: of this rank.
    """

    def __init__(
        self,
        inner: Holding,
        *,
        module: nn.Module,
        spec: ModelSpec,
        strategy: StageStrategy,
        mesh: DeviceMesh,
        inside: DeviceMesh,
        device: torch.device,
    ) -> None:
        super().__init__(inner)
        self.no_plain_call = (
            f"{strategy}: a forward of one rank ends where its stage does, so the model is not called: write "
            "model.forward_backward(micro_batches, loss=...), and model.evaluate or model.predict without gradients"
        )
        self._strategy = strategy
        self._tables: dict[int, Schedule] = {}
        self._watch: Watch | None = None
        self._mesh, self._inside, self._device = mesh, inside, device
        sum_in_one_message(inside, device=device)
        self._position = mesh.get_local_rank()
        self._staged = StagedModule(module, order=spec.order, parts=strategy.parts_of(spec))
        # Layers inside of other strategies are run by those: their gradients are all computed at once.
        self._later = LaterGradients(module) if inner.weight_gradients_wait and strategy.splits_backward else None
        self._messages = StageMessages(mesh, device=device)
        if inner.loss_scale != 1.0:
            raise AssertionError("the last stage's backward begins with the loss as it is")
        sites, parameters = find_sites(module), dict(module.named_parameters())
        homes = {w.name: strategy.rank_of(u.stages[0]) for u in spec.units for w in u.weights}
        self._homes = {name for name, home in homes.items() if home == self._position}
        self._guests: list[tuple[str, int]] = []
        """Weights of stages on two ranks: their names, and the position of the other rank."""
        for unit in spec.units:
            home, *others = dict.fromkeys(strategy.rank_of(stage) for stage in unit.stages)
            if self._position == home:
                self._guests += [(w.name, other) for w in unit.weights for other in others]
            elif self._position in others:
                self._guests += [(w.name, home) for w in unit.weights]
        replicated = [w.name for u in spec.units if u.kind is UnitKind.REPLICATED for w in u.weights]
        replicates = any(inner.weights[name].num_holders > 1 for name in replicated if name in inner.weights)
        self.weights = {
            w.name: self._held(w, parameters[w.name], whole=replicates and w.name in set(replicated))
            for w in spec.weights
        }
        self._sites = [(site, name) for name in self.weights for site in sites[name]]
        self._take_back()
        self._forget_guests()

    def _held(self, weight: Weight, source: nn.Parameter, *, whole: bool) -> ShardedWeight:
        """A weight as part of what all ranks of the pipeline have; cut in name only."""
        inner = self._inner.weights[weight.name] if weight.name in self._homes else None
        if inner is None:
            local = torch.empty((0, *weight.shape[1:]), dtype=source.dtype, device=self._device)
        else:
            local = inner.local
        placements = [Shard(0), *[Replicate() if whole else Shard(0)] * (self._inside.ndim - 1)]
        at_rest = dtensor_at_rest(local, shape=weight.shape, mesh=self._inside, placements=placements)
        parameter = nn.Parameter(at_rest, requires_grad=source.requires_grad)
        if inner is None:
            return ShardedWeight(weight, local, (), parameter)
        return ShardedWeight(weight, local, inner.pieces, parameter, inner.num_holders, inner.holder)

    # ---------------------------------------------------------------- lending

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        try:
            with self._inner.lend() as callee:
                yield callee
        except BaseException:
            if any(self._is_gone_inside(name) for name in self._homes):
                for held in self.weights.values():
                    held.parameter.grad = None
            raise
        finally:
            self._take_back()
            self._forget_guests()

    def _is_gone_inside(self, name: str) -> bool:
        """Whether a gradient that was there before this pass has been dropped by the inner holding: the same memory."""
        ours, inner = self.weights[name].parameter, self._inner.weights[name].parameter
        return ours.grad is not None and inner.grad is None

    def _forget_guests(self) -> None:
        for name in self._inner.weights.keys() - self._homes:
            self._inner.give_memory_back(name)

    def _take_back(self) -> None:
        for site, name in self._sites:
            site.put(self.weights[name].parameter)

    def start(self) -> None:
        for name, inner in self._inner.weights.items():
            held = self.weights[name]
            inner.parameter.requires_grad_(held.parameter.requires_grad)
            before = held.local_grad if name in self._homes else None  # a guest's is nobody's but this step's
            if before is None:
                inner.parameter.grad = None
            elif inner.local_grad is None or inner.local_grad.data_ptr() != before.data_ptr():
                inner.parameter.grad = dtensor_like(inner.parameter, before)
        self._values_to_guests()
        self._inner.start()

    def _values_to_guests(self) -> None:
        """All ranks of the pipeline (see [Note: weights of two stages])."""
        mine = [(other, self._inner.weights[name].local) for name, other in self._guests if name in self._homes]
        guests = [(home, name) for name, home in self._guests if name not in self._homes]
        for _, name in guests:
            self._inner.take_memory(name)
        theirs = [(home, self._inner.weights[name].local) for home, name in guests]
        self._messages.exchange(mine, theirs)
        if guests:
            self._inner.values_changed()
            self._inner.guests_came()

    def _gradients_of_guests(self) -> None:
        """All ranks of the pipeline."""
        trained = [(name, other) for name, other in self._guests if self.weights[name].parameter.requires_grad]
        outgoing: list[tuple[int, Tensor]] = []
        incoming: list[tuple[int, Tensor]] = []
        for name, other in trained:
            inner = self._inner.weights[name]
            if name in self._homes:
                incoming.append((other, torch.empty_like(inner.local)))
            else:
                found = inner.local_grad
                outgoing.append((other, torch.zeros_like(inner.local) if found is None else found.contiguous()))
                inner.parameter.grad = None
        self._messages.exchange(outgoing, incoming)
        home = [name for name, _ in trained if name in self._homes]
        for name, (_, gradient) in zip(home, incoming, strict=True):
            inner = self._inner.weights[name]
            if inner.local_grad is None:
                inner.parameter.grad = dtensor_like(inner.parameter, gradient)
            else:
                inner.local_grad.add_(gradient)

    def finish(self) -> None:
        self._inner.finish()
        self._gradients_of_guests()
        for name, held in self.weights.items():
            if held.parameter.requires_grad:
                found = self._inner.weights[name].local_grad if name in self._homes else None
                # What no pass used counts as zeros: no rank knows what those of other stages have used.
                gradient = torch.zeros_like(held.local) if found is None else found
                held.parameter.grad = dtensor_like(held.parameter, gradient)

    # ---------------------------------------------------------------- running

    def table(self, num_micro_batches: int) -> Schedule:
        """What ranks do in a step of so many micro-batches."""
        if num_micro_batches not in self._tables:
            plain = self._strategy.table(num_micro_batches)
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
            total += loss.detach().double().cpu()
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
            self._messages.no_value(source=last)
            raise
        if self._position != last:
            return self._messages.from_one(source=last)  # type: ignore[no-any-return]
        results: list[Result] = [result for _, result in sorted(step.results, key=lambda found: found[0])]
        self._messages.to_all(results)
        return results

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Has `watch` entered around every action of a row within the block. This rank only."""
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
                observer.during(Doing.BACKWARD, str(action)) if backward else nullcontext(),
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
            later=self._later,
            place=self.place,
            ranks=self._mesh.mesh.flatten().tolist(),
            watch=self._watch,
        )


def hold_stages(
    module: nn.Module,
    *,
    strategy: StageStrategy,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool,
    alone: Callable[[ModelSpec], Holding],
    inner: Holding | None,
    inside: DeviceMesh,
) -> PipelineHolding:
    """Cuts a model into stages; `inner` holds those of this rank, or what `alone` makes for their units.

    Args:
        module: the model.
        strategy: says which stages there are.
        spec: all units of the model, with the stages that use each.
        mesh: of the pipeline, one axis.
        device: of this rank.
        compiled: run blocks by torch.compile; what `inner` runs is up to it.
        alone: holds units if no other strategy does.
        inner: what another strategy holds.
        inside: the axes of the pipeline and of what holds its stages.
    """
    if inner is None:
        if compiled:
            compile_blocks(module)
        if strategy.recompute == "block":
            recompute_blocks(module, strategy=strategy.kind)
        inner = alone(strategy.part_of(spec, position=mesh.get_local_rank() * strategy.ranks_per_stage))
    return PipelineHolding(inner, module=module, spec=spec, strategy=strategy, mesh=mesh, inside=inside, device=device)


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

"""A pipeline's stages on ranks that share them: rows of weights or of slices, gathered when the pipeline says so."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import ModelSpec, Unit, Weight
from rotorch.core.whole_experts import WholeExperts
from rotorch.hold.gathered_stages import GatheredStages
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import OuterShardedModel, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.hold.whole_experts import pairs_that_travelled, send_tokens_to_experts


class _Gathered(ShardedStages):
    """Stages that are gathered, freed and summed by the actions of a pipeline."""

    _memory: GatheredStages
    _reshard: bool

    def unshard(self, stage: int) -> None:
        self._memory.unshard(stage)

    def computes(self, stage: int, *, backward: bool) -> None:
        self._memory.computes(stage, backward=backward)

    def reshard(self, stage: int) -> None:
        if self._reshard:
            self._memory.reshard(stage)

    def sum_gradients(self, stage: int) -> None:
        self._memory.sum_gradients(stage)


class StageShards(SimpleShardedModel, _Gathered):
    """This rank's rows of the weights of its stages.

    Args:
        setup: of the strategy that holds them.
        spec: the units of this rank's stages.
        mesh: of the ranks that share them, one axis.
        reshard: free gathered weights where a pipeline says so; False: they stay until the step ends.
    """

    weight_gradients_wait = True

    def __init__(self, setup: Setup, *, spec: ModelSpec, mesh: DeviceMesh, reshard: bool = True) -> None:
        axis_group = AxisGroup.along(mesh, (mesh.mesh_dim_names or ("",))[0])
        stages = {weight.name: unit.stages for unit in spec.units for weight in unit.weights}
        experts = [unit for unit in spec.units if unit.note(WholeExperts)]
        self._stay = stay = [weight.name for unit in experts for weight in unit.weights]
        self._reshard = reshard
        self._memory = GatheredStages(
            stages,
            axis_group=axis_group,
            device=setup.device,
            param_dtype=setup.param_dtype,
            stay=stay,
        )
        placements = [
            (ShardPlacement.slice_of if weight.name in stay else ShardPlacement.rows_of)(weight, mesh=mesh)
            for weight in spec.weights
        ]
        super().__init__(setup.module, setup.shards(placements, memory=self._memory, mesh=mesh))
        self._travelling = send_tokens_to_experts(setup, experts, axis_group=axis_group, leaves=self.shards.leaves)

    @property
    def routed(self) -> tuple[tuple[str, int, int], ...]:
        return pairs_that_travelled(self._travelling)

    def finish(self) -> None:
        self.shards.unused_count_as_zero(self._stay)  # no token of this step may have come to these, and some to others
        super().finish()

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        return (Shard(0),)


class StageSlices(OuterShardedModel, _Gathered):
    """This rank's rows of another strategy's slices: all slices of a stage are gathered at once.

    Args:
        inner: the other strategy's model, of slices that `Setup.shards` has placed.
        reshard: as in `StageShards`.
    """

    _inner: ShardedStages

    def __init__(self, inner: SimpleShardedModel, *, reshard: bool) -> None:
        super().__init__(inner)
        if not isinstance(inner.shards.memory, GatheredStages):
            raise AssertionError("the inner strategy's shards are not shared")
        self._memory, self._reshard = inner.shards.memory, reshard
        self.weights = inner.weights

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        return (Shard(0), *self._inner.placements_of(weight, unit=unit))

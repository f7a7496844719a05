"""The `atp` strategy's hold on a model: one block of every matrix per rank, which stays (picture in `plan.py`).

Activations are cut along their features over one axis from the embedding to the loss. Attentions and MLPs run their own
forward on their part of the interior (`ops/partial_module.py`); in them, and elsewhere, matrices are proxies that
multiply with this rank's block (`ops/plane_use.py`); norms sum over the features of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.distributed.tensor import Placement

from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.collectives import common_seed
from rotorch.core.spec import Combine, Cut, GridCut, Unit, UnitKind, Weight
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement, placed
from rotorch.models.feature_sums import complete_sums
from rotorch.ops.conjugates import ParallelRegion, sum_of_parts
from rotorch.ops.own_shard import OwnShard
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.plane_use import Plane, PlaneUse, Role
from rotorch.ops.random_state import seeded_rng
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.shard.sharded_weight import box_chunks
from rotorch.strategies.atp.plan import AtpCoordinate, is_column


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model into blocks over the two axes of the mesh."""
    return ATPModel(setup)


class ATPModel(SimpleShardedModel, ShardedStages):
    """One rank's blocks, and the weights that are whole on every rank."""

    def __init__(self, setup: Setup) -> None:
        module, strategy, spec, mesh, sites = setup.module, setup.strategy, setup.spec, setup.mesh, setup.sites
        self._mesh = mesh
        self._strategy = strategy
        interior, features = (AxisGroup.along(mesh, axis) for axis in (strategy.interior_axis, strategy.feature_axis))
        self._coordinate = AtpCoordinate(interior.position, interior.size, features.position, features.size)
        self.plane = Plane(interior, features, strategy.chunks)
        placements = [self._placement(w) for w in spec.weights]
        shards = setup.shards(placements)
        super().__init__(module, shards)
        self._partial = [w.name for w in spec.weights if w.beside_slices]
        shards.withhold(spec.units)
        for unit in spec.units:
            for weight in filter(_is_block, unit.weights):
                shards.replace(weight.name, self._proxy(weight, unit))
            if unit.kind is UnitKind.MODULE:
                part, leaves = module.get_submodule(unit.name), shards.leaves
                slices = OwnShard(part, unit, shards=leaves, region=ParallelRegion(interior), strategy=strategy.kind)
                once = leaves.__getitem__
                PartialModule(part, unit=unit, slices=slices, sites=sites, once=once, proven=True, compiled=False)
        for weight in spec.weights:
            if weight.grid is not None and weight.grid.sums and features.size > 1:
                for site in sites[weight.name]:
                    self._complete_sums(site.module, weight)

    def _placement(self, weight: Weight) -> ShardPlacement:
        chunks, shape = box_chunks(self._coordinate.ranges(weight)), self._coordinate.shape(weight)
        return ShardPlacement.on_axis_groups(
            weight, chunks=chunks, shape=shape, mesh=self._mesh, cuts=self._cuts(weight)
        )

    def _cuts(self, weight: Weight) -> list[tuple[AxisGroup, Cut | None]]:
        cut = weight.grid or GridCut()
        return [(self.plane.interior, cut.rows), (self.plane.features, cut.columns)]

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        return placed(self._cuts(weight), mesh=self._mesh)

    def _proxy(self, weight: Weight, unit: Unit) -> WeightProxy:
        if unit.kind is UnitKind.MODULE:
            role, rows = Role.COLUMN if is_column(weight) else Role.ROW, ()
        else:
            rows = tuple(
                self._coordinate.ranges(weight, interior=k)[0][0] for k in range(self._coordinate.num_interior)
            )
            if unit.combine is Combine.SUM or unit.logits or unit.kind is UnitKind.REPLICATED:
                role = Role.TABLE
            else:
                role = Role.SPREAD if is_column(weight) else Role.COLLECT
        block = self.shards.leaves[weight.name]
        use = PlaneUse(weight, block, role, self.plane, rows, head=unit.logits)
        return WeightProxy(use, like=block)

    def _complete_sums(self, norm: nn.Module, weight: Weight) -> None:
        (mine,) = self._coordinate.shape(weight)
        (total,) = weight.shape
        complete_sums(norm, mine=mine, total=total, sum_over=partial(sum_of_parts, axis_group=self.plane.features))

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with seeded_rng(common_seed(mesh=self._mesh)), super().unsharded() as module:
            yield module

    def finish(self) -> None:
        self.shards.reduce(self._partial, mesh=self._mesh[self._strategy.interior_axis])
        self.shards.unused_count_as_zero()
        super().finish()


def _is_block(weight: Weight) -> bool:
    return len(weight.shape) == 2 and weight.grid is not None and weight.grid.columns is not None

"""The ranks inside of a ring that share a batch: each has a part of every weight, which rotates (rtp around megatron).

Heads, columns of an MLP and rows of a vocabulary are cut among these ranks first; a ring is made of the ranks that have
the same part, each with a batch of its own. So a module runs once for each slice of this rank's part that visits, and
the sum of its outputs is a part of a sum over the ranks inside, as under `megatron` alone (`ops/conjugates.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import common_seed
from rotorch.comm.shared_axis_group import make_axis_group
from rotorch.core.spec import ModelSpec, UnitKind
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.models.describe import module_declares
from rotorch.ops.conjugates import ParallelRegion
from rotorch.ops.own_shard import OwnShard
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.random_state import seeded_rng
from rotorch.ops.shard_use import ShardUse
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.shard.sites import Site

_log = logging.getLogger(__name__)


def tell_of_idle_ranks(spec: ModelSpec, *, mesh: DeviceMesh) -> None:
    """Warns, on one rank, of heads that the ranks of a batch do not share evenly."""
    num_ranks = mesh.size()
    for unit in spec.cut_units if mesh.get_rank() == 0 else ():
        groups = unit.weights[0].cut.groups if unit.weights[0].cut is not None else num_ranks
        if unit.kind is UnitKind.MODULE and groups % num_ranks and groups < 8 * num_ranks:
            _log.warning(
                "megatron: %r has %d groups (heads) for %d ranks: some compute while others wait",
                unit.name, groups, num_ranks,
            )  # fmt: skip
            return


class SharedBatch:
    """This rank among those that share a batch.

    Args:
        setup: of the ring's strategy, with the one inside.

    Attributes:
        mesh: of the ranks.
        axis_group: the same, for sums of activations.
        region: operations at inputs and outputs of modules that are cut.
        whole_units: units that are cut, by name, before that.
        visiting: this rank's parts of them, of which slices visit; without parts that are empty.
        placements: this rank's slices of these, and of all other weights.
        gradients_in_parts: names of whole weights of whose gradients each rank has a part.
    """

    def __init__(self, setup: Setup) -> None:
        if setup.inside is None:
            raise AssertionError("a strategy inside has axes")
        strategy, units = setup.within, setup.spec.units
        self.mesh = setup.inside[strategy.kind]
        self.axis_group = make_axis_group(
            setup.inside, strategy.kind, transport=strategy.transport, device=setup.device
        )
        self.region = ParallelRegion(self.axis_group)
        self.gradients_in_parts = strategy.gradients_in_parts(setup.spec)
        tell_of_idle_ranks(setup.spec, mesh=self.mesh)
        position = self.axis_group.position
        parts = [strategy.held(u, layout=strategy.layout(u, position=position), position=position) for u in units]
        self.placements = ShardPlacement.slices_of_slices(units, parts=parts, mesh=setup.inside)
        self.whole_units = {unit.name: unit for unit in setup.spec.cut_units}
        cut = [part for part in parts if part.kind is not UnitKind.REPLICATED]
        self.visiting = tuple(part for part in cut if part.num_bytes)
        self._empty = [part for part in cut if not part.num_bytes]
        self._by_plan = setup.spec.by_plan

    def same_rng(self) -> AbstractContextManager[None]:
        """A block in which these ranks draw the same random numbers. All of them."""
        return seeded_rng(common_seed(mesh=self.mesh))

    def proxy(self, name: str, *, of: str, shard: Tensor) -> WeightProxy:
        """The proxy of a whole weight in the WEIGHT unit `of`; this rank has `shard` of it: a proxy, too, or empty."""
        unit = self.whole_units[of]
        weight = next(w for w in unit.weights if w.name == name)
        use = ShardUse(weight, shard, self.axis_group, "rtp", head=unit.logits, by_plan=self._by_plan)
        return WeightProxy(use, like=shard)

    def hold_empty_parts(
        self, module: nn.Module, *, shards: ShardedWeights, sites: Mapping[str, tuple[Site, ...]], compiled: bool
    ) -> None:
        """Lets this rank take part in sums over units of which it has nothing, as under `megatron` alone."""
        shards.withhold(self._empty)
        for part in self._empty:
            unit, leaves = self.whole_units[part.name], shards.leaves
            if unit.kind is UnitKind.MODULE:
                child = module.get_submodule(unit.name)
                slices = OwnShard(child, unit, shards=leaves, region=self.region, strategy="rtp")
                PartialModule(
                    child,
                    unit=unit,
                    slices=slices,
                    sites=sites,
                    once=leaves.__getitem__,
                    proven=module_declares(module),
                    compiled=compiled,
                )
            else:
                for weight in unit.weights:
                    proxy = self.proxy(weight.name, of=unit.name, shard=leaves[weight.name])
                    shards.replace(weight.name, proxy)

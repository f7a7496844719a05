"""The `megatron` strategy's hold on a model: one slice of every cut weight per rank, which stays (see `plan.py`).

At rest each parameter is a DTensor over this rank's slice. For a pass, attentions and MLPs run their own forward on it
(`ops/partial_module.py`, `ops/own_shard.py`); embedding, head and other single weights are replaced by proxies that
compute this rank's part where they are used (`ops/shard_use.py`); weights that are not cut are whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from rotorch.comm.collectives import common_seed
from rotorch.comm.shared_axis_group import make_axis_group
from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec, UnitKind
from rotorch.hold.early_sums import Part, SumLater
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.hold.shared_batch import tell_of_idle_ranks
from rotorch.models.describe import module_declares
from rotorch.ops.along_tokens import OnAllTokens, SequenceParallelRegion, TokenShard, refuse_hidden_states
from rotorch.ops.conjugates import ParallelRegion, PartlySyncedRegion
from rotorch.ops.own_shard import OwnShard
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.random_state import seeded_rng
from rotorch.ops.shard_use import ShardUse
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.strategies.megatron.along_tokens import children, rows_of_layers, tokens_cut
from rotorch.strategies.megatron.plan import Megatron

_log = logging.getLogger(__name__)


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model over the ranks of the mesh."""
    return MegatronModel(setup)


class MegatronModel(SimpleShardedModel, ShardedStages):
    """One rank's slices, and the weights that are whole on every rank."""

    def __init__(self, setup: Setup) -> None:
        module, strategy, spec, mesh, sites = setup.module, setup.strategy, setup.spec, setup.mesh, setup.sites
        self._mesh = mesh
        if spec.kept_whole and mesh.size() > 1 and mesh.get_rank() == 0:
            _log.warning("megatron: %s", spec.summary())
        tell_of_idle_ranks(spec, mesh=mesh)
        shards = setup.shards(ShardPlacement.of_units(spec.units, mesh=mesh))
        super().__init__(module, shards)
        shards.withhold(spec.units)
        equal = not strategy.changes_the_model
        self._partial = strategy.gradients_in_parts(spec)
        self._blocks = spec.weights_of_blocks()
        self._axis_group = axis_group = make_axis_group(
            mesh, "megatron", transport=strategy.transport, device=setup.device
        )
        region = ParallelRegion(axis_group) if equal else PartlySyncedRegion(axis_group, num_synced=strategy.num_synced)
        self._tokens = tokens = TokenShard(axis_group) if strategy.token_axes else None
        if not equal:
            _refuse_other_losses(module, strategy=strategy)
        for unit in spec.cut_units:
            if unit.kind is UnitKind.MODULE:
                part, leaves = module.get_submodule(unit.name), shards.leaves
                around = (
                    SequenceParallelRegion(tokens, name=unit.name) if tokens and tokens_cut(unit).around else region
                )
                PartialModule(
                    part,
                    unit=unit,
                    slices=OwnShard(part, unit, shards=leaves, region=around, strategy=strategy.kind),
                    sites=sites,
                    once=leaves.__getitem__,
                    proven=module_declares(module),
                    compiled=setup.compiled,
                )
            else:
                for weight in unit.weights:
                    shard = shards.leaves[weight.name]
                    use = ShardUse(
                        weight, shard, axis_group, strategy.kind, head=unit.logits, by_plan=spec.by_plan, equal=equal
                    )
                    shards.replace(weight.name, WeightProxy(use, like=shard))
        if tokens is not None:
            _cut_along_tokens(module, spec=spec, tokens=tokens)

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with seeded_rng(common_seed(mesh=self._mesh)), super().unsharded() as module:
            yield module

    def computed_again(self) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext if self._tokens is None else self._tokens.of_pass()

    @property
    def transport(self) -> str | None:
        return self._axis_group.transport

    def slots(self) -> list[Tensor]:
        return self._axis_group.slots()

    def start(self) -> None:
        self._axis_group.start()
        super().start()

    def close(self) -> None:
        self._axis_group.close()

    def _parts(self, sum_later: SumLater) -> list[Part]:
        return self._parts_of_leaves(self._blocks, sum_later, behind=self._partial)

    def finish(self) -> None:
        self.shards.reduce(self._partial, mesh=self._mesh)
        self.shards.unused_count_as_zero()
        super().finish()


def _cut_along_tokens(module: nn.Module, *, spec: ModelSpec, tokens: TokenShard) -> None:
    """Gives each rank a shard of the tokens inside of the layers, except in modules that all ranks compute whole."""
    for name in children(spec).whole:
        OnAllTokens(module.get_submodule(name), name=name, tokens=tokens)
    for layers in rows_of_layers(spec):
        tokens.run_in([module.get_submodule(name) for name in layers])
    refuse_hidden_states(module)


def _refuse_other_losses(module: nn.Module, *, strategy: Megatron) -> None:
    """Refuses further losses (a router's): they would count once per rank, with different activations."""
    config = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"{strategy}: the model adds a router's loss, which would differ between ranks. "
            f"Write megatron={strategy.size}, or output_router_logits=false"
        )

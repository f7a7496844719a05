"""How `single` holds a model: every weight whole, nothing to communicate."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.hold.shards_holding import ShardsHolding
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.parallel_model import Holding
from rotorch.shard.sites import find_sites
from rotorch.strategies.single.plan import Single


def apply(
    module: nn.Module,
    *,
    strategy: Single,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Holds `module` whole."""
    if compiled:
        compile_blocks(module)
    if strategy.recompute == "block":
        recompute_blocks(module, strategy=strategy.kind)
    placements = [ShardPlacement.whole(weight, mesh=mesh) for weight in spec.weights]
    return ShardsHolding(module, ShardedWeights(placements, sites=find_sites(module), mesh=mesh, device=device))

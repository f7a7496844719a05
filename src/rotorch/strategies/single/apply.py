"""The `single` strategy's hold on a model: every weight whole, nothing to communicate."""

from __future__ import annotations

from rotorch.hold.holding import Holding, ShardsHolding
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_weights import ShardPlacement


def apply(setup: Setup) -> Holding:
    """Holds the model whole."""
    setup.prepare_blocks()
    placements = [ShardPlacement.whole(weight, mesh=setup.mesh) for weight in setup.spec.weights]
    return ShardsHolding(setup.module, setup.shards(placements))

"""The `single` strategy's hold on a model: every weight whole, nothing to communicate."""

from __future__ import annotations

from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement


def apply(setup: Setup) -> ShardedModel:
    """Holds the model whole."""
    setup.prepare_blocks()
    placements = [ShardPlacement.whole(weight, mesh=setup.mesh) for weight in setup.spec.weights]
    return SimpleShardedModel(setup.module, setup.shards(placements))

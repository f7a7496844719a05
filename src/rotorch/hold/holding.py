"""Earlier names of the classes in `hold/sharded_model.py`, for strategies of other packages; for one release."""

from __future__ import annotations

from rotorch.hold.sharded_model import OuterShardedModel, ShardedModel, ShardedStages, SimpleShardedModel

Holding = ShardedModel
ShardsHolding = SimpleShardedModel
StageHolding = ShardedStages
OuterHolding = OuterShardedModel

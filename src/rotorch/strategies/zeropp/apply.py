"""The `zeropp` strategy's hold on a model: its stages in shards (`hold/stage_shards.py`), or by an inner strategy.

`hold/pipeline.py` runs them.
"""

from __future__ import annotations

from rotorch.hold.pipeline import hold_stages
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel
from rotorch.hold.stage_shards import StageShards
from rotorch.strategies.zeropp.plan import SHARDS, STAGES


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model into stages; the strategy inside holds those of this rank, or shards do."""
    return hold_stages(
        setup, mesh=setup.mesh[STAGES], alone=lambda part: StageShards(setup, spec=part, mesh=setup.mesh[SHARDS])
    )

"""The `pp` strategy's hold on a model: this rank's stages, whole or by an inner strategy (see `hold/pipeline.py`)."""

from __future__ import annotations

from rotorch.hold.pipeline import WholeStages, hold_stages
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model into stages; the strategy inside holds those of this rank, or they are held whole."""
    return hold_stages(setup, mesh=setup.mesh, alone=lambda part: WholeStages(setup, spec=part))

"""How `pp` holds a model: another strategy, or nothing, holds this rank's stages (see `hold/pipeline.py`)."""

from __future__ import annotations

from rotorch.hold.holding import Holding
from rotorch.hold.pipeline import WholeStages, hold_stages
from rotorch.hold.setup import Setup


def apply(setup: Setup) -> Holding:
    """Cuts the model into stages; the strategy inside holds those of this rank, or they are held whole."""
    return hold_stages(setup, mesh=setup.mesh, alone=lambda part: WholeStages(setup, spec=part))

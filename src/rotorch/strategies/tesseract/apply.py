"""How `tesseract` holds a model: blocks of its weights, on this rank's place of the grid (`grid_holding.py`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.grid_holding import GridHolding
from rotorch.parallel_model import Holding
from rotorch.strategies.tesseract.plan import Tesseract


def apply(
    module: nn.Module,
    *,
    strategy: Tesseract,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Cuts `module` into blocks over `mesh`."""
    if compiled:
        raise ConfigError(f"{strategy}: its blocks travel in the middle of layers, so none is compiled. Leave it out")
    return GridHolding(module, spec=spec, mesh=mesh, device=device, transport=strategy.transport)

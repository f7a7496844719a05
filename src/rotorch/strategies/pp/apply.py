"""How `pp` holds a model: another strategy, or nothing, holds this rank's stages (see `hold/pipeline.py`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.hold.pipeline import WholeStages, hold_stages
from rotorch.parallel_model import Holding
from rotorch.strategies.pp.plan import PP


def apply(
    module: nn.Module,
    *,
    strategy: PP,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
    inner: Holding | None = None,
    inside: DeviceMesh | None = None,
) -> Holding:
    """Cuts `module` into stages over `mesh`; `inner` holds those of this rank, or they are held whole."""
    return hold_stages(
        module,
        strategy=strategy,
        spec=spec,
        mesh=mesh,
        device=device,
        compiled=compiled,
        alone=lambda part: WholeStages(module, spec=part, mesh=mesh, device=device),
        inner=inner,
        inside=mesh if inside is None else inside,
    )

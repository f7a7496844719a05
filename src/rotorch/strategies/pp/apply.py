"""How `pp` holds a model: another strategy, or nothing, holds this rank's stages (see `pipeline_holding.py`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.parallel_model import Holding
from rotorch.pipeline_holding import PipelineHolding, WholeStages
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
    if inner is None:
        if compiled:
            compile_blocks(module)
        if strategy.recompute == "block":
            recompute_blocks(module, strategy=strategy.kind)
        part = strategy.part_of(spec, position=mesh.get_local_rank())
        inner = WholeStages(module, spec=part, mesh=mesh, device=device)
    return PipelineHolding(
        inner,
        module=module,
        spec=spec,
        strategy=strategy,
        mesh=mesh,
        inside=mesh if inside is None else inside,
        device=device,
    )

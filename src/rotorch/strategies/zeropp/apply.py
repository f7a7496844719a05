"""How `zeropp` holds a model: its stages in shards (`stage_shards.py`), run by a pipeline (`pipeline_holding.py`)."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.parallel_model import Holding
from rotorch.pipeline_holding import PipelineHolding
from rotorch.stage_shards import StageShards
from rotorch.strategies.zeropp.plan import SHARDS, STAGES, ZeroPP


def apply(
    module: nn.Module,
    *,
    strategy: ZeroPP,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Cuts `module` into stages and shards over `mesh`."""
    if compiled:
        compile_blocks(module)
    if strategy.recompute == "block":
        recompute_blocks(module, strategy=strategy.kind)
    part = strategy.part_of(spec, position=mesh.get_local_rank(STAGES) * strategy.shards)
    return PipelineHolding(
        StageShards(module, spec=part, mesh=mesh[SHARDS], device=device),
        module=module,
        spec=spec,
        num_stages=strategy.num_stages,
        placement=strategy.placement,
        schedule=strategy.table,
        splits_backward=True,
        mesh=mesh[STAGES],
        inside=mesh,
        device=device,
    )

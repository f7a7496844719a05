"""How `zeropp` holds a model: its stages in shards (`stage_shards.py`), or in another strategy's parts.

`pipeline_holding.py` runs them.
"""

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
    inner: Holding | None = None,
    inside: DeviceMesh | None = None,
) -> Holding:
    """Cuts `module` into stages over `mesh`; `inner` holds those of this rank, or shards do."""
    if inner is None:
        if compiled:
            compile_blocks(module)
        if strategy.recompute == "block":
            recompute_blocks(module, strategy=strategy.kind)
        part = strategy.part_of(spec, position=mesh.get_local_rank(STAGES) * strategy.shards)
        inner = StageShards(module, spec=part, mesh=mesh[SHARDS], device=device)
    return PipelineHolding(
        inner,
        module=module,
        spec=spec,
        strategy=strategy,
        mesh=mesh[STAGES],
        inside=mesh if inside is None else inside,
        device=device,
    )

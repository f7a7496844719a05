"""How `zeropp` holds a model: its stages in shards (`hold/gathered_stages.py`), or in another strategy's parts.

`hold/pipeline.py` runs them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.hold.gathered_stages import StageShards
from rotorch.hold.pipeline import hold_stages
from rotorch.parallel_model import Holding
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
    return hold_stages(
        module,
        strategy=strategy,
        spec=spec,
        mesh=mesh[STAGES],
        device=device,
        compiled=compiled,
        alone=lambda part: StageShards(module, spec=part, mesh=mesh[SHARDS], device=device),
        inner=inner,
        inside=mesh if inside is None else inside,
    )

"""How `ddp_bf16` holds a model: replicas, and one sum of their gradients at the end of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_bf16.plan import DDPBF16
from rotorch.comm.collectives import all_reduce_each
from rotorch.core.spec import ModelSpec
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.hold.shards_holding import ShardsHolding
from rotorch.parallel_model import Holding
from rotorch.shard.sites import find_sites


class DDPBF16Holding(ShardsHolding):
    """The whole model on every rank; gradients meet when the step is done."""

    def __init__(
        self, module: nn.Module, *, strategy: DDPBF16, spec: ModelSpec, mesh: Any, device: torch.device
    ) -> None:
        placements = [ShardPlacement.whole(weight, mesh=mesh) for weight in spec.weights]
        super().__init__(module, ShardedWeights(placements, sites=find_sites(module), mesh=mesh, device=device))
        self._mesh, self._rounds = mesh, strategy.bfloat16

    def finish(self) -> None:
        self.shards.unused_count_as_zero()  # others may have used what this rank's passes did not
        gradients = [leaf.grad for leaf in self.shards.leaves.values() if leaf.grad is not None]
        travelling = [gradient.bfloat16() if self._rounds else gradient for gradient in gradients]
        all_reduce_each(travelling, mesh=self._mesh)
        for gradient, summed in zip(gradients, travelling, strict=True):
            gradient.copy_(summed)
        super().finish()


def apply(module: nn.Module, *, compiled: bool = False, **setup: Any) -> Holding:
    """Holds `module` whole on every rank."""
    return DDPBF16Holding(module, **setup)

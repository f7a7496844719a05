"""The argument of a strategy's `apply`: everything that it needs to hold a model on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.compiling import Compile
from rotorch.core.spec import ModelSpec
from rotorch.hold.gathered_layers import shared_in_rows
from rotorch.hold.sharded_model import ShardedModel
from rotorch.hold.sharded_weights import Memory, ShardedWeights, ShardPlacement
from rotorch.models.blocks import Contexts, recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.shard.sites import Site


@dataclass(frozen=True)
class Setup:
    """A model, and one strategy's part in it.

    Attributes:
        module: the model; its parameters may be on meta.
        strategy: the fields of the strategy, an object of its own class.
        spec: the units that the strategies around this one leave to it.
        mesh: the axes of this strategy.
        device: of this rank.
        sites: by name, where the module looks for each weight.
        compiled: run blocks by torch.compile, and perhaps record them.
        param_dtype: of the weights that passes compute with; None: that of the weights at rest. Leaves that `shards`
            makes have it; what a strategy puts into the module in their place, it converts itself.
        inner: the sharded model of the strategy inside of this one, if there is one.
        inside: the axes of this strategy and of those inside of it.
        within: the strategy right inside of this one, if this one holds the model for both (`Strategy.holds_inside`).
        computed_again: called in forward; makes contexts in which backward runs layers again, as they run now; None
            where that needs nothing.
        around: the axis of ranks that share this strategy's shards (`fsdp` around it), and its own axes behind that;
            None if no ranks do.
    """

    module: nn.Module
    strategy: Any
    spec: ModelSpec
    mesh: DeviceMesh
    device: torch.device
    sites: Mapping[str, tuple[Site, ...]]
    compiled: Compile = False
    param_dtype: torch.dtype | None = None
    inner: ShardedModel | None = None
    inside: DeviceMesh | None = None
    within: Any = None
    around: DeviceMesh | None = None
    computed_again: Callable[[], Contexts] | None = None

    def shards(
        self, placements: Sequence[ShardPlacement], *, memory: Memory | None = None, mesh: DeviceMesh | None = None
    ) -> ShardedWeights:
        """Takes the module's weights over and puts DTensors of this rank's shards in their place.

        Args:
            placements: the part of each weight that is this rank's.
            memory: allocates shards; by default each has memory of its own.
            mesh: of the DTensors, if it is not the strategy's.
        """
        mesh = self.mesh if mesh is None else mesh
        if self.around is not None:
            if memory is not None:
                raise AssertionError(f"shards of {self.strategy} lie in memory of its own, which nobody else can share")
            mesh = self.around
            placements, memory = shared_in_rows(
                placements, spec=self.spec, around=mesh, device=self.device, param_dtype=self.param_dtype
            )
        return ShardedWeights(
            placements,
            sites=self.sites,
            mesh=mesh,
            device=self.device,
            memory=memory,
            param_dtype=self.param_dtype,
        )

    def prepare_blocks(self) -> None:
        """Makes the module's repeated blocks compiled, or recomputed in backward, as the user asked.

        Raises:
            ConfigError: one of these is asked for, and the module has no repeated blocks.
        """
        if self.compiled:
            compile_blocks(self.module)
        if self.strategy.recomputes_layers:
            names = self.strategy.recomputed_layers(self.spec)
            recompute_blocks(self.module, strategy=self.strategy.kind, names=names, contexts=self.computed_again)

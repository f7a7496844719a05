"""How `single` holds a model: every weight whole, nothing to communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import ModelSpec
from rotorch.hold.replicas import Replicas
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.parallel_model import Holding
from rotorch.strategies.single.plan import Single


class SingleHolding(Holding):
    """The whole model on one rank."""

    def __init__(self, module: nn.Module, *, spec: ModelSpec, mesh: DeviceMesh, device: torch.device) -> None:
        self._module = module
        self._replicas = Replicas.of_module(
            module, weights=spec.weights, mesh=mesh, device=device, gradients_stay=False
        )
        self.weights = self._replicas.held

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        try:
            self._replicas.lend()
            yield self._module
        finally:
            self._replicas.take_back()

    def start(self) -> None:
        self._replicas.start()

    def finish(self) -> None:
        self._replicas.attach()


def apply(
    module: nn.Module,
    *,
    strategy: Single,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Holds `module` whole."""
    if compiled:
        compile_blocks(module)
    if strategy.recompute == "block":
        recompute_blocks(module, strategy=strategy.kind)
    return SingleHolding(module, spec=spec, mesh=mesh, device=device)

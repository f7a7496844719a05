"""How `ddp_bf16` holds a model: replicas, and one sum of their gradients at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ddp_bf16.plan import DDPBF16
from rotorch.comm.collectives import all_reduce_each
from rotorch.core.spec import ModelSpec
from rotorch.hold.replicas import Replicas
from rotorch.parallel_model import Holding


class DDPBF16Holding(Holding):
    """The whole model on every rank; gradients meet when the step is done."""

    def __init__(
        self, module: nn.Module, *, strategy: DDPBF16, spec: ModelSpec, mesh: Any, device: torch.device
    ) -> None:
        self._module, self._mesh, self._rounds = module, mesh, strategy.bfloat16
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
        self._replicas.unused_count_as_zero()  # others may have used what this rank's passes did not
        gradients = [twin.grad for twin in self._replicas.twins.values() if twin.grad is not None]
        travelling = [gradient.bfloat16() if self._rounds else gradient for gradient in gradients]
        all_reduce_each(travelling, mesh=self._mesh)
        for gradient, summed in zip(gradients, travelling, strict=True):
            gradient.copy_(summed)
        self._replicas.attach()


def apply(module: nn.Module, *, compiled: bool = False, **setup: Any) -> Holding:
    """Holds `module` whole on every rank."""
    return DDPBF16Holding(module, **setup)

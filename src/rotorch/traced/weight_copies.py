"""Passes of a plain module with copies of its weights in bfloat16: what `param_dtype` is, in torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rotorch.shard.sites import find_sites


class WeightCopies:
    """Copies of a module's floating-point weights, whose gradients have the dtype of the weights.

    Args:
        module: holds the weights; tied ones have one copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._sites = find_sites(module)
        self._weights = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
        self._copies: dict[str, nn.Parameter] = {}
        for name, weight in self._weights.items():
            copy = nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=weight.requires_grad)
            if copy.requires_grad:
                copy.grad_dtype = weight.dtype
            self._copies[name] = copy

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy.detach() for copy in self._copies.values()]

    def put(self) -> None:
        """Puts the copies into the module."""
        self._put(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has passes within the block compute with the copies, as the weights are now; gradients go to the weights."""
        for name, copy in self._copies.items():
            copy.data.copy_(self._weights[name].detach())
        self.put()
        try:
            yield
        finally:
            self._put(self._weights)
        for name, copy in self._copies.items():
            self._weights[name].grad, copy.grad = copy.grad, None

    def _put(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            for site in self._sites[name]:
                site.put(parameter)

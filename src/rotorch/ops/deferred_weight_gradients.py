"""Weight gradients of linear layers that are computed later than the gradient of their input.

Backward of `x W^T` makes two products that need nothing of each other. A pipeline sends the input's gradient on at once
and makes the weight's where it would wait (Zero Bubble, arXiv 2401.10241). Later needs the layer's input and its
output's gradient; the weight itself is not needed, so its memory may be free by then.

Shapes: B tokens (all leading dims flattened), I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_Deferred = tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]
"""Weight, bias, input [B, I], gradient of the output [B, O]."""


class DeferredWeightGradients:
    """Runs the linear layers of a module so that gradients of their weights can be put off; all others cannot.

    Args:
        module: the module; its `nn.Linear` layers are taken over, if they have plain parameters in a pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._put_off: list[_Deferred] | None = None
        self._deferred: dict[tuple[int, int], list[_Deferred]] = {}
        for child in module.modules():
            # A replaced forward is another strategy's, which has a rule of its own for the weight.
            if type(child) is nn.Linear and "forward" not in vars(child):
                child.forward = _Linear(child, self)  # type: ignore[method-assign]

    @contextmanager
    def deferring(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Makes backward leave out weights of linear layers inside the block; `compute` makes up for it."""
        self._put_off = self._deferred[stage, micro_batch] = []
        try:
            yield
        finally:
            self._put_off = None

    @torch.no_grad()
    def compute(self, stage: int, micro_batch: int) -> None:
        """Adds the products that were put off to the gradients of the weights."""
        for weight, bias, x_BI, grad_BO in self._deferred.pop((stage, micro_batch)):
            if weight.requires_grad:
                _add(weight, grad_BO.t() @ x_BI.to(grad_BO.dtype))
            if bias is not None and bias.requires_grad:
                _add(bias, grad_BO.sum(0))

    def forget(self) -> None:
        """Drops all products that were put off, after a step that broke off."""
        self._deferred.clear()

    def take(self, deferred: _Deferred) -> bool:
        """Puts a layer's gradients off if this is a pass that does so; returns True then."""
        if self._put_off is None:
            return False
        self._put_off.append(deferred)
        return True


class _Linear:
    """A linear layer's forward."""

    def __init__(self, layer: nn.Linear, deferred: DeferredWeightGradients) -> None:
        self._layer = layer
        self._deferred = deferred

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        plain = all(type(p) is nn.Parameter for p in (weight, bias) if p is not None)
        # Proxies and DTensors answer `F.linear` themselves.
        if not (torch.is_grad_enabled() and plain):
            return F.linear(x, weight, bias)
        # A function of its own: autograd cannot leave out the weight alone, whose gradient it makes with the input's.
        return _DeferredLinear.apply(self._deferred, x, weight, bias)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, deferred: DeferredWeightGradients, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> Tensor:
        ctx.deferred, ctx.parameters = deferred, (weight, bias)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = (grad @ weight.to(grad.dtype)).to(x.dtype) if needs_x else None
        if not (needs_weight or needs_bias):
            return None, dx, None, None
        x_BI, grad_BO = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        # None for the weight now: `compute` adds to its `.grad`, past autograd.
        if ctx.deferred.take((*ctx.parameters, x_BI, grad_BO)):
            return None, dx, None, None
        dw = (grad_BO.t() @ x_BI.to(grad.dtype)).to(weight.dtype) if needs_weight else None
        return None, dx, dw, grad_BO.sum(0).to(weight.dtype) if needs_bias else None


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    # As autograd's accumulation does it: in place, so that a gradient in a flat buffer stays there.
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad.add_(gradient)

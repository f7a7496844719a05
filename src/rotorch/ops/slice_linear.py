"""A linear layer inside a unit, on one slice: like `F.linear`, but its weight's gradient never exists on its own.

In backward the product that makes the weight's gradient accumulates straight into the buffer that travels with the
slice. Otherwise the gradient would be made, added, and freed: for few tokens that costs as much as the products.

Shapes: B tokens (all leading dims flattened), I input features, O output features of the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.ops.rotate import RotatingUnit


def slice_linear(
    unit: RotatingUnit, number: int, bias_number: int | None, x: Tensor, *, weights: Sequence[Tensor]
) -> Tensor:
    """`x [.., I]` times weight `number` of the visiting slice, plus its bias if it is cut with it: `[.., O]`.

    Args:
        unit: the unit whose slice is visiting.
        number: of the weight among the unit's.
        bias_number: of the bias, or None.
        x: input.
        weights: the slice's weights.
    """
    bias = None if bias_number is None else weights[bias_number]
    if not torch.is_grad_enabled():
        return F.linear(x, weights[number], bias)
    # Detached: the weight's gradient goes to the receiver, and autograd must not make it too.
    return _SliceLinear.apply(unit, number, bias_number, unit.anchor, x, weights[number].detach(), bias)


class _SliceLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        number: int,
        bias_number: int | None,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.unit, ctx.number, ctx.bias_number = unit, number, bias_number
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_BO = grad.reshape(-1, grad.shape[-1])
        receiver = ctx.unit.receiver
        if ctx.unit.trained:
            receiver.add_product(ctx.number, grad_BO, x.reshape(-1, x.shape[-1]).to(grad.dtype))
            if ctx.bias_number is not None:
                receiver.add(ctx.bias_number, grad_BO.sum(0))
        dx = None
        if ctx.needs_input_grad[4]:
            # Not a view of a product: where layers share an input, autograd adds to the first one's in place.
            dx = torch.matmul(grad_BO.view(grad.shape), weight.to(grad.dtype)).to(x.dtype)
        return None, None, None, None, dx, None, None

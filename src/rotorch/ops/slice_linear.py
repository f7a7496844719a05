"""A linear layer inside a unit, on one slice: like `F.linear`, but its weight's gradient never exists on its own.

In backward the product that makes the weight's gradient accumulates straight into the buffer that travels with the
slice. Otherwise the gradient would be made, added, and freed: for few tokens that costs as much as the products. In the
same way the gradient of a layer whose input is the unit's adds to the unit's input gradient, and the output of a layer
that makes the unit's output adds to the sum over slices (`running_sum.py`).

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
    unit: RotatingUnit,
    number: int,
    bias_number: int | None,
    x: Tensor,
    *,
    weights: Sequence[Tensor],
    by_itself: bool = False,
) -> Tensor:
    """`x [.., I]` times weight `number` of the visiting slice, plus its bias if it is cut with it: `[.., O]`.

    Args:
        unit: the unit whose slice is visiting.
        number: of the weight among the unit's.
        bias_number: of the bias, or None.
        x: input.
        weights: the slice's weights.
        by_itself: the output is not added to those of other slices, here or in a later slice.
    """
    bias = None if bias_number is None else weights[bias_number]
    if not torch.is_grad_enabled():
        y = _forward(unit, number, x, weights[number], bias)
    else:
        # Detached: the weight's gradient goes to the receiver, and autograd must not make it too.
        leaf, weight = unit.leaf_of(x), weights[number].detach()
        y = _SliceLinear.apply(unit, number, bias_number, leaf, unit.anchor, x, weight, bias)
    if unit.output_sum is not None and not by_itself:
        unit.output_sum.note(number, y)
    return y


def _forward(unit: RotatingUnit, number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if unit.output_sum is not None and bias is None:
        total = unit.output_sum.product(number, x, weight)
        if total is not None:
            return total
    return F.linear(x, weight, bias)


class _SliceLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        number: int,
        bias_number: int | None,
        leaf: int | None,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.unit, ctx.number, ctx.bias_number, ctx.leaf = unit, number, bias_number, leaf
        ctx.save_for_backward(x, weight)
        return _forward(ctx.unit, number, x, weight, None if bias is None else bias.detach())

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
        if ctx.needs_input_grad[5]:
            total = None if ctx.leaf is None or x.dtype != grad.dtype else ctx.unit.input_sums[ctx.leaf]
            # A backward within autocast, of a forward without: products are not of the sum's dtype there.
            if total is not None and not torch.is_autocast_enabled(x.device.type):
                # Past autograd, which would make a gradient of each layer and slice, and add them up.
                total.add_product(grad, weight.to(grad.dtype))
            else:
                # Not a view of a product: where layers share an input, autograd adds to the first one's in place.
                dx = torch.matmul(grad_BO.view(grad.shape), weight.to(grad.dtype)).to(x.dtype)
        return None, None, None, None, None, dx, None, None

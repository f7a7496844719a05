"""A linear layer and an embedding with one rotating weight, cut along its output.

A linear layer's weight lies `[O, I]`, or, where it is cut along its second dim, `[I, O]`.

Shapes: B tokens (all leading dims flattened), I input features, O output features, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.comm.ring import Visit
from rotorch.core.spec import Range
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.ids_in_slice import check_ids, look_up_into, without_padding
from rotorch.ops.rotate import RotatingUnit, SliceGradient


def slice_rows(unit: RotatingUnit, index: int) -> Range:
    """The rows of the unit's weight that slice `index` holds; the columns of one that lies `[I, O]`."""
    return unit.slices.ranges(unit.slices.weights[0], index=index)[0]


def _in_rows(unit: RotatingUnit, weight: Tensor) -> Tensor:
    """A slice of the unit's matrix as `[R, I]`, a view."""
    return weight.t() if _lies_transposed(unit) else weight


def _lies_transposed(unit: RotatingUnit) -> bool:
    cut = unit.slices.weights[0].cut
    return cut is not None and cut.dim == 1


def rotate_linear(unit: RotatingUnit, x: Tensor) -> Tensor:
    """`x [.., I]` times the unit's matrix (plus its bias): each slice writes its columns of `[.., O]`."""
    if not torch.is_grad_enabled() or not (unit.trained or x.requires_grad):
        return _linear_forward(unit, x.detach(), AutocastState.now(x.device.type))
    return _RotateLinear.apply(unit, unit.anchor, x)


def _linear_forward(unit: RotatingUnit, x: Tensor, autocast: AutocastState) -> Tensor:
    dtype = autocast.dtype_for(x)
    x_BI = x.reshape(-1, x.shape[-1]).to(dtype)
    # The output itself, not a view of it: autograd lets nobody write into a view that a function returns.
    y = x_BI.new_empty(*x.shape[:-1], unit.slices.weights[0].shape[1 if _lies_transposed(unit) else 0])
    y_BO = y.view(-1, y.shape[-1])
    with torch.autocast(x.device.type, enabled=False):  # inputs have its dtype already; it would cache each slice
        for part, visit in unit.visits_of_parts(backward=False):
            weight, *bias = (w.detach().to(dtype) for w in part.weights(visit))
            rows = slice_rows(part, visit.index)
            columns = y_BO[:, rows.start : rows.stop]
            # Straight into its columns: slices' outputs need no concatenation.
            torch.mm(x_BI, _in_rows(unit, weight).t(), out=columns)
            if bias:
                columns.add_(bias[0])
    return y


class _RotateLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.unit, ctx.autocast = unit, AutocastState.now(x.device.type)
        # Not the weight: its slices come again in backward.
        ctx.save_for_backward(x)
        return _linear_forward(unit, x.detach(), ctx.autocast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        (x,) = ctx.saved_tensors
        dtype = ctx.autocast.dtype_for(x)
        x_BI = x.reshape(-1, x.shape[-1]).to(dtype)
        grad_BO = grad.reshape(-1, grad.shape[-1]).to(dtype)
        dx_BI = torch.zeros_like(x_BI)
        for part, visit in unit.visits_of_parts(backward=True):
            rows = slice_rows(part, visit.index)
            grad_BR = grad_BO[:, rows.start : rows.stop]
            # Before the gradient, which may have to wait for other ranks: this product hides that.
            dx_BI.addmm_(grad_BR, _in_rows(part, part.weights(visit)[0].detach().to(dtype)))
            add_linear_gradient(part, visit, grad_BR, x_BI)
        return None, None, dx_BI.view_as(x).to(x.dtype)


def add_linear_gradient(
    unit: RotatingUnit,
    visit: Visit,
    grad_BR: Tensor,
    x_BI: Tensor,
    *,
    row_scale_B: Tensor | None = None,
    wait: bool = True,
) -> None:
    """Adds a linear layer's gradient to that of the visiting slice, and passes it on.

    The slice's matrix lies `[R, I]`, or `[I, R]` if it is cut along its second dim; its bias, if it has one, is `[R]`.

    Args:
        unit: the layer's unit.
        visit: of the slice.
        grad_BR: gradient of the output.
        x_BI: input; times `row_scale_B` already, if that is given.
        row_scale_B: factor by which each row of `grad_BR` still has to be multiplied.
        wait: wait for this rank's turn; else `grad_BR` is kept until it has come.
    """
    if not unit.trained:
        return
    receiver = SliceGradient(unit, visit, wait=wait)
    receiver.add_product(0, *((x_BI, grad_BR) if _lies_transposed(unit) else (grad_BR, x_BI)))
    if len(unit.slices.weights) > 1:
        receiver.add(1, grad_BR.sum(0) if row_scale_B is None else grad_BR.t() @ row_scale_B)
    receiver.pass_on()


def rotate_embedding(unit: RotatingUnit, ids: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Rows of the unit's weight `[V, D]` for int64 `ids [..]`: each slice answers the tokens in its range.

    Returns `[.., D]`.
    """
    if not torch.is_grad_enabled() or not unit.trained:
        return _embedding_forward(unit, ids)
    return _RotateEmbedding.apply(unit, padding_idx, unit.anchor, ids)


def _embedding_forward(unit: RotatingUnit, ids: Tensor) -> Tensor:
    ids_B = ids.reshape(-1)
    home = unit.ring.home_weights(unit.item)
    num_rows, width = unit.slices.weights[0].shape
    check_ids(ids, num_rows=num_rows, of=f"{unit.slices.weights[0].name!r}: token")
    y = home.new_zeros(*ids.shape, width, dtype=unit.dtype)  # see _linear_forward
    y_BD = y.view(-1, width)
    for part, visit in unit.visits_of_parts(backward=False):
        look_up_into(y_BD, ids_B, part.weights(visit)[0].detach(), rows=slice_rows(part, visit.index))
    return y


class _RotateEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, padding_idx: int | None, anchor: Tensor, ids: Tensor) -> Tensor:
        ctx.unit, ctx.padding_idx = unit, padding_idx
        ctx.save_for_backward(ids)
        return _embedding_forward(unit, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        ids_B = ctx.saved_tensors[0].reshape(-1)
        grad_BD = without_padding(grad.reshape(-1, grad.shape[-1]), ids_B, padding_idx=ctx.padding_idx)
        for part, visit in unit.visits_of_parts(backward=True, fetch=False):  # a lookup's gradient needs no weights
            if unit.trained:
                receiver = SliceGradient(part, visit, wait=True)
                receiver.add_rows(0, ids_B, grad_BD, rows=slice_rows(part, visit.index))
                receiver.pass_on()
        return None, None, None, None

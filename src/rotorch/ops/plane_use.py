"""The use of a matrix in blocks on two axes of ranks that share a batch (ATP).

One axis cuts features of the residual stream, the other cuts interiors: activations between two products (heads,
columns of an MLP, the vocabulary). A `PlaneUse` computes linear layers and look-ups with this rank's block, and sums
over the axis along which the product is partial. Sums over the other axis, of attentions and MLPs that run on slices,
are made around them by `ops/partial_module.py`. With one rank on the axis of features these are the operations of
`ops/shard_use.py`.

    column   x [.., D_f] -> interior [.., F_i]    the sum over features follows; chunk by chunk behind the next product
    row      interior [.., F_i] -> y [.., D_f]    in backward the gradient of the interior is summed over features
    spread   x [.., D_f] -> all of an interior    a column whose outputs are placed side by side
    collect  all of an interior -> y [.., D_f]    outputs are cut by both axes
    table    look-ups, and a head's logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Range, Weight
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.conjugates import copy_to_region, gather_from_region, reduce_from_region
from rotorch.ops.cut_head import CutHead
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.ids_in_slice import look_up
from rotorch.ops.weight_proxy import WeightUse


class Role(StrEnum):
    """The role of a matrix between features and interiors; see the top of this file."""

    COLUMN = "column"
    ROW = "row"
    SPREAD = "spread"
    COLLECT = "collect"
    TABLE = "table"


@dataclass(frozen=True)
class Plane:
    """This rank's position among ranks that share a batch.

    Attributes:
        interior: the ranks that have other parts of interiors.
        features: the ranks that have other features of the residual stream.
        chunks: number of parts of the tokens in a product whose sum over features follows.
    """

    interior: AxisGroup
    features: AxisGroup
    chunks: int = 1


@dataclass(frozen=True)
class PlaneUse(WeightUse):
    """One matrix in blocks.

    Attributes:
        weight: the whole weight's description.
        block: this rank's part of it, a plain parameter.
        role: its role between features and interiors.
        plane: this rank's position.
        rows: of the whole weight, by rank of the interior's axis; unused for the roles COLUMN and ROW.
        head: True if products with it are logits.
    """

    strategy: ClassVar[str] = "atp"
    weight: Weight
    block: Tensor
    role: Role
    plane: Plane
    rows: tuple[Range, ...]
    head: bool

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with the block, summed or gathered according to its role."""
        plane, block, interior = self.plane, self.block, self.plane.interior
        lengths = [r.length for r in self.rows]
        if self.role is Role.COLUMN:
            return _column(plane, x, block, bias)
        if self.role is Role.ROW:
            return _row(plane, x, block, bias)
        if self.role is Role.COLLECT:
            # The input is whole on this axis, and each rank makes other outputs of it: parts of its gradient add up.
            output = _row(plane, copy_to_region(x, axis_group=interior), block, bias)
            return gather_from_region(output, dim=-1, lengths=lengths, axis_group=interior)

        def product(x: Tensor) -> Tensor:
            return _column(plane, copy_to_region(x, axis_group=interior), block, bias)

        if self.head:
            return DeferredLogits(x, CutHead(interior, self.rows, product))
        return gather_from_region(product(x), dim=-1, lengths=lengths, axis_group=interior)

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """This rank's features of the rows, summed over the ranks that have other rows."""
        if self.role is not Role.TABLE:
            return None
        interior = self.plane.interior
        found = look_up(ids, self.block, rows=self.rows[interior.position], padding_idx=padding_idx)
        return reduce_from_region(found, axis_group=interior)

    def refusal(self) -> str:
        """Refuses always: no rank has a whole activation to use a whole weight on."""
        return "cannot take a weight that lies in blocks. Write megatron, rtp or fsdp"


def _column(plane: Plane, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's part of an interior: the product, summed over features, plus its part of the bias."""
    if plane.features.size == 1:
        return F.linear(x, block, bias)
    if plane.chunks > 1:
        y = _ProductThenSum.apply(plane, _dtype(x), x, block)
    else:
        y = reduce_from_region(F.linear(x, block), axis_group=plane.features)  # without bias: ranks would all add it
    return y if bias is None else y + bias


def _row(plane: Plane, x: Tensor, block: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's features, or its part of their sum; the gradient of `x` is summed over features."""
    # By chunks only where there is a sum to hide, in backward.
    if plane.features.size > 1 and plane.chunks > 1:
        y = _ProductSumInBackward.apply(plane, _dtype(x), x, block)
        return y if bias is None else y + bias
    # Outputs are cut along features and not summed over them, so the bias can be added right here.
    return F.linear(copy_to_region(x, axis_group=plane.features), block, bias)


def _dtype(x: Tensor) -> torch.dtype:
    return AutocastState.now(x.device.type).dtype_for(x)


def _summed_by_chunks(plane: Plane, x_BI: Tensor, multiply: Callable[[Tensor, Tensor], Any], width: int) -> Tensor:
    """Products of chunks of tokens, each summed over features while the next is computed: `[B, width]`."""
    # One tensor for all chunks: sums happen in place, and nothing is concatenated.
    y_BO = x_BI.new_empty(x_BI.shape[0], width)
    waits = []
    for x, y in zip(x_BI.chunk(plane.chunks), y_BO.chunk(plane.chunks), strict=True):
        multiply(x, y)
        # The sum of this chunk is under way while the next one's product is computed.
        waits.append(plane.features.all_reduce_later(y))
    for wait in waits:
        wait()
    return y_BO


class _ProductThenSum(Function):
    """`sum over features of x W^T`, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, plane: Plane, dtype: torch.dtype, x: Tensor, block: Tensor) -> Tensor:
        ctx.dtype = dtype
        ctx.save_for_backward(x, block)
        x_BI, w_OI = _flat(x, dtype), block.detach().to(dtype)
        y_BO = _summed_by_chunks(plane, x_BI, lambda a, out: torch.mm(a, w_OI.t(), out=out), w_OI.shape[0])
        return y_BO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, block = ctx.saved_tensors
        dy_BO = _flat(grad, ctx.dtype)  # equal on all ranks that forward summed over: no message here
        dx = (dy_BO @ block.to(ctx.dtype)).view(x.shape).to(x.dtype) if ctx.needs_input_grad[2] else None
        dw = (dy_BO.t() @ _flat(x, ctx.dtype)).to(block.dtype) if ctx.needs_input_grad[3] else None
        return None, None, dx, dw


class _ProductSumInBackward(Function):
    """`x W^T`, the gradient of `x` summed over features, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, plane: Plane, dtype: torch.dtype, x: Tensor, block: Tensor) -> Tensor:
        ctx.plane, ctx.dtype = plane, dtype
        ctx.save_for_backward(x, block)
        return (_flat(x, dtype) @ block.detach().to(dtype).t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, block = ctx.saved_tensors
        dy_BO, w_OI = _flat(grad, ctx.dtype), block.to(ctx.dtype)
        dx = dw = None
        if ctx.needs_input_grad[2]:
            dx_BI = _summed_by_chunks(ctx.plane, dy_BO, lambda a, out: torch.mm(a, w_OI, out=out), w_OI.shape[1])
            dx = dx_BI.view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[3]:
            dw = (dy_BO.t() @ _flat(x, ctx.dtype)).to(block.dtype)
        return None, None, dx, dw


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).to(dtype)

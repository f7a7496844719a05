"""Products of matrices that lie in blocks on a grid of ranks: SUMMA (van de Geijn, Watts 1997), as Tesseract uses it.

On a grid of q x q ranks, the rank at row i and column j holds one block of each matrix. The other ranks' blocks that a
product needs come by broadcasts along its row and its column, block by block, the next one under way while one is
computed with; partial products for other ranks leave by reductions.

    linear     y[i,j] = sum over t of x[i,t] W[t,j]^T      W: block [t, j] is (in t, out j), held as [out, in]
                 backward: dx[i,t] = sum over j of dy[i,j] W[t,j];  dW[t,j] = sum over i of dy[i,j]^T x[i,t]
    table      y[i,t] = sum over j of x[i,j] E[t,j]^T      E: block [t, j] is (rows t, columns j), as a look-up wants it
                 backward: dx[i,j] = sum over t of dy[i,t] E[t,j];  dE[t,j] = sum over i of dy[i,t]^T x[i,j]

Source: Tesseract (arXiv 2105.14500), section 3; Optimus (arXiv 2104.05343), algorithms 1 to 3.

Shapes: B tokens of this rank's rows (all leading dims flattened), I input and O output features in one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.ops.autocast_state import AutocastState


@dataclass(frozen=True)
class Grid:
    """This rank's position on a grid of ranks.

    Attributes:
        down: the ranks of its column, which have other rows.
        across: the ranks of its row, which have other columns.
    """

    down: AxisGroup
    across: AxisGroup


def summa_linear(grid: Grid, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [.., I]` times the weight whose block is `weight [O, I]`, plus this column's `bias [O]`: `[.., O]`.

    Differentiable. All ranks of the grid call it, for the same layers in the same order; those of a row with the same
    tokens. Per rank it sends q-1 blocks of x and of the weight; in backward two of each.
    """
    dtype = AutocastState.now(x.device.type).dtype_for(x)
    return _Linear.apply(grid, dtype, x, weight, bias)


def summa_table_linear(grid: Grid, x: Tensor, table: Tensor, *, num_rows: Sequence[int]) -> Tensor:
    """`x [.., I]` times the transpose of a table whose block is `table [num_rows[i], I]`: `[.., num_rows[j]]`.

    Differentiable; called as `summa_linear`. Per rank it sends q-1 blocks of the table and of its result; in backward
    both, and the table's gradient.

    Args:
        grid: this rank's coordinate, i, j.
        x: this rank's columns of the features.
        table: its block.
        num_rows: rows of the table in the blocks of each row of the grid.
    """
    dtype = AutocastState.now(x.device.type).dtype_for(x)
    return _TableLinear.apply(grid, dtype, tuple(num_rows), x, table)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Contiguous: blocks are sent as they lie.
    return x.detach().reshape(-1, x.shape[-1]).to(dtype).contiguous()


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which parts of a weight's gradient are summed over ranks: its master's, where it is a copy."""
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Asked here: a checkpoint gives backward another tensor in the leaf's place.
        ctx.grid, ctx.dtype, ctx.grad_dtype = grid, dtype, gradient_dtype(weight)
        ctx.save_for_backward(x, weight)
        x_BI, w_OI = _flat(x, dtype), weight.detach().to(dtype).contiguous()
        y_BO: Tensor | None = None
        with torch.autocast(x.device.type, enabled=False):
            # Both broadcasts of step t + 1 are posted before the product of step t, which hides them.
            for x_t, w_t in zip(grid.across.blocks(x_BI), grid.down.blocks(w_OI), strict=True):
                if y_BO is not None:
                    y_BO.addmm_(x_t, w_t.t())
                elif bias is None:
                    y_BO = torch.mm(x_t, w_t.t())
                else:  # the first product brings the bias in, which so costs no pass of its own
                    y_BO = torch.addmm(bias.detach().to(dtype), x_t, w_t.t())
        assert y_BO is not None
        return y_BO.view(*x.shape[:-1], y_BO.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grid: Grid = ctx.grid
        x, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dy_BO = _flat(grad, ctx.dtype)
        # Partial products of column t belong to the rank there: each is sent off while the next is made.
        dx, dw = grid.across.sums(), grid.down.sums()
        # Broadcast again: keeping forward's blocks would be q times the memory of this rank's block. Of a product here
        # one factor is local, so each rank begins with its own blocks, while those of others are on their way. Ranks
        # that add up a sum have one order: their weights' in a row of the grid, their inputs' in a column.
        weights = inputs = None
        if wants_x:
            weights = grid.down.blocks(weight.detach().to(ctx.dtype).contiguous(), own_first=True)
        if wants_weight:
            inputs = grid.across.blocks(_flat(x, ctx.dtype), own_first=True)
        with torch.autocast(x.device.type, enabled=False):
            for of_weights, of_inputs in zip(grid.down.from_own, grid.across.from_own, strict=True):
                if weights is not None:
                    dx.add(torch.mm(dy_BO, next(weights)), target=of_weights)
                if inputs is not None:
                    # Summed over ranks in the dtype of weights at rest, not in that of the pass.
                    dw.add(torch.mm(dy_BO.t(), next(inputs)).to(ctx.grad_dtype), target=of_inputs)
        return (
            None,
            None,
            dx.mine().view(x.shape).to(x.dtype) if wants_x else None,
            dw.mine() if wants_weight else None,
            dy_BO.sum(0, dtype=ctx.grad_dtype) if wants_bias else None,
        )


class _TableLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grid: Grid, dtype: torch.dtype, num_rows: tuple[int, ...], x: Tensor, table: Tensor
    ) -> Tensor:
        ctx.grid, ctx.dtype, ctx.num_rows, ctx.grad_dtype = grid, dtype, num_rows, gradient_dtype(table)
        ctx.save_for_backward(x, table)
        x_BI, table_RI = _flat(x, dtype), table.detach().to(dtype).contiguous()
        shapes = [(rows, x_BI.shape[1]) for rows in num_rows]
        y = grid.across.sums()
        with torch.autocast(x.device.type, enabled=False):
            for t, table_t in enumerate(grid.down.blocks(table_RI, shapes=shapes)):
                # Rows t of the table are columns t of the logits, whose ranks get this part while the next is computed.
                y.add(torch.mm(x_BI, table_t.t()), target=t)
        y_BO = y.mine()
        return y_BO.view(*x.shape[:-1], y_BO.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grid: Grid = ctx.grid
        x, table = ctx.saved_tensors
        wants_x, wants_table = ctx.needs_input_grad[3:]
        x_BI, table_RI, dy_BO = _flat(x, ctx.dtype), table.detach().to(ctx.dtype).contiguous(), _flat(grad, ctx.dtype)
        dx_BI = torch.zeros_like(x_BI)
        d_table = grid.down.sums()
        of_table = [(rows, x_BI.shape[1]) for rows in ctx.num_rows]
        of_grad = [(x_BI.shape[0], rows) for rows in ctx.num_rows]
        # Again, as in `_Linear`: forward has kept no other rank's block.
        tables = grid.down.blocks(table_RI, shapes=of_table) if wants_x else None
        with torch.autocast(x.device.type, enabled=False):
            for t, dy_t in enumerate(grid.across.blocks(dy_BO, shapes=of_grad)):
                if tables is not None:
                    dx_BI.addmm_(dy_t, next(tables))
                if wants_table:
                    d_table.add(torch.mm(dy_t.t(), x_BI).to(ctx.grad_dtype), target=t)
        return (
            None,
            None,
            None,
            dx_BI.view(x.shape).to(x.dtype) if wants_x else None,
            d_table.mine() if wants_table else None,
        )

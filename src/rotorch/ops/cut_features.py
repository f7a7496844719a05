"""Look-ups and loss for activations that are cut along their features, over ranks that share tokens.

Look-ups in a table that is cut both ways, and cross-entropy where each rank has the logits of a part of the vocabulary.

Shapes: B tokens (all leading dims flattened), D features of this rank, V logits of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import RankFailure
from rotorch.core.spec import Range
from rotorch.ops.ids_in_slice import add_rows, ids_in_slice, look_up, pick, put, without_padding
from rotorch.ops.summa import Grid, gradient_dtype


def look_up_on_grid(grid: Grid, ids: Tensor, table: Tensor, *, rows: Range, padding_idx: int | None = None) -> Tensor:
    """Rows of a table for int64 `ids [..]`, of which this rank holds `table [rows.length, D]`: `[.., D]`.

    Differentiable. All ranks of a column call it with equally many ids: they send each other their ids, and answers
    from their own rows; in backward the gradients.

    Args:
        grid: this rank's position; its column holds the other rows of the table.
        ids: this rank's tokens.
        table: its block.
        rows: of the whole table that the block has.
        padding_idx: the row that gets no gradient.
    """
    return _LookUp.apply(grid.down, rows, padding_idx, ids, table)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis_group: AxisGroup, rows: Range, padding_idx: int | None, ids: Tensor, table: Tensor
    ) -> Tensor:
        # Before the gather, which would hang or mix up tokens if sizes differed.
        if not axis_group.all_equal(ids.numel()):
            raise RankFailure(
                f"an embedding is asked for {ids.numel()} tokens on this rank and for another number on others of its "
                "column of the grid. Give all ranks micro-batches of one shape"
            )
        all_ids_B = axis_group.all_gather(ids.reshape(-1).contiguous())
        found_BD = look_up(all_ids_B, table.detach(), rows=rows)
        ctx.axis_group, ctx.rows, ctx.padding_idx = axis_group, rows, padding_idx
        ctx.shape, ctx.dtype = table.shape, gradient_dtype(table)
        ctx.save_for_backward(all_ids_B)
        return axis_group.reduce_scatter(found_BD).view(*ids.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (all_ids_B,) = ctx.saved_tensors
        all_grads_BD = ctx.axis_group.all_gather(grad.reshape(-1, grad.shape[-1]).contiguous())
        all_grads_BD = without_padding(all_grads_BD, all_ids_B, padding_idx=ctx.padding_idx)
        d_table = all_grads_BD.new_zeros(ctx.shape, dtype=ctx.dtype)
        add_rows(d_table, all_ids_B, all_grads_BD, rows=ctx.rows)
        return None, None, None, None, d_table


def cut_cross_entropy(
    axis_group: AxisGroup, logits_BV: Tensor, target_B: Tensor, *, columns: Range, ignore_index: int = -100
) -> Tensor:
    """Per-token cross-entropy [B] where this rank has the logits of `columns` of the vocabulary; the same on all ranks.

    Differentiable. All ranks of the axis group call it for the same tokens. Sends three numbers per token: the
    largest logit, the sum of exponentials, the target's logit.

    Args:
        axis_group: the ranks that have the other columns.
        logits_BV: this rank's.
        target_B: int64, columns of the whole vocabulary.
        columns: this rank's columns.
        ignore_index: the loss of such targets is 0.
    """
    return _CutCrossEntropy.apply(axis_group, columns, ignore_index, logits_BV, target_B)


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis_group: AxisGroup, columns: Range, ignore_index: int, logits_BV: Tensor, target_B: Tensor
    ) -> Tensor:
        lowest = torch.finfo(logits_BV.dtype).min
        largest_B = logits_BV.new_full(target_B.shape, lowest)
        if logits_BV.shape[1]:  # a rank may have no columns, and amax of nothing is an error
            largest_B = logits_BV.amax(-1).clamp_min_(lowest)
        # The same largest logit on all ranks: only then do their sums of exponentials add up.
        axis_group.all_reduce_max(largest_B)
        inside, local = ids_in_slice(target_B, columns)
        exp_BV = (logits_BV - largest_B.unsqueeze(1)).exp_()
        sums_2B = logits_BV.new_zeros(2, target_B.shape[0])
        # Sum and target's logit side by side: one message.
        sums_2B[0] = exp_BV.sum(-1)
        if columns.length:
            sums_2B[1] = torch.where(inside, pick(logits_BV, local), 0.0)
        total_B, picked_B = axis_group.all_reduce(sums_2B)
        valid_B = target_B != ignore_index
        # In place: backward needs the softmax, and nothing needs the exponentials any more.
        ctx.save_for_backward(exp_BV.div_(total_B.unsqueeze(1)), inside, local, valid_B)
        return torch.where(valid_B, total_B.log() + largest_B - picked_B, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        softmax_BV, inside, local, valid_B = ctx.saved_tensors
        scale_B1 = torch.where(valid_B, grad_B, 0.0).unsqueeze(1)
        d_logits_BV = softmax_BV * scale_B1
        if d_logits_BV.shape[1]:
            put(d_logits_BV, local, pick(d_logits_BV, local) - scale_B1.squeeze(1), where=inside)
        return None, None, None, d_logits_BV, None

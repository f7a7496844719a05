"""Ids (tokens, targets) in one slice of a vocabulary: masks, look-ups, and additions to its rows.

[Note: masks]
    An answer is a mask, and every id gets some row of the slice: its own, or any if it lies outside. So shapes do not
    depend on values. Positions of ids (`nonzero`) would: the host would wait for a GPU to count them, once per slice,
    in forward and in backward.

Shapes: B ids (all leading dims flattened), R rows of the slice, D features, V logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rotorch._torch_private import assert_on_device
from rotorch.core.spec import Range


def ids_in_slice(ids: Tensor, rows: Range) -> tuple[Tensor, Tensor]:
    """A mask of the int64 `ids [..]` that lie in `rows`, and a row of the slice for each.

    The rows of ids outside of the slice are spread over it: on a GPU, atomic additions of zeros to one and the same row
    would wait for each other.
    """
    inside = (ids >= rows.start) & (ids < rows.stop)
    return inside, (ids - rows.start).remainder(max(rows.length, 1))


def check_ids(ids: Tensor, *, num_rows: int, of: str, ignore_index: int | None = None) -> None:
    """Raises `IndexError` if an id is no row of a table; on a GPU asserts on the device, as torch's look-ups do.

    Args:
        ids: int64, any shape.
        num_rows: of the whole table.
        of: the kind of id, for the error: "target".
        ignore_index: an id that stands for none.
    """
    outside = (ids < 0) | (ids >= num_rows)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if ids.is_cuda:
        assert_on_device(~outside.any(), f"{of} is outside of a vocabulary of {num_rows}")
    else:
        _raise_if_any(outside, ids, of=of, num_rows=num_rows)


def _raise_if_any(outside: Tensor, ids: Tensor, *, of: str, num_rows: int) -> None:
    """Looks at values, which nothing on a GPU may wait for."""
    if outside.any():
        raise IndexError(f"{of} {int(ids[outside][0])} is outside of a vocabulary of {num_rows}")


def look_up(ids: Tensor, slice_RD: Tensor, *, rows: Range, padding_idx: int | None = None) -> Tensor:
    """Rows of a slice for int64 `ids [..]` of the whole table, zeros for those of other slices: `[.., D]`.

    Differentiable.

    Args:
        ids: rows of the whole table.
        slice_RD: this slice.
        rows: the slice's rows of the whole.
        padding_idx: the row of the whole that gets no gradient.
    """
    if not rows.length:
        return slice_RD.new_zeros((*ids.shape, slice_RD.shape[-1]))
    inside, local = ids_in_slice(ids, rows)
    own_padding = None
    # Outside of the slice it needs no rule: masked rows get no gradient anyway.
    if padding_idx is not None and rows.start <= padding_idx < rows.stop:
        own_padding = padding_idx - rows.start
    return F.embedding(local, slice_RD, own_padding).masked_fill(~inside.unsqueeze(-1), 0.0)


def look_up_into(y_BD: Tensor, ids_B: Tensor, slice_RD: Tensor, *, rows: Range) -> None:
    """Writes the rows of a slice that int64 `ids_B` of the whole table name; leaves other ids' rows of `y_BD` alone."""
    inside, local = ids_in_slice(ids_B, rows)
    found_BD = slice_RD.index_select(0, local).to(y_BD.dtype)
    # A where, not a product with the mask: other ids' rows may hold infinities.
    torch.where(inside.unsqueeze(1), found_BD, y_BD, out=y_BD)


def without_padding(grad_BD: Tensor, ids_B: Tensor, *, padding_idx: int | None) -> Tensor:
    """Gradients of looked-up ids, zeros for the row of the whole table that gets none."""
    return grad_BD if padding_idx is None else grad_BD.masked_fill((ids_B == padding_idx).unsqueeze(1), 0.0)


def add_rows(slice_RD: Tensor, ids_B: Tensor, grad_BD: Tensor, *, rows: Range) -> None:
    """Adds the gradients of looked-up ids to the gradient of the slice that has `rows`, in place."""
    if rows.length:
        inside, local = ids_in_slice(ids_B, rows)
        # Zeros for ids of other slices, whose row here belongs to other ids.
        slice_RD.index_add_(0, local, grad_BD.masked_fill(~inside.unsqueeze(1), 0.0).to(slice_RD.dtype))


def pick(logits_BV: Tensor, local_B: Tensor) -> Tensor:
    """One logit per token: `logits[b, local[b]]`, [B]."""
    return logits_BV.gather(1, local_B.unsqueeze(1)).squeeze(1)


def put(logits_BV: Tensor, local_B: Tensor, values_B: Tensor | float, *, where: Tensor) -> None:
    """Writes one value per token, `logits[b, local[b]]`, for the tokens of the mask `where [B]`. In place."""
    there_B = pick(logits_BV, local_B)
    chosen_B = torch.where(where, values_B, there_B).to(logits_BV.dtype)
    logits_BV.scatter_(1, local_B.unsqueeze(1), chosen_B.unsqueeze(1))

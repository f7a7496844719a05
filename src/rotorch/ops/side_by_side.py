"""Linear layers and embeddings whose slices lie side by side in shared memory: no slice travels.

Every rank can read the whole weight in place, so a layer computes with it as in one process, and nothing is copied.
Only gradients still rotate: the ranks add to each slice's gradient in its owner's memory one after another, in the
order of the ring (see `comm/ring.py`), so it is complete when its owner has added its part.

[Note: out of step]
    A rank whose turn has not come does not wait for it. It defers the addition (and keeps its small operands, not a
    gradient) and goes on with backward; later layers make it, also in the next micro-batch's forward. So ranks may be
    some layers apart before one waits for another.

Shapes: B tokens (all leading dims flattened), I input features, O output features, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.core.spec import Range
from rotorch.ops.autocast_state import as_dtype
from rotorch.ops.ids_in_slice import add_rows, without_padding
from rotorch.ops.rotate import RotatingUnit

_LAYERS_APART = 6  # about one block of a transformer: deferred additions keep its activations and their gradients

AddToSlice = Callable[[Tensor, bool, Range], None]
"""Called with a slice's gradient, True if it holds nothing yet, and the slice's range; adds this rank's part."""


def linear_side_by_side(
    unit: RotatingUnit, x: Tensor, *, bias: RotatingUnit | Tensor | None, transposed: bool = False
) -> Tensor:
    """`x [.., I]` times the unit's whole weight `[O, I]`, plus `bias`, one that is cut too or a plain tensor.

    `transposed`: the weight lies `[I, O]`.

    Returns `[.., O]`. Differentiable in `x`, a plain `bias` and, through the ring, the weights.
    """
    unit.ring.status.now = unit.forward_status
    unit.ring.reads_whole(unit.item)
    unit.ring.flush_ready()  # other ranks may be waiting for additions that this one has deferred
    cut_bias, plain = (bias, None) if isinstance(bias, RotatingUnit) else (None, bias)
    if not torch.is_grad_enabled() or not (unit.trained or any(t is not None and t.requires_grad for t in (x, plain))):
        return F.linear(x, _matrix(unit, transposed), plain if cut_bias is None else _whole(cut_bias))
    return _LinearSideBySide.apply(unit, transposed, cut_bias, unit.anchor, x, plain)


def embedding_side_by_side(unit: RotatingUnit, ids: Tensor, *, padding_idx: int | None) -> Tensor:
    """Rows of the unit's whole weight `[V, D]` for int64 `ids [..]`: `[.., D]`."""
    unit.ring.status.now = unit.forward_status
    unit.ring.reads_whole(unit.item)
    if not torch.is_grad_enabled() or not unit.trained:
        return F.embedding(ids, _whole(unit))
    return _EmbeddingSideBySide.apply(unit, padding_idx, unit.anchor, ids)


def _whole(unit: RotatingUnit) -> Tensor:
    if unit.whole is None:
        raise AssertionError(f"{unit.unit.name} cannot be read in place")
    return unit.whole


def _matrix(unit: RotatingUnit, transposed: bool) -> Tensor:
    """The whole weight as `[O, I]`."""
    return _whole(unit).t() if transposed else _whole(unit)


class _LinearSideBySide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        transposed: bool,
        cut_bias: RotatingUnit | None,
        anchor: Tensor,
        x: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.unit, ctx.transposed, ctx.cut_bias = unit, transposed, cut_bias
        ctx.save_for_backward(x)  # not the weight, which stays in its place until the step ends
        return F.linear(x, _matrix(unit, transposed), bias if cut_bias is None else _whole(cut_bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        (x,) = ctx.saved_tensors
        grad_BO, x_BI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        d_bias = dx = turns = None
        if ctx.needs_input_grad[5] or ctx.cut_bias is not None:
            d_bias = grad_BO.sum(0)
        if unit.trained:
            # The first slice's part before the product for the input: its owner's neighbour is waiting for it.
            factors = grad_BO, as_dtype(x_BI, grad.dtype)
            turns = OrderedAdds(unit, _product(unit, *(reversed(factors) if ctx.transposed else factors)))
        if ctx.needs_input_grad[4]:
            # Not a view of a product: where layers share an input, autograd adds to the first one's in place.
            matrix = as_dtype(_matrix(unit, ctx.transposed), grad.dtype)
            dx = as_dtype(torch.matmul(grad_BO.view(grad.shape), matrix), x.dtype)
        if turns is not None:
            turns.go_on()
        if ctx.cut_bias is not None and ctx.cut_bias.trained:
            OrderedAdds(ctx.cut_bias, _part(d_bias)).go_on()
        return None, None, None, None, dx, d_bias if ctx.needs_input_grad[5] else None


class _EmbeddingSideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, padding_idx: int | None, anchor: Tensor, ids: Tensor) -> Tensor:
        ctx.unit, ctx.padding_idx = unit, padding_idx
        ctx.save_for_backward(ids)
        return F.embedding(ids, _whole(unit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ids_B = ctx.saved_tensors[0].reshape(-1)
        grad_BD = without_padding(grad.reshape(-1, grad.shape[-1]), ids_B, padding_idx=ctx.padding_idx)

        def add(slice_RD: Tensor, fresh: bool, rows: Range) -> None:
            if fresh:
                slice_RD.zero_()
            add_rows(slice_RD, ids_B, grad_BD, rows=rows)

        OrderedAdds(ctx.unit, add).go_on()
        return None, None, None, None


def _product(unit: RotatingUnit, left_BM: Tensor, right_BN: Tensor) -> AddToSlice:
    """Adds a slice's part of `left.T @ right`, straight into its place."""
    cut_rows = unit.slices.weights[0].cut.dim == 0  # type: ignore[union-attr]
    left_MB = left_BM.t()

    def add(gradient: Tensor, fresh: bool, part: Range) -> None:
        left, right = left_MB, right_BN
        if cut_rows:
            left = left.narrow(0, part.start, part.length)
        else:
            right = right.narrow(1, part.start, part.length)
        if gradient.dtype != left.dtype:
            _part_of(gradient, fresh, torch.mm(left, right))
        else:
            # beta=0 overwrites: the owner need not zero its gradients before a step.
            gradient.addmm_(left, right, beta=0 if fresh else 1)

    return add


def _part(whole: Tensor) -> AddToSlice:
    """Adds a slice's part of a whole gradient, cut along dim 0."""
    return lambda gradient, fresh, part: _part_of(gradient, fresh, whole.narrow(0, part.start, part.length))


def _part_of(gradient: Tensor, fresh: bool, part: Tensor) -> None:
    if fresh:
        gradient.copy_(part)
    else:
        gradient.add_(part)


class OrderedAdds:
    """This rank's additions to the slices of one weight's gradient, each in its turn (see [Note: out of step]).

    The constructor takes the first turn, if that has come. `add` is called once for every slice. Without a gradient
    (`reaches=False`) turns are taken all the same: other ranks wait for them.
    """

    def __init__(self, unit: RotatingUnit, add: AddToSlice, *, reaches: bool = True) -> None:
        self._unit, self._add = unit, add
        if reaches:
            unit.reached.add(0)  # it has this one weight
        self._visits = unit.ring.visits(unit.item, backward=True, fetch=False)
        self._next = next(self._visits, None)
        self._take(wait=False)

    def go_on(self) -> None:
        """Takes the other turns as far as they have come; the ring makes the rest later."""
        if self._take_all(wait=False):
            self._unit.ring.flush_ready()
        else:
            # Deferred operands stay in memory, so only so many layers may be outstanding.
            self._unit.ring.defer(self._take_all, at_most=_LAYERS_APART)

    def _take_all(self, *, wait: bool) -> bool:
        while self._next is not None:
            if not self._take(wait=wait):
                return False
        return True

    def _take(self, *, wait: bool) -> bool:
        unit, visit = self._unit, self._next
        if visit is None:
            return True
        buffer = unit.ring.gradient(unit.item, visit, wait=wait)
        if buffer is None:
            return False
        # An empty slice still has its turn: the next rank waits for the counter.
        if unit.slices.numels[visit.index]:
            (gradient,) = unit.gradients(buffer, index=visit.index)
            self._add(gradient, buffer.fresh, unit.ranges[visit.index])
        unit.ring.pass_on(unit.item, visit)
        self._next = next(self._visits, None)
        return True

"""Cross-entropy over a rotating vocabulary: the full logits never exist (rotation of embedding and head).

The head's logits are deferred (`ops/deferred_logits.py`), and the loss runs slice by slice.

Shapes: B tokens, D hidden, V vocabulary, R rows of the vocabulary in one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.ring import Visit
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.conjugates import copy_to_region, gather_from_region
from rotorch.ops.deferred_logits import LOGITS_BLOCK, Elementwise, Head, overwritable, replay
from rotorch.ops.ids_in_slice import ids_in_slice, pick, put
from rotorch.ops.linear import add_linear_gradient, rotate_linear, slice_rows
from rotorch.ops.no_saved_tensor_hooks import no_saved_tensor_hooks
from rotorch.ops.rotate import RotatingUnit


@dataclass(frozen=True)
class SharedVocabulary:
    """Ranks that share a batch, each of which has a ring of its own for its part of the vocabulary.

    Attributes:
        axis_group: the ranks.
        columns: each rank's part, by position.
    """

    axis_group: AxisGroup
    columns: tuple[Range, ...]

    @property
    def mine(self) -> Range:
        """This rank's part."""
        return self.columns[self.axis_group.position]

    def over_all(self, lse_B: Tensor, picked_B: Tensor, *, target_B: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of all ranks' logits, and all targets' logits, from those of each. All ranks call it.

        Sends three numbers per token.

        Args:
            lse_B: of this rank's logits.
            picked_B: logits of the targets that are this rank's.
            target_B: columns of this rank's part; of targets of others anything else.
        """
        largest_B = lse_B.clamp_min(torch.finfo(lse_B.dtype).min)
        self.axis_group.all_reduce_max(largest_B)
        mine_B = (target_B >= 0) & (target_B < self.mine.length)
        # Side by side: one message.
        sums_2B = torch.stack([(lse_B - largest_B).exp_(), torch.where(mine_B, picked_B, 0.0)])
        total_B, picked_B = self.axis_group.all_reduce(sums_2B)
        return total_B.log().add_(largest_B), picked_B


@dataclass(frozen=True)
class RotatingHead(Head):
    """A head with a rotating weight.

    Attributes:
        unit: of the weight.
        keep: the loss keeps logits for backward instead of computing them again.
        shared: the ranks that have the other parts of the vocabulary; None if all of it rotates here.
    """

    unit: RotatingUnit
    keep: bool
    shared: SharedVocabulary | None = None

    @property
    def vocab_size(self) -> int:
        if self.shared is not None:
            return sum(r.length for r in self.shared.columns)
        return self.unit.slices.weights[0].shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        if self.shared is None:
            return rotate_linear(self.unit, hidden)
        axis_group, lengths = self.shared.axis_group, [r.length for r in self.shared.columns]
        part = rotate_linear(self.unit, copy_to_region(hidden, axis_group=axis_group))
        return gather_from_region(part, dim=-1, lengths=lengths, axis_group=axis_group)

    def loss(self, hidden_BD: Tensor, target_B: Tensor, *, chain: tuple[Elementwise, ...], ignore_index: int) -> Tensor:
        # A pass without gradients keeps nothing.
        function = _KeptCrossEntropy if self.keep and torch.is_grad_enabled() else _SlicedCrossEntropy
        if self.shared is not None:
            hidden_BD = copy_to_region(hidden_BD, axis_group=self.shared.axis_group)
            # Counted from this rank's first column, as its slices are.
            first = self.shared.mine.start
            target_B, ignore_index = target_B - first, ignore_index - first
        return function.apply(self.unit, self.shared, chain, ignore_index, self.unit.anchor, hidden_BD, target_B)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Per-token loss. Forward: running log-sum-exp over slices. Backward: softmax minus one-hot, slice by slice.

    [Note: passes over logits]
        Logits are the largest tensor of a step, and every pass over them counts. So where no operation follows the
        product, forward leaves `exp(logits - their largest)` in their place, and backward changes them at the targets
        only: the rest of the softmax is one factor per token, which is multiplied into the small operands of the two
        products, as the loss's scale is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        shared: SharedVocabulary | None,
        chain: tuple[Elementwise, ...],
        ignore_index: int,
        anchor: Tensor,
        hidden_BD: Tensor,
        target_B: Tensor,
    ) -> Tensor:
        dtype = AutocastState.now(hidden_BD.device.type).dtype_for(hidden_BD)
        x_BD = hidden_BD.detach().to(dtype)
        seen = _SeenLogits()
        last: tuple[tuple[int, int], Tensor, Tensor | None] | None = None
        with torch.autocast(x_BD.device.type, enabled=False):
            for part, visit in unit.visits_of_parts(backward=False):
                last = None
                raw_BR = _slice_logits(_weights(part, visit, dtype), x_BD)
                inside, local = ids_in_slice(target_B, slice_rows(part, visit.index))
                logits_BR = replay(raw_BR, chain)
                picked_B = pick(logits_BR, local)
                if chain:
                    part_B, largest_B = _exponentiate(overwritable(logits_BR, of=raw_BR))[0], None
                else:
                    part_B, largest_B = _exponentiate(raw_BR)
                seen.add(part_B, inside=inside, picked_B=picked_B)
                last = (part.item, visit.index), raw_BR, largest_B
                # Only `last` refers to them now, which the next visit clears before it makes its own.
                del raw_BR, logits_BR
        valid_B, lse_B, picked_B = target_B != ignore_index, seen.lse_B, seen.picked_B
        if shared is not None:
            lse_B, picked_B = shared.over_all(lse_B, picked_B, target_B=target_B)
        ctx.unit, ctx.chain, ctx.dtype, ctx.last = unit, chain, dtype, last  # backward begins with the last slice
        ctx.save_for_backward(hidden_BD, target_B, lse_B, valid_B)
        # Ignored targets are in no slice: their loss would be infinite, and times a mask NaN.
        return torch.where(valid_B, lse_B - picked_B, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        hidden_BD, target_B, lse_B, valid_B = ctx.saved_tensors
        x_BD = hidden_BD.detach().to(ctx.dtype)
        scale_B1 = torch.where(valid_B, grad_B, 0.0).unsqueeze(1)
        dx_BD = torch.zeros_like(x_BD)
        for part, visit in unit.visits_of_parts(backward=True):
            inside, local = ids_in_slice(target_B, slice_rows(part, visit.index))
            weights = _weights(part, visit, ctx.dtype)
            # Backward begins with the slice that forward ended with: its logits are still here.
            if ctx.last is not None and ctx.last[0] == (part.item, visit.index):
                (_, raw_BR, largest_B), ctx.last = ctx.last, None
            else:
                raw_BR, largest_B = _slice_logits(weights, x_BD), None
            if largest_B is None:
                d_raw_BR, factor_B1 = _softmax_gradient(raw_BR, ctx.chain, lse_B, inside, local).to(ctx.dtype), scale_B1
            else:
                d_raw_BR, softmax_B1 = raw_BR, _softmax_factor(largest_B, lse_B).unsqueeze(1)
                # The one-hot in units of the factor, which both products below are multiplied by.
                put(d_raw_BR, local, pick(d_raw_BR, local) - softmax_B1.reciprocal().squeeze(1), where=inside)
                factor_B1 = scale_B1 * softmax_B1
            del raw_BR
            dx_BD.addcmul_(torch.mm(d_raw_BR, weights[0]), factor_B1)
            scaled_x_BD, scale_B = (x_BD * factor_B1).to(ctx.dtype), factor_B1.squeeze(1).to(ctx.dtype)
            add_linear_gradient(part, visit, d_raw_BR, scaled_x_BD, row_scale_B=scale_B)
        return (*[None] * 5, dx_BD.to(hidden_BD.dtype), None)


class _KeptCrossEntropy(torch.autograd.Function):
    """The same with logits kept for backward, which then needs no slice of the weight again.

    [Note: one look at the weight]
        A hidden state's gradient is the softmax over the vocabulary times the weight's rows, less the target's row.
        Forward makes it slice by slice while the softmax's scale is still growing, as FlashAttention makes attention
        block by block (arXiv 2205.14135, section 3.1); backward only scales it by the loss's gradient.
        So the head's slices travel once a step instead of twice, for a tensor as large as the hidden states.
        A target's share, `p - 1`, would be lost in rounding where the model is sure of it (p near 1). So targets are
        left out of the sums, and their share is computed as minus the sum of the others' shares.
    """

    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        shared: SharedVocabulary | None,
        chain: tuple[Elementwise, ...],
        ignore_index: int,
        anchor: Tensor,
        hidden_BD: Tensor,
        target_B: Tensor,
    ) -> Tensor:
        # The same arguments as of `_SlicedCrossEntropy`: `apply` passes them by position, and `backward` returns a
        # gradient for each, so neither function could leave them to the other.
        dtype = AutocastState.now(hidden_BD.device.type).dtype_for(hidden_BD)
        x_BD = hidden_BD.detach().to(dtype)
        others, dx = _SeenLogits(), _RunningSum()
        target_rows_BD = torch.zeros_like(x_BD) if ctx.needs_input_grad[5] else None
        kept: dict[tuple[int, int], _KeptSlice] = {}
        with torch.autocast(x_BD.device.type, enabled=False):
            for part, visit in unit.visits_of_parts(backward=False):
                inside, local = ids_in_slice(target_B, slice_rows(part, visit.index))
                weights = _weights(part, visit, dtype)
                part_B, picked_B, kept_slice = _keep_slice(_slice_logits(weights, x_BD), chain, inside, local)
                others.add(part_B, inside=inside, picked_B=picked_B)
                if target_rows_BD is not None:
                    dx.add(torch.mm(kept_slice.d_raw_BR, weights[0]), base_B=kept_slice.base_B)
                    rows_BD = (weights[0].index_select(0, local) * kept_slice.slopes_B.unsqueeze(1)).to(dtype)
                    torch.where(inside.unsqueeze(1), rows_BD, target_rows_BD, out=target_rows_BD)
                if unit.trained:
                    kept[part.item, visit.index] = kept_slice
                # Before the next slice's logits are made, or two slices' would exist at once.
                del weights, kept_slice
        valid_B, others_B, picked_B, dx_BD = target_B != ignore_index, others.lse_B, others.picked_B, None
        if shared is not None:
            others_B, picked_B = shared.over_all(others_B, picked_B, target_B=target_B)
        lse_B = torch.logaddexp(others_B, picked_B)
        share_B = torch.where(valid_B, (others_B - lse_B).exp_().neg_(), 0.0)
        if target_rows_BD is not None:
            dx_BD = dx.over(lse_B).addcmul_(target_rows_BD, share_B.unsqueeze(1))
        ctx.unit, ctx.kept, ctx.dtype, ctx.hidden_dtype = unit, kept, dtype, hidden_BD.dtype
        ctx.has_chain = bool(chain)
        for_weight = (hidden_BD, lse_B, share_B) if unit.trained else (None, None, None)
        ctx.save_for_backward(valid_B, dx_BD, *for_weight)
        return torch.where(valid_B, lse_B - picked_B, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        valid_B, dx_BD, hidden_BD, lse_B, share_B = ctx.saved_tensors
        scale_B1 = torch.where(valid_B, grad_B, 0.0).unsqueeze(1)
        if ctx.unit.trained:
            _KeptCrossEntropy._weight_backward(ctx, hidden_BD.detach().to(ctx.dtype), scale_B1, lse_B, share_B)
        return (*[None] * 5, None if dx_BD is None else (dx_BD * scale_B1).to(ctx.hidden_dtype), None)

    @staticmethod
    def _weight_backward(ctx: Any, x_BD: Tensor, scale_B1: Tensor, lse_B: Tensor, share_B: Tensor) -> None:
        """Hands the slices' gradients to the ring; overwrites the kept logits."""
        unit: RotatingUnit = ctx.unit
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise ConfigError(
                f"rtp: {unit.unit.name!r}: a second backward through a graph that the first has freed: slices are not "
                f"kept by retain_graph=True. Add the losses and call backward once, or {unit.instead_of_visits}"
            )
        # Only gradients rotate: the logits are kept, and the hidden state's gradient was made in forward.
        for part, visit in unit.visits_of_parts(backward=True, fetch=False):
            kept_slice: _KeptSlice = kept.pop((part.item, visit.index))
            softmax_B, of_target_B = _softmax_factor(kept_slice.base_B, lse_B), share_B * kept_slice.slopes_B
            factor_B1, d_raw_BR = softmax_B.unsqueeze(1) * scale_B1, kept_slice.d_raw_BR
            # A slice's logits may stay until its turn comes; the next layer need not wait.
            if ctx.has_chain:  # of another precision, perhaps, in which only the whole product is a number
                d_raw_BR.mul_(factor_B1)
                put(d_raw_BR, kept_slice.local, of_target_B * scale_B1.squeeze(1), where=kept_slice.inside)
                add_linear_gradient(part, visit, d_raw_BR, x_BD, wait=False)
            else:  # see [Note: passes over logits]
                put(d_raw_BR, kept_slice.local, of_target_B / softmax_B, where=kept_slice.inside)
                add_linear_gradient(
                    part, visit, d_raw_BR, x_BD * factor_B1, row_scale_B=factor_B1.squeeze(1), wait=False
                )


class _SeenLogits:
    """Running log-sum-exp of logits that come slice by slice, and the targets' logits.

    Attributes:
        picked_B: logits of the targets; minus infinity where the target's slice has not come yet.
    """

    def __init__(self) -> None:
        self._lse_B: Tensor | None = None
        self.picked_B: Tensor

    def add(self, lse_B: Tensor, *, inside: Tensor, picked_B: Tensor) -> None:
        """Adds a slice: the log-sum-exp [B] of its logits that count, and the logits of targets `inside` it."""
        self.picked_B = torch.where(inside, picked_B, -torch.inf if self._lse_B is None else self.picked_B)
        self._lse_B = lse_B if self._lse_B is None else torch.logaddexp(self._lse_B, lse_B)

    @property
    def lse_B(self) -> Tensor:
        """The log-sum-exp of all slices so far."""
        if self._lse_B is None:
            raise AssertionError("every slice of the head is empty")
        return self._lse_B


class _RunningSum:
    """The sum over slices of `part_BD * exp(base_B)`, without overflow."""

    def __init__(self) -> None:
        self._total_BD: Tensor | None = None
        self._base_B: Tensor | None = None

    def add(self, part_BD: Tensor, *, base_B: Tensor) -> None:
        part_BD = part_BD.to(base_B.dtype)
        if self._total_BD is None or self._base_B is None:
            self._total_BD, self._base_B = part_BD, base_B
            return
        # Exponents of differences to the larger base are at most 0.
        top_B = torch.maximum(self._base_B, base_B)
        self._total_BD.mul_((self._base_B - top_B).exp_().unsqueeze(1))
        self._total_BD.addcmul_(part_BD, (base_B - top_B).exp_().unsqueeze(1))
        self._base_B = top_B

    def over(self, lse_B: Tensor) -> Tensor:
        """The sum times `exp(-lse_B)`, computed in the sum's memory."""
        if self._total_BD is None or self._base_B is None:
            raise AssertionError("every slice of the head is empty")
        return self._total_BD.mul_((self._base_B - lse_B).exp_().unsqueeze(1))


class _KeptSlice(NamedTuple):
    """One slice's logits, prepared for backward.

    Attributes:
        d_raw_BR: `exp(logits - base)`, times the derivative of the operations behind the product; 0 at targets.
        base_B: each token's largest logit in the slice but for the target; in float16 their log-sum-exp, so that sums
            over the slice are numbers.
        inside: mask of the tokens whose targets are in the slice.
        local: their targets' columns.
        slopes_B: derivative of these operations at the targets.
    """

    d_raw_BR: Tensor
    base_B: Tensor
    inside: Tensor
    local: Tensor
    slopes_B: Tensor


def _keep_slice(
    raw_BR: Tensor, chain: tuple[Elementwise, ...], inside: Tensor, local: Tensor
) -> tuple[Tensor, Tensor, _KeptSlice]:
    """Prepares a slice's logits for forward and backward; overwrites `raw_BR` if no operation follows the product.

    Returns:
        The log-sum-exp [B] of the logits without the target's; the targets' logits; the state for backward.
    """
    with torch.enable_grad(), no_saved_tensor_hooks():
        leaf = raw_BR.requires_grad_(bool(chain))
        logits_BR = replay(leaf, chain)
    exp_BR = overwritable(logits_BR, of=leaf) if chain else raw_BR
    picked_B = pick(exp_BR, local)
    # Their exponential is 0, so targets count in no sum (see [Note: one look at the weight]).
    put(exp_BR, local, -torch.inf, where=inside)
    base_B = _largest(exp_BR)
    others_B = exp_BR.sub_(base_B.unsqueeze(1)).exp_().sum(-1)
    others_lse_B = others_B.log().add_(base_B)
    if not chain:
        return others_lse_B, picked_B, _KeptSlice(exp_BR, base_B, inside, local, torch.ones_like(picked_B))
    # float16 ends at 65504, which a sum of exponentials over a slice can exceed.
    if raw_BR.dtype is torch.float16:
        limits = torch.finfo(others_B.dtype)
        exp_BR.div_(others_B.clamp_(min=limits.tiny).unsqueeze(1))
        base_B = others_lse_B.clamp(min=limits.min)
    # With 1 at the targets, the gradient there is the derivative of the chain itself.
    put(exp_BR, local, 1.0, where=inside)
    (d_raw_BR,) = torch.autograd.grad(logits_BR, leaf, exp_BR)
    slopes_B = pick(d_raw_BR, local).to(base_B.dtype)
    put(d_raw_BR, local, 0.0, where=inside)
    return others_lse_B, picked_B, _KeptSlice(d_raw_BR, base_B, inside, local, slopes_B)


def _exponentiate(logits_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Turns logits into `exp(logits - largest)` in place; returns their log-sum-exp [B] and the largest [B]."""
    largest_B = _largest(logits_BR)
    logits_BR.sub_(largest_B.unsqueeze(1)).exp_()
    return logits_BR.sum(-1).log_().add_(largest_B), largest_B


def _softmax_factor(largest_B: Tensor, lse_B: Tensor) -> Tensor:
    """The factor [B] from `exp(logits - largest)` to the softmax over all slices.

    Clamped so that its reciprocal is finite: a slice whose share is smaller adds nothing.
    """
    return (largest_B - lse_B).exp_().clamp_min_(max(1e-30, torch.finfo(lse_B.dtype).tiny))


def _weights(unit: RotatingUnit, visit: Visit, dtype: torch.dtype) -> list[Tensor]:
    """The visiting slice's weight, and its bias if there is one."""
    return [weight.detach().to(dtype) for weight in unit.weights(visit)]


def _slice_logits(weights: list[Tensor], x_BD: Tensor) -> Tensor:
    weight, *bias = weights
    with record_function(LOGITS_BLOCK):
        return torch.addmm(bias[0], x_BD, weight.t()) if bias else torch.mm(x_BD, weight.t())


def _largest(logits_BR: Tensor) -> Tensor:
    """[B]; a number also where all logits are minus infinity."""
    return logits_BR.amax(-1).clamp_min_(torch.finfo(logits_BR.dtype).min)


def _softmax_gradient(
    raw_BR: Tensor,
    chain: tuple[Elementwise, ...],
    lse_B: Tensor,
    inside: Tensor,
    local: Tensor,
) -> Tensor:
    """Gradient of each token's loss with respect to a slice's raw logits; overwrites them if `chain` is empty."""
    if chain:
        with torch.enable_grad():
            leaf = raw_BR.detach().requires_grad_()
            logits_BR = replay(leaf, chain)
        grad_BR = overwritable(logits_BR, of=leaf).sub_(lse_B.unsqueeze(1)).exp_()
    else:
        grad_BR = raw_BR.sub_(lse_B.unsqueeze(1)).exp_()
    put(grad_BR, local, pick(grad_BR, local) - 1.0, where=inside)
    return torch.autograd.grad(logits_BR, leaf, grad_BR)[0] if chain else grad_BR

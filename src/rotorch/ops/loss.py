"""Cross-entropy over a vocabulary that goes round: the full logits never exist (rotation of embedding and head).

The head's logits are deferred (`ops/deferred_logits.py`), and the loss runs slice by slice.

Shapes: B tokens, D hidden, V vocabulary, R rows of the vocabulary in one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.deferred_logits import LOGITS_BLOCK, Elementwise, Head, replay
from rotorch.ops.linear import add_linear_gradient, rotate_linear, slice_rows
from rotorch.ops.rotate import RotatingUnit


@dataclass(frozen=True)
class RotatingHead(Head):
    """A head whose weight goes round.

    Attributes:
        unit: of the weight.
        keep: the loss keeps logits for backward instead of computing them again.
    """

    unit: RotatingUnit
    keep: bool

    @property
    def vocab_size(self) -> int:
        return self.unit.slices.weights[0].shape[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return rotate_linear(self.unit, hidden)

    def loss(self, hidden_BD: Tensor, target_B: Tensor, *, chain: tuple[Elementwise, ...], ignore_index: int) -> Tensor:
        args = (self.unit, chain, self.keep, ignore_index, self.unit.anchor, hidden_BD, target_B)
        return _SlicedCrossEntropy.apply(*args)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Per-token loss. Forward: running log-sum-exp over slices. Backward: softmax minus one-hot, slice by slice.

    [Note: passes over logits]
        Logits are the largest tensor of a step, and every pass over them counts. So where nothing was done to them
        since the product, forward leaves `exp(logits - their largest)` in their place, and backward never touches them
        again but for the targets: what is left of the softmax is one factor per token, which goes to the small
        operands of the two products, as the loss's scale does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        chain: tuple[Elementwise, ...],
        keep: bool,
        ignore_index: int,
        anchor: Tensor,
        hidden_BD: Tensor,
        target_B: Tensor,
    ) -> Tensor:
        dtype = AutocastState.now(hidden_BD.device.type).dtype or hidden_BD.dtype
        x_BD = hidden_BD.detach().to(dtype)
        lse_B = picked_B = None
        kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        needs_grad = any(ctx.needs_input_grad)
        with torch.autocast(x_BD.device.type, enabled=False):
            for visit in unit.visits(backward=False):
                if not keep:
                    kept.clear()  # only the last slice's stay: backward begins with it
                raw_BR = _slice_logits(unit, visit, x_BD)
                tokens, local = _targets_in_slice(unit, visit.index, target_B)
                logits_BR = replay(raw_BR, chain)
                if picked_B is None:
                    picked_B = logits_BR.new_zeros(target_B.shape)
                picked_B[tokens] = logits_BR[tokens, local]
                if chain:
                    part_B, largest_B = torch.logsumexp(logits_BR, dim=-1), None
                else:
                    part_B, largest_B = _exponentiate(raw_BR)
                lse_B = part_B if lse_B is None else torch.logaddexp(lse_B, part_B)
                if needs_grad:
                    kept[visit.index] = raw_BR, largest_B
                del raw_BR, logits_BR
        if lse_B is None or picked_B is None:
            raise AssertionError(f"{unit.unit.name}: every slice is empty")
        valid_B = target_B != ignore_index
        ctx.unit, ctx.chain, ctx.keep, ctx.kept, ctx.dtype = unit, chain, keep, kept, dtype
        ctx.save_for_backward(hidden_BD, target_B, lse_B, valid_B)
        return torch.where(valid_B, lse_B - picked_B, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        hidden_BD, target_B, lse_B, valid_B = ctx.saved_tensors
        x_BD = hidden_BD.detach().to(ctx.dtype)
        scale_B1 = torch.where(valid_B, grad_B, 0.0).unsqueeze(1).to(ctx.dtype)
        dx_BD = torch.zeros_like(x_BD)
        for visit in unit.visits(backward=True):
            tokens, local = _targets_in_slice(unit, visit.index, target_B)
            raw_BR, largest_B = ctx.kept.pop(visit.index, (None, None))
            if raw_BR is None:
                raw_BR = _slice_logits(unit, visit, x_BD)
            if largest_B is None:
                d_raw_BR, factor_B1 = _softmax_gradient(raw_BR, ctx.chain, lse_B, tokens, local).to(ctx.dtype), scale_B1
            else:
                d_raw_BR, softmax_B1 = raw_BR, _softmax_factor(largest_B, lse_B).unsqueeze(1)
                d_raw_BR[tokens, local] -= softmax_B1[tokens].reciprocal().squeeze(1)
                factor_B1 = scale_B1 * softmax_B1
            del raw_BR
            dx_BD.addcmul_(torch.mm(d_raw_BR, unit.weights(visit)[0].detach().to(ctx.dtype)), factor_B1)
            scale_B = factor_B1.squeeze(1)
            # Where all logits are kept anyway, a slice's may stay until its turn comes; the next layer need not wait.
            add_linear_gradient(unit, visit, d_raw_BR, x_BD * factor_B1, row_scale_B=scale_B, wait=not ctx.keep)
        return (*[None] * 5, dx_BD.to(hidden_BD.dtype), None)


def _exponentiate(logits_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Turns logits into `exp(logits - largest)` in place; returns their log-sum-exp [B] and the largest [B]."""
    largest_B = logits_BR.amax(-1).clamp_min_(torch.finfo(logits_BR.dtype).min)
    logits_BR.sub_(largest_B.unsqueeze(1)).exp_()
    return logits_BR.sum(-1).log_().add_(largest_B), largest_B


def _softmax_factor(largest_B: Tensor, lse_B: Tensor) -> Tensor:
    """What `exp(logits - largest)` [B, R] is to be multiplied by to be the softmax over all slices.

    At least so large that its reciprocal is a number: a slice whose share is smaller has none.
    """
    return (largest_B - lse_B).exp_().clamp_min_(1e-30)


def _slice_logits(unit: RotatingUnit, visit: Any, x_BD: Tensor) -> Tensor:
    weight, *bias = (w.detach().to(x_BD.dtype) for w in unit.weights(visit))
    with record_function(LOGITS_BLOCK):
        return torch.addmm(bias[0], x_BD, weight.t()) if bias else torch.mm(x_BD, weight.t())


def _targets_in_slice(unit: RotatingUnit, index: int, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the tokens whose target is in slice `index`, and the target's column there."""
    rows = slice_rows(unit, index)
    tokens = ((target_B >= rows.start) & (target_B < rows.stop)).nonzero().squeeze(1)
    return tokens, target_B[tokens] - rows.start


def _softmax_gradient(
    raw_BR: Tensor,
    chain: tuple[Elementwise, ...],
    lse_B: Tensor,
    tokens: Tensor,
    local: Tensor,
) -> Tensor:
    """Gradient of each token's loss in a slice's raw logits; overwrites them where nothing was done to them since."""
    if chain:
        with torch.enable_grad():
            leaf = raw_BR.detach().requires_grad_()
            logits_BR = replay(leaf, chain)
        grad_BR = logits_BR.detach().sub(lse_B.unsqueeze(1)).exp_()
    else:
        grad_BR = raw_BR.sub_(lse_B.unsqueeze(1)).exp_()
    grad_BR[tokens, local] -= 1.0
    return torch.autograd.grad(logits_BR, leaf, grad_BR)[0] if chain else grad_BR

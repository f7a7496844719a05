"""Cross-entropy over a vocabulary that goes round: the full logits never exist (rotation of embedding and head).

A language-model head returns `DeferredLogits`, which stand for `[.., V]` logits without holding them. What models do
between head and loss (scaling, soft caps, casts, flattening, shifting) is written down and replayed per slice;
`cross_entropy` on them runs slice by slice; anything else makes them real, once, and goes on as usual.

Shapes: B tokens, D hidden, V vocabulary, R rows of the vocabulary in one slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from rotorch._torch_private import wrapper_tensor
from rotorch.ops.linear import add_linear_gradient, rotate_linear, slice_rows
from rotorch.ops.rotate import AutocastState, RotatingUnit
from rotorch.ops.stand_in import StandIn, writes

LOGITS_BLOCK = "rotorch.logits"
"""Name of the profiler's blocks in which logits are made: profiles and the memory ledger tell them by it."""

Elementwise = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""An operation on logits that treats every element alike: (function, further arguments, keyword arguments)."""

_ELEMENTWISE = {
    torch.tanh, Tensor.tanh, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div,
    Tensor.__truediv__, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__,
    torch.neg, Tensor.neg, Tensor.__neg__, torch.clamp, Tensor.clamp, Tensor.float, Tensor.double, Tensor.to,
    Tensor.type, Tensor.bfloat16, Tensor.half,
}  # fmt: skip
_RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
_AS_IS = {Tensor.contiguous}
_FLOAT: Elementwise = (Tensor.float, (), {})


class DeferredLogits(StandIn):
    """Logits `[.., V]` that are not computed yet: `elementwise(hidden @ weight.T + bias)`.

    Whoever writes into them makes them real for good.
    """

    hidden: Tensor
    unit: RotatingUnit
    chain: tuple[Elementwise, ...]
    keep: bool
    written: Tensor | None

    @staticmethod
    def __new__(
        cls, hidden: Tensor, unit: RotatingUnit, *, chain: tuple[Elementwise, ...] = (), keep: bool
    ) -> DeferredLogits:
        """Makes logits of `hidden [.., D]`.

        `keep`: the loss keeps logits for backward instead of computing them again.
        """
        shape = (*hidden.shape[:-1], unit.slices.weights[0].shape[0])
        self = wrapper_tensor(cls, shape, like=_replay(hidden.new_empty(0), chain))
        self.hidden, self.unit, self.chain, self.keep, self.written = hidden, unit, chain, keep, None
        return self

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes the operation, computes the loss, or makes the logits real."""
        if func is F.cross_entropy and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if logits is not None and writes(func):
            logits.written = logits.real_logits()
            func(logits.written, *args[1:], **kwargs)
            return logits
        if logits is not None and logits.written is None:
            others = [*args[1:], *kwargs.values()]
            if func in _AS_IS:
                return logits
            if func in _ELEMENTWISE and not any(isinstance(a, Tensor) for a in others):
                if logits._is_as_it_was(func, args[1:], kwargs):
                    return logits
                return logits._with(logits.hidden, (*logits.chain, (func, tuple(args[1:]), kwargs)))
            if func in _RESHAPES and (hidden := _reshaped(logits, func, args[1:], kwargs)) is not None:
                return logits._with(hidden, logits.chain)
            if func is Tensor.__getitem__ and _keeps_last_dim(args[1], logits.dim()):
                return logits._with(logits.hidden[args[1]], logits.chain)
            if func is F.cross_entropy and _is_plain(args, kwargs):
                return _cross_entropy(logits, *args[1:], **kwargs)
        real_args = [a.real_logits() if isinstance(a, DeferredLogits) else a for a in args]
        real_kwargs = {k: v.real_logits() if isinstance(v, DeferredLogits) else v for k, v in kwargs.items()}
        return func(*real_args, **real_kwargs)

    def _with(self, hidden: Tensor, chain: tuple[Elementwise, ...]) -> DeferredLogits:
        return DeferredLogits(hidden, self.unit, chain=chain, keep=self.keep)

    def _is_as_it_was(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a function has nothing to do, as a cast to the dtype that logits have already (HF's losses do it)."""
        sample = torch.empty(0, dtype=self.dtype, device=self.hidden.device)
        return func(sample, *args, **kwargs) is sample

    def real_logits(self) -> Tensor:
        """Computes the logits, whole."""
        if self.written is not None:
            return self.written
        with record_function(LOGITS_BLOCK):
            return _replay(rotate_linear(self.unit, self.hidden), self.chain)


def _replay(values: Tensor, chain: tuple[Elementwise, ...]) -> Tensor:
    for func, args, kwargs in chain:
        values = func(values, *args, **kwargs)
    return values


def _reshaped(logits: DeferredLogits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The hidden states of reshaped logits, if the vocabulary stays the last dim."""
    target = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    if not target or target[-1] != logits.shape[-1]:
        return None
    return logits.hidden.reshape(*target[:-1], logits.hidden.shape[-1])


def _keeps_last_dim(index: Any, dim: int) -> bool:
    """Whether `logits[index]` only picks tokens."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all((isinstance(p, (int, slice)) and not isinstance(p, bool)) or p is Ellipsis for p in parts):
        return False
    if parts[-1] == slice(None):
        return True
    if Ellipsis in parts[:-1]:
        return False  # what follows an ellipsis ends at the last dim
    return sum(p is not Ellipsis for p in parts) < dim


def _is_plain(args: Any, kwargs: Any) -> bool:
    """Whether a cross_entropy call is one that slices can answer: class indices, no class weights, no smoothing."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target = given.get("target")
    return (
        given["input"].dim() == 2
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
        and not given.get("label_smoothing", 0.0)
    )


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of `[B, V]` deferred logits and int64 `target [B]`."""
    outside = ((target < 0) | (target >= logits.shape[-1])) & (target != ignore_index)
    if outside.any():
        raise IndexError(f"target {int(target[outside][0])} is outside of a vocabulary of {logits.shape[-1]}")
    chain = logits.chain
    if torch.is_autocast_enabled(logits.device.type):  # under which losses are computed in float32
        chain = (*chain, _FLOAT)
    args = (logits.unit, chain, logits.keep, ignore_index, logits.unit.anchor, logits.hidden, target)
    loss_B = _SlicedCrossEntropy.apply(*args)
    if reduction == "none":
        return loss_B
    if reduction == "sum":
        return loss_B.sum()
    return loss_B.sum() / (target != ignore_index).sum()


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
                logits_BR = _replay(raw_BR, chain)
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
            logits_BR = _replay(leaf, chain)
        grad_BR = logits_BR.detach().sub(lse_B.unsqueeze(1)).exp_()
    else:
        grad_BR = raw_BR.sub_(lse_B.unsqueeze(1)).exp_()
    grad_BR[tokens, local] -= 1.0
    return torch.autograd.grad(logits_BR, leaf, grad_BR)[0] if chain else grad_BR

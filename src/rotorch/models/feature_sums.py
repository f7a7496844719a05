"""Norms on activations that are cut along their features: a module's own forward, its sums over features completed.

A norm reduces over the last dim of its input: a mean, a sum, a variance, a length, or one of torch's fused norms. If
a rank has only a part of the features, `complete_sums` answers these functions with the sum over all ranks; all other
operations of the forward must treat every feature alike, which `models/features.py` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotorch.core.errors import ConfigError

Sum = Callable[[Tensor], Tensor]
"""The sum over all ranks of what each has of its own features, differentiable."""


class CompletedSums(TorchFunctionMode):
    """Completes reductions over the last dim of a tensor with `mine` features to all `total` of them, within its block.

    Args:
        mine: features of this rank.
        total: of all ranks.
        sum_over: sums over them.
    """

    def __init__(self, *, mine: int, total: int, sum_over: Sum) -> None:
        super().__init__()
        self._mine, self._total, self._sum = mine, total, sum_over

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        rule = _RULES.get(func)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        x = args[0] if args else None
        if rule is None or not isinstance(x, Tensor) or not x.dim() or x.shape[-1] != self._mine:
            return func(*args, **kwargs)
        found = rule(self, *args, **{name: value for name, value in kwargs.items() if value is not None})
        return func(*args, **kwargs) if found is None else found

    def total_of(self, part: Tensor) -> Tensor:
        """The sum over all features, of this rank's `part` of it."""
        return self._sum(part)

    def mean_of(self, part: Tensor) -> Tensor:
        """The mean over all features, of this rank's `part` of their sum."""
        return self._sum(part) / self._total

    def centred(self, x: Tensor) -> Tensor:
        """`x` minus its mean over all features."""
        return x - self.mean_of(x.sum(-1, keepdim=True))

    @property
    def total(self) -> int:
        return self._total


def complete_sums(norm: nn.Module, *, mine: int, total: int, sum_over: Sum) -> None:
    """Runs a norm's own forward, from now on, with its sums over features completed (see `CompletedSums`)."""
    norm.forward = partial(_with_sums, norm.forward, mine, total, sum_over)  # type: ignore[method-assign]


def _with_sums(forward: Any, mine: int, total: int, sum_over: Sum, /, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], Tensor) and args[0].shape[-1:] == (total,) and total != mine:
        raise ConfigError(
            f"a norm got all {total} features where this rank has {mine}: this layout cuts activations along them, "
            "but not inputs_embeds, which bypass the embedding. Give input_ids, or write ddp, fsdp, rtp or "
            "megatron"
        )
    with CompletedSums(mine=mine, total=total, sum_over=sum_over):
        return forward(*args, **kwargs)


def _is_last(x: Tensor, dim: Any) -> bool:
    dims = dim if isinstance(dim, (tuple, list, torch.Size)) else (dim,)
    return len(dims) == 1 and dims[0] in (-1, x.dim() - 1)


def _sum(mode: CompletedSums, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor | None:
    return mode.total_of(x.sum(dim, keepdim=keepdim, **kwargs)) if _is_last(x, dim) else None


def _mean(mode: CompletedSums, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor | None:
    return mode.mean_of(x.sum(dim, keepdim=keepdim, **kwargs)) if _is_last(x, dim) else None


def _var(
    mode: CompletedSums,
    x: Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor | None:
    if not _is_last(x, dim):
        return None
    over = mode.total - (float(unbiased) if correction is None else correction)
    return mode.total_of(mode.centred(x).square().sum(-1, keepdim=keepdim)) / over


def _std(mode: CompletedSums, *args: Any, **kwargs: Any) -> Tensor | None:
    found = _var(mode, *args, **kwargs)
    return None if found is None else found.sqrt()


def _length(
    mode: CompletedSums, x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Tensor | None:
    if not _is_last(x, dim) or p not in (2, 2.0, "fro", None) or kwargs:
        return None
    return mode.total_of(x.square().sum(-1, keepdim=keepdim)).sqrt()


def _vector_norm(mode: CompletedSums, x: Tensor, ord: Any = 2, dim: Any = None, **kwargs: Any) -> Tensor | None:
    return _length(mode, x, ord, dim, **kwargs)


def _normalize(mode: CompletedSums, x: Tensor, p: Any = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor | None:
    length = _length(mode, x, p, dim, True)
    return None if length is None else x / length.clamp_min(eps)


def _layer_norm(
    mode: CompletedSums,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if tuple(normalized_shape) != (mode.total,):
        return None
    centred = mode.centred(_wide(input))
    return _scaled(centred, mode.mean_of(centred.square().sum(-1, keepdim=True)) + eps, weight, bias, like=input)


def _rms_norm(
    mode: CompletedSums, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if tuple(normalized_shape) != (mode.total,):
        return None
    x = _wide(input)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _scaled(x, mode.mean_of(x.square().sum(-1, keepdim=True)) + eps, weight, None, like=input)


def _wide(x: Tensor) -> Tensor:
    """Casts a tensor to the dtype that torch's fused norms compute in: float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _scaled(x: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, *, like: Tensor) -> Tensor:
    y = x * variance.rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(like.dtype)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    torch.sum: _sum,
    Tensor.sum: _sum,
    torch.mean: _mean,
    Tensor.mean: _mean,
    torch.var: _var,
    Tensor.var: _var,
    torch.std: _std,
    Tensor.std: _std,
    torch.norm: _length,
    Tensor.norm: _length,
    torch.linalg.norm: _vector_norm,
    torch.linalg.vector_norm: _vector_norm,
    F.normalize: _normalize,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}

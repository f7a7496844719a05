"""Attention of the last tokens of a sequence to all of it: causal, without a mask, and not computed again.

[Note: two parts]
    A causal kernel on CPU takes its queries for the first tokens. So queries attend in two parts: to the keys before
    their own tokens, which all of them see, and to their own. Each part gives its outputs and the logarithm of its sum
    of exponentials, by which outputs are weighted. In backward a kernel is given outputs and sums of both parts, and
    gives a part's gradients. Source: blockwise attention (Liu, Abbeel, arXiv 2305.19370).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from rotorch._torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD


def can_fuse(query: Tensor, value: Tensor) -> bool:
    """True if a fused kernel takes such tensors `[rows, heads, tokens, features]`: else torch makes all scores."""
    if query.shape[3] != value.shape[3]:
        return False
    # On a GPU only flash attention takes grouped heads; it is for half precision.
    in_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cpu" or (in_half and query.shape[3] <= _MOST_FEATURES_OF_FLASH)


_MOST_FEATURES_OF_FLASH = 256


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None) -> Tensor:
    """Outputs `[rows, heads, queries, features]` of the last tokens' queries, if `can_fuse`.

    Args:
        query: `[rows, heads, queries, features]`.
        key: of all tokens, `[rows, heads, tokens, features]`; query heads may share it in equal groups.
        value: of the same shape, also in its features.
        scale: of scores; None: one over the root of the number of features.
    """
    if query.device.type != "cpu":
        bias = causal_lower_right(query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=True)
    # The operation reads features that lie side by side, and does not look.
    output: Tensor = _InTwoParts.apply(*(x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value)), scale)
    return output


class _InTwoParts(Function):
    """See [Note: two parts]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        before, own = _parts(query, key, value)
        output, log_sum = CPU_ATTENTION(query, *own, 0.0, True, scale=scale)
        if before:
            other, log_sum_of_other = CPU_ATTENTION(query, *before, scale=scale)
            log_sum_of_own, log_sum = log_sum, torch.logaddexp(log_sum, log_sum_of_other)
            weights = ((part - log_sum).exp().unsqueeze(-1) for part in (log_sum_of_own, log_sum_of_other))
            output = sum(part * weight for part, weight in zip((output, other), weights, strict=True)).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, output, log_sum = ctx.saved_tensors
        before, own = _parts(query, key, value)

        def of_part(keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = CPU_ATTENTION_BACKWARD(
                grad, query, keys, values, output, log_sum, 0.0, causal, scale=ctx.scale
            )
            return found

        of_own = of_part(*own, causal=True)
        if not before:
            return *of_own, None
        found = of_part(*before, causal=False)
        of_keys = (torch.cat(both, dim=2) for both in zip(found[1:], of_own[1:], strict=True))
        return found[0].add_(of_own[0]), *of_keys, None


def _parts(query: Tensor, *keys: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of the tokens before the queries' own, if there are any, and of these."""
    num_own = query.shape[2]
    num_before = keys[0].shape[2] - num_own
    before = tuple(x.narrow(2, 0, num_before) for x in keys) if num_before else ()
    return before, tuple(x.narrow(2, num_before, num_own) for x in keys)

"""Attention of some spans of a sequence, each to all tokens up to its own: causal, without a mask, computed once.

[Note: two parts]
    A causal kernel on CPU takes its queries for the first tokens. So queries attend in two parts: to the keys before
    their own tokens, which all of them see, and to their own. Each part gives its outputs and the logarithm of its sum
    of exponentials, by which outputs are weighted. In backward a kernel is given outputs and sums of both parts, and
    gives a part's gradients. Source: blockwise attention (Liu, Abbeel, arXiv 2305.19370).

[Note: outputs once]
    The outputs of all spans lie in one tensor, which the next layer keeps for its own backward anyway; backward of a
    span reads its part of it. On other devices torch's public function makes and keeps the outputs of each span, and
    what it gives for several of them is one more tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from rotorch._torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD
from rotorch.core.spec import Range


def can_fuse(query: Tensor, value: Tensor) -> bool:
    """True if a fused kernel takes such tensors `[rows, heads, tokens, features]`: else torch makes all scores."""
    if query.shape[3] != value.shape[3]:
        return False
    # On a GPU only flash attention takes grouped heads; it is for half precision.
    in_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cpu" or (in_half and query.shape[3] <= _MOST_FEATURES_OF_FLASH)


_MOST_FEATURES_OF_FLASH = 256


@dataclass(frozen=True)
class Span:
    """Queries of consecutive tokens, and the tokens that they see.

    Attributes:
        queries: their places among the queries.
        keys: the places, among the keys, of all tokens up to the last of them.
    """

    queries: Range
    keys: Range

    @property
    def own(self) -> Range:
        """The places, among the keys, of the queries' own tokens."""
        return Range(self.keys.stop - self.queries.length, self.queries.length)

    @property
    def before(self) -> Range:
        """The places of the tokens before these, which all queries see."""
        return Range(self.keys.start, self.keys.length - self.queries.length)


def of_tokens(x: Tensor, tokens: Range) -> Tensor:
    """A part of `[rows, heads, tokens, features]`."""
    return x.narrow(2, tokens.start, tokens.length)


def attend_spans(query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float | None) -> Tensor:
    """Outputs `[rows, queries, heads, features]` of spans of queries, if `can_fuse`.

    Args:
        query: `[rows, heads, queries, features]`, those of one span after the other.
        key: `[rows, heads, tokens, features]`; query heads may share it in equal groups.
        value: of the same shape, also in its features.
        spans: which queries see which keys.
        scale: of scores; None: one over the root of the number of features.
    """
    if query.device.type == "cpu":
        # The operation reads features that lie side by side, and does not look.
        tensors = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
        output: Tensor = _InTwoParts.apply(*tensors, tuple(spans), scale)
        return output
    outputs = []
    for span in spans:
        bias = causal_lower_right(span.queries.length, span.keys.length)
        here, keys, values = of_tokens(query, span.queries), of_tokens(key, span.keys), of_tokens(value, span.keys)
        found = F.scaled_dot_product_attention(here, keys, values, bias, scale=scale, enable_gqa=True)
        outputs.append(found.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _InTwoParts(Function):
    """See [Note: two parts]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...], scale: float | None
    ) -> Tensor:
        rows, heads, tokens, features = query.shape
        whole, log_sums = query.new_empty(rows, tokens, heads, features), []
        for span in spans:
            here = of_tokens(query, span.queries)
            own, before = ([of_tokens(x, tokens) for x in (key, value)] for tokens in (span.own, span.before))
            output, log_sum = CPU_ATTENTION(here, *own, 0.0, True, scale=scale)
            if span.before.length:
                other, log_sum_of_other = CPU_ATTENTION(here, *before, scale=scale)
                log_sum_of_own, log_sum = log_sum, torch.logaddexp(log_sum, log_sum_of_other)
                weights = ((part - log_sum).exp().unsqueeze(-1) for part in (log_sum_of_own, log_sum_of_other))
                output = sum(part * weight for part, weight in zip((output, other), weights, strict=True))
            of_tokens(whole.transpose(1, 2), span.queries).copy_(output)
            log_sums.append(log_sum)
        ctx.save_for_backward(query, key, value, whole, *log_sums)
        ctx.spans, ctx.scale = spans, scale
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, whole, *log_sums = ctx.saved_tensors
        grads, outputs = grad.transpose(1, 2), whole.transpose(1, 2)
        totals = [torch.zeros_like(x) for x in (query, key, value)]
        for span, log_sum in zip(ctx.spans, log_sums, strict=True):
            its_grads, here, its_outputs = (of_tokens(x, span.queries) for x in (grads, query, outputs))
            for seen, causal in ((span.own, True), (span.before, False)):
                if seen.length:
                    keys, values = of_tokens(key, seen), of_tokens(value, seen)
                    found = CPU_ATTENTION_BACKWARD(
                        its_grads, here, keys, values, its_outputs, log_sum, 0.0, causal, scale=ctx.scale
                    )
                    for total, part, tokens in zip(totals, found, (span.queries, seen, seen), strict=True):
                        of_tokens(total, tokens).add_(part)
        return *totals, None, None

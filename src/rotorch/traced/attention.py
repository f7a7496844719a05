"""Attention of a rank that has a part of a sequence, as a trace sees it: it keeps its queries, and says what more.

[Note: stand-in]
    Keys and values of a part lie with other ranks, and masks and scores exist for one block at a time. So the stand-in
    computes nothing, and only its queries and its output count in the trace (`planner/shared_tokens.py` has the rest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rotorch.models.attention_interface import as_computed, attending_by, attention_configs, attention_names
from rotorch.planner.shared_tokens import TracedAttention

_NAME = "rotorch_traced_attention"


@contextmanager
def attentions_alone(module: nn.Module, *, found: Callable[[TracedAttention], None]) -> Iterator[None]:
    """Puts the stand-in in the place of a model's attentions (see [Note: stand-in]).

    Args:
        module: a Hugging Face model.
        found: told of every attention that is called.
    """
    configs = attention_configs(module)
    own = attention_names(configs)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (as_computed(x) for x in (query, key, value))
        of_keys = key.shape[1] * (key.shape[3] + value.shape[3]) * key.element_size()
        is_fused = own.get(id(getattr(module, "config", None))) == "sdpa"
        found(
            TracedAttention(
                query_bytes=float(query.shape[1] * query.shape[3] * query.element_size()),
                key_bytes=float(of_keys),
                score_bytes=0.0 if is_fused else float(query.shape[1] * query.element_size()),
                window=options.get("sliding_window"),
                heads=query.shape[1],
                key_heads=key.shape[1],
                is_square=query.shape[3] == value.shape[3],
            )
        )
        output: Tensor = _Attended.apply(query, key, value)
        return output, None

    with attending_by(attend, name=_NAME, configs=configs):
        yield


class _Attended(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query)
        ctx.given = [(key.shape, key.dtype), (value.shape, value.dtype)]
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        (query,) = ctx.saved_tensors
        return torch.empty_like(query), *(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.given)

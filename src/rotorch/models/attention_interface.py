"""Another attention in the place of a model's own, by transformers' `AttentionInterface`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def attention_configs(module: nn.Module) -> list[Any]:
    """The configurations of a model and of its parts that name an attention, the whole before its parts."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation") and id(config) not in found:
            found[id(config)] = config
            for name in getattr(config, "sub_configs", {}):
                add(getattr(config, name, None))

    for part in module.modules():
        add(getattr(part, "config", None))
    return list(found.values())


def attention_names(configs: Sequence[Any]) -> dict[int, Any]:
    """The attention that each configuration names, by its identity."""
    return {id(config): config._attn_implementation for config in configs}


def as_computed(x: Tensor) -> Tensor:
    """Queries, keys or values in the dtype in which autocast, if it is on, has attentions computed."""
    on = x.device.type
    converts = torch.is_autocast_enabled(on) and x.dtype != torch.float64  # which autocast leaves alone
    return x.to(torch.get_autocast_dtype(on)) if converts else x


@contextmanager
def attending_by(attend: Callable[..., Any], *, name: str, configs: Sequence[Any]) -> Iterator[None]:
    """Has a model attend by a function, under a name of its own, within the block.

    Transformers makes no masks for a name that its table of masks does not have.

    Args:
        attend: called as transformers calls attentions.
        name: no other attention has it.
        configs: of the model, by `attention_configs`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = attention_names(configs)
    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config in configs:  # parts behind the whole, which sets theirs too
            config._attn_implementation = own[id(config)]
        del ALL_ATTENTION_FUNCTIONS[name]

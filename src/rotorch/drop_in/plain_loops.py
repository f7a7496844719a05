"""Refusals of what no loop of a trainer can be right with, before a model is spread."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.pipelining.stage_strategy import StageStrategy


def check_plain_loop(strategies: Sequence[Strategy], model: nn.Module | None = None, *, who: str) -> None:
    """Raises `ConfigError` for pipelines, compiled models, and weights whose small gradients would become 0."""
    kinds = ",".join(strategy.kind for strategy in strategies)
    if any(isinstance(strategy, StageStrategy) for strategy in strategies):
        raise ConfigError(
            f"{who}: its loop calls the model, of which each rank of a pipeline has a part ({kinds}). Write rtp, fsdp, "
            "megatron or ddp, or train by model.forward_backward"
        )
    if any(strategy.context_axes for strategy in strategies):
        raise ConfigError(
            f"{who}: its loop calls the model, and ranks that share a sequence train by model.forward_backward. Leave "
            "context out"
        )
    if hasattr(model, "_orig_mod"):
        raise ConfigError(f"{who}: torch.compile would trace through what goes between ranks. Give the model as it is")
    if model is not None and any(p.dtype == torch.float16 and p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{who}: small gradients of float16 weights would become 0. Load them as bfloat16")


def layout_of_all() -> str:
    """A layout to suggest: one that takes all ranks that were started."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    return "single" if num_ranks == "1" else f"rtp={num_ranks}"

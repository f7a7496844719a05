"""The module that a run trains, from its configuration: a causal language model, with adapters if asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rotorch.core.precision import Precision
from rotorch.models.hf import causal_lm
from rotorch.models.lora import add_lora
from rotorch.run_config import LoraSection


def make_module(model_config: Any, *, lora: LoraSection | None) -> nn.Module:
    """Builds the module, in the current device context: under `on_meta` without memory for weights.

    Args:
        model_config: a Hugging Face configuration.
        lora: the run's adapters, if it has any; all else is frozen then.

    Raises:
        ConfigError: no causal language-model head, no package peft, or adapters that do not fit the model.
    """
    module = causal_lm(model_config)
    if lora is None:
        return module
    return add_lora(module, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)


_ARGUMENTS: dict[Precision, dict[str, torch.dtype]] = {
    "float32": {},
    "bfloat16": {"param_dtype": torch.bfloat16},
    "autocast_bfloat16": {"autocast_dtype": torch.bfloat16},
}


def precision_arguments(precision: Precision) -> dict[str, torch.dtype]:
    """Arguments of `parallelize` for a precision of passes."""
    return _ARGUMENTS[precision]

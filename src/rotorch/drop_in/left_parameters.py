"""Parameters that a module has left behind in `parallelize`, and optimizers that still have them.

Such an optimizer would find no gradients and change nothing, without a word. torch's DDP keeps a module's parameters,
so loops that make the optimizer first are common.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotorch.core.errors import ConfigError

_LEFT = "left_by_parallelize"
"""Attribute of a parameter that is its module's no more."""


def mark_left(before: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Makes optimizers refuse their next step if they have parameters of `before` that `module` has no more."""
    _watch_steps()
    kept = {id(parameter) for parameter in module.parameters()}
    for parameter in before:
        if id(parameter) not in kept:
            setattr(parameter, _LEFT, True)


@cache  # once in a process: torch calls it at each step of every optimizer
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_left)


def _refuse_left(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(hasattr(parameter, _LEFT) for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} was made before parallelize, over parameters that the model has no more: its "
            "steps would change nothing. Make it after parallelize, over model.parameters()"
        )

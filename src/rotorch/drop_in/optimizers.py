"""Optimizers that were made over a plain module, before it became parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rotorch.core.errors import ConfigError


class PlainParameters:
    """Parameters of a module as they are before `parallelize`, so that optimizers can be given those after it.

    Args:
        module: which, plain or parallel; `parallelize` changes it in place.
        who: what errors begin with.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self._module, self._who = module, who
        self._plain = dict(module.named_parameters(remove_duplicate=False))  # kept alive: ids must stay theirs
        self._name_of = {id(parameter): name for name, parameter in self._plain.items()}

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises `ConfigError` for an optimizer that cannot be given other parameters. Changes nothing."""
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if not all(id(p) in self._name_of for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    f"{self._who}: {kind} has parameters that are not the model's. Make it over model.parameters() of "
                    "this model alone"
                )
            if hasattr(self._module, "parallel"):
                continue
            if optimizer.state:
                raise ConfigError(
                    f"{self._who}: {kind} has made steps over whole weights, and its state cannot be cut here. Make it "
                    "after rotorch.parallelize, or give it before its first step"
                )
            if type(optimizer).__module__.startswith("rotorch."):
                raise ConfigError(
                    f"{self._who}: {kind} must know how weights are cut when it is made. Call "
                    "model = rotorch.parallelize(model, layout) first, make it over that, and give both"
                )

    def give_new_ones(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Puts the module's parameters of now into optimizers that have its former ones, in place."""
        new = dict(self._module.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new[self._name_of[id(parameter)]] for parameter in group["params"]]

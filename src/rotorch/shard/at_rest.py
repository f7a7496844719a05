"""Detects tensors put in the place of a model's weights between steps, with which no pass would compute."""

from __future__ import annotations

from torch import nn

from rotorch._torch_private import storage_key
from rotorch.core.errors import ConfigError
from rotorch.shard.sites import find_sites


class AtRest:
    """The parameters of a module at rest, with their places in it and their memory.

    `parameter.data = other` and `layer.weight = other` work in a plain loop, but not here: a pass computes with memory
    of its own, which ranks may share, and not with the tensor that a name in the module refers to.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        self._places = [
            (name, site, parameters[name], storage_key(parameters[name]))
            for name, sites in find_sites(module).items()
            for site in sites
        ]

    def check(self) -> None:
        """Raises `ConfigError` if a weight was replaced."""
        for name, site, parameter, key in self._places:
            if site.get() is not parameter:
                raise ConfigError(
                    f"{name!r} was replaced by another object after parallelize: training would go on with the old "
                    "one. Write into it (`with torch.no_grad(): parameter.copy_(values)`), or tie weights before "
                    "parallelize"
                )
            if storage_key(parameter) != key:
                raise ConfigError(
                    f"{name}.data was assigned: training would go on with the old values. "
                    "Write `parameter.data.copy_(values)`"
                )

"""Detects tensors put in the place of a model's weights between steps, or beside them, of which no pass knows."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

from rotorch._torch_private import storage_key
from rotorch.core.errors import ConfigError
from rotorch.shard.sharded_weight import weight_of
from rotorch.shard.sites import find_sites


class AtRest:
    """The parameters of a module at rest, with their places in it and their memory.

    `parameter.data = other` and `layer.weight = other` work in a plain loop, but not here: a pass computes with memory
    of its own, which ranks may share, and not with the tensor that a name in the module refers to. Nor does a step
    average gradients of a part that was put into the module since: each rank would train its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        parameters = dict(module.named_parameters())
        self._found = [
            (name, site, parameters[name], storage_key(parameters[name]))
            for name, sites in find_sites(module).items()
            for site in sites
        ]
        self._known = {id(parameter) for parameter in parameters.values()}
        self._seen = _Members(module)

    def check(self, *, memory: bool = True) -> None:
        """Raises `ConfigError` if a weight was replaced, taken out, or if one to train was added.

        Args:
            memory: look at the memory of each weight too, which takes most of the time.
        """
        is_as_seen = self._seen.are_the_same() and self._seen.num_parameters == len(self._known)
        if is_as_seen and not (memory and any(storage_key(parameter) != key for _, _, parameter, key in self._found)):
            return
        self._look()
        self._seen = _Members(self._module)

    def _look(self) -> None:
        for name, site, parameter, key in self._found:
            if site.get() is not parameter:
                raise ConfigError(
                    f"{name!r} was replaced by another object after parallelize: training would go on with the old "
                    "one. Write into it (`with torch.no_grad(): parameter.copy_(values)`), tie weights before "
                    "parallelize, and leave out torch.func.functional_call, which puts others in for a call"
                )
            if storage_key(parameter) != key:
                raise ConfigError(
                    f"{name}.data was assigned: training would go on with the old values. "
                    "Write `parameter.data.copy_(values)`"
                )
        found = {
            id(parameter): parameter
            for part in self._module.modules()
            for parameter in part._parameters.values()
            if parameter is not None
        }
        if not self._known <= found.keys():
            name = next(name for name, _, parameter, _ in self._found if id(parameter) not in found)
            raise ConfigError(
                f"the part of the model with {name!r} was taken out or replaced after parallelize: ranks would go on "
                "with the old one, or train others of their own. Change the model before parallelize"
            )
        for key, parameter in found.items():
            if key not in self._known and parameter.requires_grad and weight_of(parameter) is None:
                name = next(n for n, p in nn.Module.named_parameters(self._module) if p is parameter)
                raise ConfigError(
                    f"{name!r} was put into the model after parallelize: its gradients would not be averaged, and "
                    "each rank would train its own. Put it in before, or leave it out of the model and sum its "
                    "gradients over ranks yourself"
                )


class _Members:
    """Parts and parameters of a module at one moment, to see in microseconds that they are still the same."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._names, self._values = self._now()
        self.num_parameters = len({id(value) for value in self._values if isinstance(value, Tensor)})

    def are_the_same(self) -> bool:
        """True if no part and no parameter has come, gone, been replaced, or got another name."""
        names, values = self._now()
        return names == self._names and all(map(is_, values, self._values))

    def _now(self) -> tuple[list[str], list[Any]]:
        # Asked of the parts each time: they may have been given other dicts.
        dicts = [members for part in self._parts for members in (part._modules, part._parameters)]
        names = list(chain.from_iterable(dicts))
        return names, list(chain.from_iterable(members.values() for members in dicts))

"""The class of a run's optimizer, by name or import path, and its arguments: looked at before anything starts.

[Note: who gets what]
    Classes that update each element on its own get this rank's parts as plain parameters, which is fastest and exact.
    Ours that need more (Muon, Adafactor) get the same, and the rest by themselves. A class of somebody else gets
    DTensors: what it does with them is right, or refused by what lies under them (`shard/in_chunks.py`).
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.spec import ModelSpec
from rotorch.optim import Adafactor, AdamW, Lion, Muon
from rotorch.run_config import OptimizerSection

_NAMED: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": AdamW,
    "sgd": torch.optim.SGD,
    "adafactor": Adafactor,
    "lion": Lion,
    "muon": Muon,
}
_ELEMENT_WISE = {
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
}
"""Classes of torch.optim that update each element on its own."""

_INSTEAD = {
    "torch.optim.Muon": 'name = "muon"',
    "torch.optim.Adafactor": 'name = "adafactor"',
    "torch.optim.LBFGS": "another one: it computes the loss several times per step",
    "torch.optim.SparseAdam": 'name = "adamw": gradients here are not sparse',
}
_OWN_KEYS = ("lr", "betas", "eps", "weight_decay")
"""Arguments that are keys of [optimizer]."""

_DEFAULTS = OptimizerSection()


@dataclass(frozen=True)
class ChosenOptimizer:
    """A run's optimizer.

    Attributes:
        cls: its class.
        arguments: that it is made with, beside parameters.
        takes_parts: it gets this rank's parts as plain parameters; else DTensors.
        decays: it takes `weight_decay`.
        of_muon: settings of groups of Muon's.
        of_adamw: settings of the other groups of Muon.
    """

    cls: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    takes_parts: bool
    decays: bool
    of_muon: dict[str, Any] = field(default_factory=dict)
    of_adamw: dict[str, Any] = field(default_factory=dict)

    @property
    def has_muon(self) -> bool:
        """Has groups of two kinds."""
        return issubclass(self.cls, Muon)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer over groups of parameters."""
        return self.cls(groups, **self.arguments)


def choose_optimizer(settings: OptimizerSection) -> ChosenOptimizer:
    """The class that a run asks for, with its arguments.

    Raises:
        ConfigError: no such class, one that cannot be right here, or arguments that it does not take.
    """
    cls = _NAMED.get(settings.name) or _imported(settings.name)
    known = inspect.signature(cls).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for key in settings.arguments:
        if key in _OWN_KEYS:
            raise ConfigError(f"optimizer.arguments.{key}: {key!r} is a key of [optimizer]. Write optimizer.{key}")
        if key == "params" or (key not in known and not takes_any):
            others = [name for name in known if name not in ("params", *_OWN_KEYS)]
            raise ConfigError(
                f"optimizer.arguments.{key}: {settings.name} takes no {key!r}{nearest(key, known=others)}. "
                f"It takes {', '.join(others) or 'no others'}"
            )
    arguments: dict[str, Any] = {"lr": settings.lr}
    is_muon = issubclass(cls, Muon)
    for key in ("betas", "eps"):
        value, default = getattr(settings, key), getattr(_DEFAULTS, key)
        if cls is not Adafactor and key in known and not is_muon:
            arguments[key] = value
        elif value != default and not is_muon:
            raise ConfigError(f"optimizer.{key} = {value!r}: {settings.name} takes none. Leave it out")
    decays = "weight_decay" in known
    if settings.weight_decay and not decays:
        raise ConfigError(
            f"optimizer.weight_decay = {settings.weight_decay:g}: {settings.name} takes none. Write weight_decay = 0"
        )
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.arguments.items()}
    if cls is AdamW:
        arguments["fused"] = True  # see [Note: one fused update] in train/optim.py
    of_muon = {"adjust_lr_fn": given.pop("adjust_lr_fn", "match_rms_adamw")} if is_muon else {}
    of_adamw = {"betas": settings.betas, "eps": settings.eps, "fused": True} if is_muon else {}
    chosen = ChosenOptimizer(
        cls,
        {**arguments, **given},
        takes_parts=cls in _NAMED.values() or _is_element_wise(cls),
        decays=decays,
        of_muon=of_muon,
        of_adamw=of_adamw,
    )
    _try(chosen, name=settings.name)
    return chosen


def check_optimizer(settings: OptimizerSection, spec: ModelSpec) -> None:
    """Checks of a run's optimizer for a model.

    Raises:
        ConfigError: as `choose_optimizer`; or a group of which the model has no weight, or that asks for what is not.
    """
    chosen = choose_optimizer(settings)
    trained = {weight.name: weight for weight in spec.weights if weight.trained}
    for group in settings.groups:
        names = fnmatch.filter(trained, group.match)
        names = [name for name in names if fnmatch.fnmatchcase(name, group.match)]
        if not names:
            raise ConfigError(
                f"optimizer.groups: match = {group.match!r} fits no trained weight"
                f"{nearest(group.match, known=trained)}. Write a pattern such as '*.embed_tokens.weight'"
            )
        if group.use_muon is not None and not chosen.has_muon:
            raise ConfigError(f"optimizer.groups {group.match!r}: use_muon is for name = 'muon', not {settings.name!r}")
        if group.weight_decay and not chosen.decays:
            raise ConfigError(f"optimizer.groups {group.match!r}: {settings.name} takes no weight_decay. Leave it out")
        wrong = next((name for name in names if group.use_muon and len(trained[name].shape) != 2), None)
        if wrong is not None:
            raise ConfigError(
                f"optimizer.groups {group.match!r}: use_muon = true, and {wrong!r} of shape "
                f"{list(trained[wrong].shape)} is no matrix. Write a narrower pattern"
            )


def _imported(path: str) -> type[torch.optim.Optimizer]:
    if path in _INSTEAD:
        raise ConfigError(
            f"optimizer.name = {path!r} cannot be used on weights that are spread. Write {_INSTEAD[path]}"
        )
    module, _, name = path.rpartition(".")
    if not module:
        known = ", ".join(_NAMED)
        raise ConfigError(
            f"optimizer.name = {path!r} is unknown{nearest(path, known=_NAMED)}. Write one of {known}, or the "
            "import path of a class"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"optimizer.name = {path!r} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "Install it, or put its directory on PYTHONPATH"
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.name = {path!r} is no subclass of torch.optim.Optimizer. Write one that is")
    return found


def _is_element_wise(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim") and cls.__name__ in _ELEMENT_WISE


def _try(chosen: ChosenOptimizer, *, name: str) -> None:
    """Makes it over one small matrix, so that a value it does not take is found now."""
    group: dict[str, Any] = {"params": [nn.Parameter(torch.zeros(2, 2))], **chosen.of_muon}
    try:
        chosen.make([group])
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"optimizer: {name} does not take these arguments: {said}") from None

"""rotorch: train a PyTorch model as it is, so that N ranks together hold what one would have held, and nothing twice.

Importing this package imports no torch; the names below are loaded when first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "parallelize": "rotorch.parallelize",
    "on_meta": "rotorch.shard.materialize",
    "ParallelModel": "rotorch.parallel_model",
    "DDP": "rotorch.strategies",
    "FSDP": "rotorch.strategies",
    "RTP": "rotorch.strategies",
    "Single": "rotorch.strategies",
    "ConfigError": "rotorch.core.errors",
    "RankFailure": "rotorch.core.errors",
    "save": "rotorch.train.own_loop",
    "load": "rotorch.train.own_loop",
}

_PARTS = {"accelerate", "hf", "lightning", "optim"}
"""Packages that `rotorch.<name>` loads when first used."""

__all__ = [
    "DDP",
    "FSDP",
    "RTP",
    "ConfigError",
    "ParallelModel",
    "RankFailure",
    "Single",
    "__version__",
    "load",
    "on_meta",
    "optim",
    "parallelize",
    "save",
]

if TYPE_CHECKING:
    from rotorch import optim
    from rotorch.core.errors import ConfigError, RankFailure
    from rotorch.parallel_model import ParallelModel
    from rotorch.parallelize import parallelize
    from rotorch.shard.materialize import on_meta
    from rotorch.strategies import DDP, FSDP, RTP, Single
    from rotorch.train.own_loop import load, save


def __getattr__(name: str) -> object:
    if name in _PARTS:
        return importlib.import_module(f"rotorch.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'rotorch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `rotorch.parallelize` the function.

    Whoever imports the submodule of that name makes Python set it as an attribute of the package.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, getattr(value, name) if name in _LAZY and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package

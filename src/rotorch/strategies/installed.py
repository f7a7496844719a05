"""Strategies of other packages, which name them as entry points of the group `rotorch.strategies`.

Source: the entry points specification of the Python Packaging User Guide. `examples/strategy` is such a package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import entry_points

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy

GROUP = "rotorch.strategies"

KIND = "[a-z][a-z0-9_]*"
"""Pattern of kinds."""


def with_installed(ours: Iterable[type[Strategy]]) -> dict[str, type[Strategy]]:
    """Returns strategies by kind: `ours`, then those of other packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no strategy, or has a kind that another one has.
    """
    found = {strategy.kind: strategy for strategy in ours}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else "?"
        said = f"the package {package} names the strategy {entry.name} = {entry.value!r}"
        try:
            strategy = entry.load()
        except Exception as error:
            raise ConfigError(f"{said}, which cannot be loaded: {error}. Fix it, or uninstall it") from error
        if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
            raise ConfigError(f"{said}, which is no subclass of rotorch.core.strategy.Strategy. Fix or uninstall it")
        if re.fullmatch(KIND, strategy.kind) is None:
            raise ConfigError(f"{said}, whose kind is {strategy.kind!r}. Write small letters, digits and underscores")
        if strategy.kind in found:
            raise ConfigError(f"{said}, but {strategy.kind!r} is there already. Give it another `kind`")
        if not strategy.held_by:
            raise ConfigError(f"{said}, which has no `held_by`. Name the module whose `apply` holds a model")
        found[strategy.kind] = strategy
    return found

"""Changes of `parallelize` in a module, which can be left out again: for a copy, and for adapters that come later.

What its user has changed since (hooks, attributes, parts that other libraries have put in) stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotorch.shard.sharded_weight import weight_of
from rotorch.shard.sites import find_sites

_MISSING = object()
_WEIGHTS = {"_parameters", "_flat_weights"}
"""Attributes with parameters: these go by sites, and what was there before is not kept alive."""


@dataclass
class _Seen:
    """A module's class, its attributes, and the entries of its tables of parts, buffers and hooks."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]

    @staticmethod
    def of(module: nn.Module) -> _Seen:
        attributes = vars(module).copy()
        tables = {key: value.copy() for key, value in attributes.items() if _is_table(key, value)}
        return _Seen(type(module), attributes, tables)

    def put_back(self, module: nn.Module) -> None:
        """Makes the module what was seen."""
        module.__class__ = self.kind
        vars(module).clear()
        vars(module).update(self.attributes)
        for key, entries in self.tables.items():
            self.attributes[key].clear()
            self.attributes[key].update(entries)


@dataclass
class _Change:
    """The difference between two looks at one module; of each entry what was there first, and what came to be."""

    kind: tuple[type[nn.Module], type[nn.Module]]
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tables: dict[str, dict[Any, tuple[Any, Any]]] = field(default_factory=dict)

    @staticmethod
    def between(before: _Seen, after: _Seen) -> _Change:
        tables = {
            key: _different(before.tables.get(key, {}), entries)
            for key, entries in after.tables.items()
            if key not in _WEIGHTS
        }
        attributes = _different(before.attributes, after.attributes)
        return _Change(
            (before.kind, after.kind),
            {key: pair for key, pair in attributes.items() if key not in _WEIGHTS and key not in before.tables},
            {key: entries for key, entries in tables.items() if entries},
        )

    def leave_out(self, module: nn.Module) -> None:
        """Takes the noted changes out of the module, if they are still as they were made."""
        first, then = self.kind
        if type(module) is then:
            module.__class__ = first
        _leave_out(vars(module), self.attributes)
        for key, entries in self.tables.items():
            if key in vars(module):
                _leave_out(vars(module)[key], entries)


class Changes:
    """Changes of `parallelize` in a module and its parts.

    Args:
        module: before anything is changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = {part: _Seen.of(part) for part in module.modules()}
        self._changes: dict[nn.Module, _Change] = {}
        self._without_cache: list[Any] = []

    def note(self, *, without_cache: Sequence[Any]) -> None:
        """Notes what has changed; once, when all of it has.

        Args:
            without_cache: modules and configurations whose `use_cache` was switched off.
        """
        self._without_cache = list(without_cache)
        self._changes = {part: _Change.between(seen, _Seen.of(part)) for part, seen in self._before.items()}
        self._before = {}

    @contextmanager
    def caches_on(self) -> Iterator[None]:
        """Within it, `use_cache` is on where it was before."""
        off = [owner for owner in self._without_cache if owner.use_cache is False]
        for owner in off:
            owner.use_cache = True
        try:
            yield
        finally:
            for owner in off:
                owner.use_cache = False

    def leave_out(self, module: nn.Module) -> Callable[[], None]:
        """Makes a module at rest as it would be without them, with weights on meta, in place.

        Args:
            module: the one that was changed.

        Returns:
            A function that makes it again what it was when this was called.
        """
        seen = {part: _Seen.of(part) for part in module.modules()}
        flat = [(v, v.copy()) for part in seen if isinstance(v := vars(part).get("_flat_weights"), list)]

        caches = ExitStack()
        caches.enter_context(self.caches_on())

        def put_back() -> None:
            caches.close()
            for part, looks in seen.items():
                looks.put_back(part)
            for weights, before in flat:
                weights[:] = before

        for sites in find_sites(module).values():
            parameter = sites[0].get()
            if parameter is not None and weight_of(parameter) is not None:
                plain = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
                )
                for site in sites:
                    site.put(plain)
        for part, change in self._changes.items():
            change.leave_out(part)
        return put_back


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and key.startswith("_")


def _different(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    pairs = {key: (before.get(key, _MISSING), after.get(key, _MISSING)) for key in (*before, *after)}
    return {key: (old, new) for key, (old, new) in pairs.items() if old is not new}


def _leave_out(entries: dict[Any, Any], changes: dict[Any, tuple[Any, Any]]) -> None:
    for key, (before, after) in changes.items():
        if entries.get(key, _MISSING) is not after:
            continue
        if before is _MISSING:
            del entries[key]
        else:
            entries[key] = before

"""Tensors within what modules take and return: containers of torch's pytree, and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rotorch._torch_private import tree_flatten, tree_unflatten


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with its tensors mapped, in order; `value` itself if none is changed."""
    leaves, tree = tree_flatten(value)
    changed = [_mapped_leaf(leaf, change) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return tree_unflatten(changed, tree)


def _mapped_leaf(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    found = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    changed = {name: mapped(value, change) for name, value in found.items()}
    if all(changed[name] is value for name, value in found.items()):
        return leaf
    other = copy.copy(leaf)
    for name, value in changed.items():
        object.__setattr__(other, name, value)
    return other

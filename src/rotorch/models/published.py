"""Conversion of a model's own tensors to those of a published checkpoint: the rules of loading, in reverse.

When transformers saves a model it reverses its conversions of names and experts (`models/conversions.py`), with the
whole model in memory. Here the same reversed rules map, on shapes alone, each tensor of a checkpoint to the model's
tensors that it is made of, so that tensors can be written one after another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.models.conversions import bare, is_pretrained, named_as_in_model
from rotorch.shard.stored import Box, Stored

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """Tensors as a family's checkpoints have them, made of some tensors of the model.

    Attributes:
        sources: names in the model; mostly one.
        shapes: of what is made, by name.
        make: makes them of the sources' values; where a tensor is only taken apart, views of it.
    """

    sources: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]


def as_published(held: Mapping[str, Tensor], *, module: nn.Module) -> list[Published]:
    """Returns how a model's tensors become those of a published checkpoint, as transformers saves them.

    Args:
        held: the model's tensors by name, on meta.
        module: the model, on meta. Of one that is not transformers' own, or whose rules cannot be reversed, tensors
            are published as they are, and the latter is logged.
    """
    as_they_are = [_unchanged(name, name, tensor) for name, tensor in held.items()]
    if not is_pretrained(module):
        return as_they_are
    try:
        made = _reversed(held, model=bare(module))
    except Exception as error:  # what has no way back says so in many ways
        _log.warning("%s (%s: %s)", _as_here(module), type(error).__name__, error)
        return as_they_are
    # What is written must be read again as what it was.
    stubs = {name: _Stub(shape) for each in made for name, shape in each.shapes.items()}
    again = named_as_in_model(stubs, module=module, names=held.keys())
    shapes = {name: tuple(again[name].shape) for name in again}
    wanted = {name: tuple(tensor.shape) for name, tensor in held.items()}
    if shapes != wanted:
        other = next(name for name in [*wanted, *shapes] if shapes.get(name) != wanted.get(name))
        _log.warning("%s (%r would not be read again)", _as_here(module), other)
        return as_they_are
    return made


def _as_here(module: nn.Module) -> str:
    return (
        f"export: {type(bare(module)).__name__}: tensors are written under the model's own names and in its shapes, "
        "not as its family publishes them"
    )


def _reversed(held: Mapping[str, Tensor], *, model: Any) -> list[Published]:
    """The rules of loading from the last to the first, each the other way round: conversions, then renamings."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    rules = [r for r in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(r, PrefixChange)]
    back = [rule.reverse_transform() for rule in rules[::-1]]
    converters = [rule for rule in back if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in back if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    made: list[Published] = []
    groups: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(held, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            made.append(_unchanged(name, apply_renamings(name, renamings), held[name]))
        else:
            _, sources = groups.setdefault(target, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(name)
    for target, (converter, sources) in groups.items():
        made.append(_taken_apart(target, converter, sources, held, model=model, renamings=renamings))
    return made


def _unchanged(name: str, published: str, tensor: Tensor) -> Published:
    return Published((name,), {published: tuple(tensor.shape)}, lambda values: {published: values[0]})


def _taken_apart(
    target: str,
    converter: Any,
    sources: Mapping[str, list[str]],
    held: Mapping[str, Tensor],
    *,
    model: Any,
    renamings: Sequence[Any],
) -> Published:
    """Returns the tensors that a reversed conversion makes of its sources (patterns, names), by views if it splits."""
    from transformers.core_model_loading import apply_renamings

    names = tuple(name for those in sources.values() for name in those)

    def convert(values: Sequence[Tensor]) -> dict[str, Tensor]:
        rule, given = deepcopy(converter), iter(values)
        for pattern, those in sources.items():
            for name in those:
                rule.add_tensor(target, name, pattern, next(given))
        made = rule.convert(target, model=model, config=model.config)
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {apply_renamings(name, renamings): tensor for name, tensor in tensors.items()}

    on_meta = convert([held[name] for name in names])
    shapes = {name: tuple(tensor.shape) for name, tensor in on_meta.items()}
    if len(names) == 1:
        split = partial(_parts, operations=converter.operations, number=len(shapes))
        if [tuple(part.shape) for part in split(held[names[0]])] == list(shapes.values()):
            return Published(names, shapes, lambda values: dict(zip(shapes, split(values[0]), strict=True)))
    return Published(names, shapes, convert)


def _parts(tensor: Tensor, operations: Sequence[Any], number: int) -> list[Tensor]:
    """The `number` views of a tensor that splitting and unstacking give, in their order; [] if there is more to it."""
    kinds = [type(operation).__name__ for operation in operations]
    if not set(kinds) <= {"Chunk", "SplitModulelist"} or kinds.count("Chunk") > 1:
        return []
    unstacked = 1
    for operation in operations:
        if type(operation).__name__ == "SplitModulelist":
            unstacked *= tensor.shape[operation.dim]
    parts = [tensor]
    for operation in operations:
        if type(operation).__name__ == "Chunk":
            parts = [chunk for part in parts for chunk in part.chunk(number // unstacked, dim=operation.dim)]
        else:
            parts = [one for part in parts for one in part.unbind(operation.dim)]
    return parts


class _Stub(Stored):
    """A tensor without readers."""

    dtype = torch.float32

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def read(self, box: Box, *, out: Tensor) -> None:
        raise AssertionError("only its shape is asked for")

"""Mapping of a checkpoint's names to the model's own, by the rules that transformers applies when it loads.

Checkpoints are older than the code that reads them: a family's modules get new names, a base model is published without
the prefix it has in a task's model, experts that are stored one by one are one tensor in the model. transformers keeps
these rules as data (`conversion_mapping.py`): renamings, and conversions of several tensors into one or one into
several. Here the same rules name the tensors of a file without reading them. Experts are stacked and matrices joined
box by box, so a rank reads only its own boxes; other, rarer conversions read their whole tensor first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rotorch.shard.stored import Computed, Joined, Stacked, Stored


def named_as_in_model(stored: Mapping[str, Stored], *, module: nn.Module, names: Collection[str]) -> dict[str, Stored]:
    """Returns a checkpoint's tensors by the names that the model has for them.

    Args:
        stored: the tensors by the names in the file.
        module: the model; one that is not transformers' own gets its tensors as they are named.
        names: all names that the model knows, of tied weights too.

    What no rule leads to one of `names` keeps the name that it has in the file.
    """
    if not is_pretrained(module):
        return dict(stored)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    model = bare(module)
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(names, True)
    result: dict[str, Stored] = {}
    groups: dict[str, tuple[Any, dict[str, list[Stored]]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:  # it has its new name already
            renamed, pattern = name, None
        if renamed not in known:
            result[name] = stored[name]
        elif pattern is None:
            result[renamed] = stored[name]
        else:
            _, sources = groups.setdefault(renamed, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(stored[name])
    for target, (converter, sources) in groups.items():
        result |= _converted(target, converter, sources, model=model)
    return result


def is_pretrained(module: nn.Module) -> bool:
    """True if the module is a model of transformers."""
    return hasattr(module, "base_model_prefix") and hasattr(module, "config")


def ignored_when_loaded(module: nn.Module, names: Collection[str]) -> list[str]:
    """Returns the names that a checkpoint may have and the model lacks, by the ignore patterns of the model's class."""
    patterns = [re.compile(p) for p in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unsaved = {name for name, _ in module.named_buffers()}  # kept in files of a time when they were parameters
    return [name for name in names if name in unsaved or any(p.search(name) for p in patterns)]


def bare(module: nn.Module) -> Any:
    """Returns an instance like the model on meta, without a strategy's changes.

    Rules go by the names of classes, and `fully_shard` gives modules other ones.
    """
    kind = next(k for k in type(module).__mro__ if not issubclass(k, FSDPModule))
    try:
        with torch.device("meta"):
            return kind(deepcopy(module.config))
    except Exception:  # a constructor of the user's own, with other arguments
        return module


def _converted(target: str, converter: Any, sources: dict[str, list[Stored]], *, model: Any) -> dict[str, Stored]:
    """Returns the tensors that a conversion makes of its sources, by name; shapes come from converting meta tensors."""

    def convert(make: Any) -> dict[str, Tensor]:
        rule = deepcopy(converter)
        for pattern, parts in sources.items():
            for part in parts:
                rule.add_tensor(target, target, pattern, make(part))
        made = rule.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    made = convert(lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta"))
    if len(made) == 1:
        ((name, on_meta),) = made.items()
        put_together = _put_together(converter, sources)
        if put_together is not None and put_together.shape == tuple(on_meta.shape):
            return {name: put_together}
    return {
        name: Computed(on_meta.shape, on_meta.dtype, lambda name=name: convert(Stored.read_whole)[name])
        for name, on_meta in made.items()
    }


def _put_together(converter: Any, sources: Mapping[str, list[Stored]]) -> Stored | None:
    """Converts part by part, if the conversion only stacks and joins; else returns None."""
    parts = {pattern: list(sources[pattern]) for pattern in converter.source_patterns if pattern in sources}
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            parts = {pattern: [Stacked(those, dim=operation.dim)] for pattern, those in parts.items()}
        elif kind == "Concatenate":
            parts = {"": [Joined([part for those in parts.values() for part in those], dim=operation.dim)]}
        else:
            return None
    (those,) = parts.values() if len(parts) == 1 else ([],)
    return those[0] if len(those) == 1 else None

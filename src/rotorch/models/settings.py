"""Settings of a model that are no weights, which all ranks must have alike: each computes its part of one model."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_NOT_THE_MODEL = frozenset(
    {
        *("transformers_version", "peft_version", "name_or_path", "base_model_name_or_path", "auto_map"),
        *("auto_mapping", "revision", "inference_mode"),
        *("architectures", "torch_dtype", "dtype"),  # from_pretrained writes them; weights are compared by dtype
        *("use_cache", "problem_type"),  # switched off in training; found in the first forward
        *("return_dict", "output_hidden_states", "output_attentions"),  # of what one rank may log
    }
)
"""Entries of a configuration that ranks may have differently, beside those that begin with an underscore."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEVICE = re.compile(r"\b(cuda:|GPU )\d+")
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_CHARACTERS = 1000


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Returns the settings of a model as plain JSON, by name: entries of its configurations, and a line per module.

    Modules say what they are in `extra_repr`: epsilons, probabilities, activations.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, child in module.named_modules():
        found[f"the module {name}" if name else "the outermost module"] = _line_of(child)
        for title, config in _configs(child):
            if id(config) not in seen:
                seen |= _with_inner(config)
                of = f" of {name}" if name else ""
                found |= {f"{title}{key}{of}": value for key, value in _entries(_plain(config))}
    return found


def _line_of(module: nn.Module) -> str:
    """The module's own line of `repr(module)`, without its parts, and without what differs between processes."""
    try:
        whole = type(module).__repr__ is not nn.Module.__repr__ and next(module.children(), None) is None
        text = repr(module) if whole else f"{module._get_name()}({module.extra_repr()})"
    except Exception:  # code of others, which may need values that are not there yet
        text = f"{module._get_name()}"
    return _scrubbed(text)


def _scrubbed(text: str) -> str:
    """A text without addresses and numbers of devices, and with sets, whose order is a process's own, in order."""
    if "0x" in text:
        text = _ADDRESS.sub("", text)
    if "cuda:" in text or "GPU" in text:
        text = _DEVICE.sub(r"\1", text)
    if "{" in text:
        text = _BRACES.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
    return " ".join(text.split())[:_MOST_CHARACTERS]


def _configs(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configurations of transformers, diffusers and peft that a module carries, each with the title of its keys."""
    attributes = vars(module)
    for key in ("config", "_internal_dict"):  # diffusers has its own there
        config = attributes.get(key)
        if isinstance(config, Mapping) or hasattr(config, "to_dict"):
            yield "config.", config
    adapters = attributes.get("peft_config")
    for name, config in adapters.items() if isinstance(adapters, Mapping) else ():
        yield f"peft_config.{name}.", config


def _with_inner(config: Any) -> set[int]:
    """The ids of a configuration and of those inside of it, whose entries are its own, too."""
    inner = [value for value in getattr(config, "__dict__", {}).values() if hasattr(value, "to_dict")]
    return {id(config)}.union(*map(_with_inner, inner))


def _entries(config: Any, *, before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration, those of tables in it by their path."""
    for key, value in config.items():
        if key.startswith("_") or key in _NOT_THE_MODEL:
            continue
        if isinstance(value, dict) and value:
            yield from _entries(value, before=f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _plain(value: Any) -> Any:
    """A value as plain JSON, the same for the same on all ranks."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value if math.isfinite(value) else str(value)
    if not isinstance(value, type) and hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(each) for each in value), key=json.dumps)
    return _scrubbed(str(value))

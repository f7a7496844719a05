"""Declarations of Hugging Face models about themselves: tensor-parallel plans, tied weights, limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rotorch.core.errors import ConfigError, beginning_of, nearest
from rotorch.core.small_files import read_small
from rotorch.models.configuration import built, check_keys, check_sizes, check_values
from rotorch.models.gguf import config_of_gguf, find_gguf
from rotorch.models.lora import with_base_layers

_MOST_BYTES = 1 << 24

Plan = Mapping[str, str]
"""Name patterns of modules or parameters (`*` stands for one name part) to roles.

`colwise`, `rowwise`, `packed_colwise`, ...
"""


def tensor_parallel_plan(module: nn.Module) -> dict[str, str]:
    """Returns the plan that a Hugging Face model declares, with the embedding and the head added.

    {} for other modules.
    """
    plan = dict(getattr(module, "tp_plan", None) or {})
    if not plan or not hasattr(module, "get_input_embeddings"):
        return plan
    names = {child: name for name, child in module.named_modules()}
    for child, role in ((_embedding(module), "embedding_rowwise"), (_head(module), "colwise_gather_output")):
        if isinstance(child, nn.Embedding | nn.Linear) and names.get(child):
            plan.setdefault(names[child], role)
    return with_base_layers(plan, module)


def _embedding(module: nn.Module) -> nn.Module | None:
    try:
        return module.get_input_embeddings()
    except NotImplementedError:  # what takes images has none
        return None


def _head(module: nn.Module) -> nn.Module | None:
    return module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None


def head_weights(module: nn.Module) -> set[str]:
    """Names under which the weight (and bias) of a language-model head is found; none for other modules."""
    head = _head(module)
    names = {name for name, child in module.named_modules() if child is head and head is not None}
    return {f"{name}.{parameter}" for name in names for parameter in ("weight", "bias")}


def load_config(path: str | Path) -> Any:
    """Reads a Hugging Face configuration: a `config.json`, a directory that has one, or a GGUF file.

    Raises:
        ConfigError: the file is missing, is not JSON, or names a model type that transformers does not know.
    """
    from transformers import CONFIG_MAPPING

    file = Path(path)
    if (gguf := find_gguf(file)) is not None:
        return config_from_dict(config_of_gguf(gguf), source=str(gguf), known=CONFIG_MAPPING, checks_keys=False)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        raise ConfigError(f"model: no {str(file)!r}. Write the path of a Hugging Face config.json or of its directory")
    try:
        values = json.loads(read_small(file, most_bytes=_MOST_BYTES, what="a model's config.json"))
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"model: {str(file)!r} is not readable JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"model: {str(file)!r} has no 'model_type'. Write a Hugging Face config.json")
    return config_from_dict(values, source=str(file), known=CONFIG_MAPPING)


def config_from_dict(
    values: Mapping[str, Any], *, source: str, known: Any = None, is_own: bool = False, checks_keys: bool = True
) -> Any:
    """Makes a Hugging Face configuration from the contents of a `config.json`.

    Args:
        values: the contents.
        source: of them, named in errors.
        known: transformers' configuration classes, by model type; looked up if left out.
        is_own: the user has written them into the run's own file: every key must be one that the class knows.
        checks_keys: look at keys at all; not at what a program has written.

    Raises:
        ConfigError: no such model type, a key that the class does not know, or values that cannot be.
    """
    if known is None:
        from transformers import CONFIG_MAPPING as known
    model_type = values.get("model_type")
    if model_type not in known:
        raise ConfigError(
            f"model: {source}: transformers knows no model_type {model_type!r}"
            f"{nearest(str(model_type), known=list(known.keys())) if model_type else ''}"
        )
    make = known[model_type].from_dict
    check_sizes(values, aliases=getattr(known[model_type], "attribute_map", {}), source=source)
    try:
        config = make(dict(values))
    except Exception as error:
        raise ConfigError(f"model: {source} is not a valid {model_type} configuration: {beginning_of(error)}") from None
    if checks_keys:
        check_keys(values, config=config, make=make, source=source, is_own=is_own)
    check_values(config, source=source)
    return config


def causal_lm(config: Any) -> nn.Module:
    """Builds a causal language model from its configuration, in the current device context.

    Raises:
        ConfigError: if the architecture has no causal language-model head, or its constructor refuses a value.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model: {config.model_type!r} has no causal language-model head in transformers. "
            "Write a decoder's configuration"
        )
    return built(lambda: AutoModelForCausalLM.from_config(config), config=config)


def longest_sequence(config: Any) -> int | None:
    """The longest sequence that the model's positions allow, or None if it does not say."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text_config, "max_position_embeddings", None)

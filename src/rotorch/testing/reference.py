"""The model on one process, without any part of rotorch in its passes: what every layout is held against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.core.spec import ModelSpec
from rotorch.models.hf import config_from_dict, load_config
from rotorch.parallel_model import LossFn, causal_lm_loss, count_targets
from rotorch.shard.held import HeldWeight, cut_pieces
from rotorch.shard.materialize import Recipe, initialise
from rotorch.testing.arithmetic import widen


def plain_config(path: str | Path, *, layers: int | None = None) -> Any:
    """Reads a configuration for a comparison: without dropout and jitter, which differ per process; shallower if asked.

    Args:
        path: a `config.json`, or a directory that has one.
        layers: keep only the first so many layers.

    Raises:
        ConfigError: as `load_config`.
    """
    config = load_config(path)
    if layers is not None:
        config = _with_layers(config, path, layers=layers)
    text_config = config.get_text_config()
    for each in {id(c): c for c in (config, text_config)}.values():
        for key, value in list(vars(each).items()):
            if isinstance(value, float) and any(word in key for word in ("dropout", "pdrop", "jitter")):
                setattr(each, key, 0.0)
    return config


def _with_layers(config: Any, path: str | Path, *, layers: int) -> Any:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = json.loads(file.read_text())
    key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    kept = min(layers, config.get_text_config().num_hidden_layers)
    nested = next((v for v in values.values() if isinstance(v, dict) and key in v), values)
    nested[key] = kept
    if isinstance(nested.get("layer_types"), list):
        nested["layer_types"] = nested["layer_types"][:kept]
    return config_from_dict(values, source=str(file))


def has_weights(path: str | Path) -> bool:
    """Whether `path` is a directory with weights in it, beside a configuration."""
    return Path(path).is_dir() and any(Path(path).glob("*.safetensors"))


def loaded_reference(path: str | Path, *, config: Any) -> nn.Module:
    """The model of a directory as transformers loads it, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float64, local_files_only=True).train()


def initialised_reference(module: nn.Module, *, spec: ModelSpec, recipes: Mapping[str, Recipe], seed: int) -> nn.Module:
    """A model in float64, with the initial values of `ParallelModel.materialize(seed=seed)`."""
    module = widen(module).train()
    fill(module, spec=spec, recipes=recipes, seed=seed)
    return module


def fill(module: nn.Module, *, spec: ModelSpec, recipes: Mapping[str, Recipe], seed: int) -> None:
    """Gives a plain module the values that `ParallelModel.materialize(seed=seed)` gives, each weight in one piece."""
    parameters = dict(module.named_parameters())
    held = {
        weight.name: HeldWeight(
            weight,
            parameters[weight.name].detach(),
            cut_pieces(weight, num_slices=1, index=0),
            parameters[weight.name],
        )
        for weight in spec.weights
    }
    initialise(held, recipes=recipes, seed=seed)


def reference_step(module: nn.Module, batch: Mapping[str, Tensor], *, loss: LossFn = causal_lm_loss) -> Tensor:
    """Forward and backward of a whole global batch at once; returns the loss per target.

    With the model's own loss it is left to the model to count targets.
    """
    module.zero_grad()
    if loss is causal_lm_loss:
        value = module(**batch, use_cache=False).loss
    else:
        value = loss(module, batch, count_targets(batch))
    value.backward()
    return value.detach()

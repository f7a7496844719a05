"""The model on one process, without any part of rotorch in its passes: what every layout is held against."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.core.spec import ModelSpec
from rotorch.models.hf import config_from_dict, load_config
from rotorch.models.losses import LossFn, count_targets
from rotorch.models.pretrained import load_pretrained
from rotorch.shard.materialize import Recipe, initialise
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.shard.sites import persistent_buffers
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
    """True if `path` is a directory with weights in it, beside a configuration."""
    return Path(path).is_dir() and any(Path(path).glob("*.safetensors"))


def loaded_reference(path: str | Path, *, module: nn.Module, spec: ModelSpec) -> nn.Module:
    """The model of a directory as transformers loads it, in float64, after ranks' own loading has found it well.

    Args:
        path: the directory.
        module: a causal language model with its configuration, on meta.
        spec: its weights.

    Raises:
        ConfigError: what `ParallelModel.load` says of it.
    """
    from transformers import AutoModelForCausalLM

    # Before ranks start; and transformers waits for a pipe, and has other words for what is damaged.
    values = {w.name: torch.empty(w.shape, dtype=torch.float64) for w in spec.weights}
    load_pretrained(
        path, module=module, weights=_whole(spec, values), buffers=copy.deepcopy(persistent_buffers(module))
    )
    del values
    config = module.config
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float64, local_files_only=True).train()


def initialised_reference(module: nn.Module, *, spec: ModelSpec, recipes: Mapping[str, Recipe], seed: int) -> nn.Module:
    """A model in float64, with the initial values of `ParallelModel.materialize(seed=seed)`."""
    module = widen(module).train()
    fill(module, spec=spec, recipes=recipes, seed=seed)
    return module


def fill(module: nn.Module, *, spec: ModelSpec, recipes: Mapping[str, Recipe], seed: int) -> None:
    """Gives a plain module the values that `ParallelModel.materialize(seed=seed)` gives, each weight in one piece."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    initialise(_whole(spec, parameters), recipes=recipes, seed=seed)


def _whole(spec: ModelSpec, values: Mapping[str, Tensor]) -> dict[str, ShardedWeight]:
    """Weights in one piece, with the memory of `values`."""
    return {
        w.name: ShardedWeight(
            w, values[w.name], cut_chunks(w, num_slices=1, index=0), nn.Parameter(values[w.name], requires_grad=False)
        )
        for w in spec.weights
    }


def reference_step(
    module: nn.Module, batch: Mapping[str, Tensor], *, loss: LossFn | None = None, num_parts: int = 1
) -> Tensor:
    """Forward and backward of a whole global batch at once; returns the loss per target.

    With the model's own loss (None) it is left to the model to count targets. Only a router's auxiliary loss, which is
    no sum over rows, is that of the micro-batches, weighted with their shares of the targets.

    Args:
        module: the model.
        batch: the global batch.
        loss: as `parallelize` takes it.
        num_parts: micro-batches of all ranks, of which a router's loss is taken one by one.
    """
    module.zero_grad()
    if loss is not None:
        value = loss(module, batch, count_targets(batch))
    elif num_parts > 1 and _has_router_loss(module):
        return _step_by_parts(module, batch, num_parts=num_parts)
    else:
        cached = {"use_cache": False} if hasattr(module.config, "use_cache") else {}
        value = module(**batch, **cached).loss
    value.backward()
    return value.detach()


def _has_router_loss(module: nn.Module) -> bool:
    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
    return bool(getattr(config, "output_router_logits", False))


def _step_by_parts(module: nn.Module, batch: Mapping[str, Tensor], *, num_parts: int) -> Tensor:
    with torch.no_grad():
        module(**batch, use_cache=False)  # the pass that is held against all others, module by module
    total, num_targets = torch.zeros((), dtype=torch.float64), count_targets(batch)
    chunks = {name: rows.chunk(num_parts) for name, rows in batch.items()}
    for number in range(num_parts):
        part = {name: rows[number] for name, rows in chunks.items()}
        output = module(**part, use_cache=False, num_items_in_batch=num_targets)
        targets = torch.nn.functional.pad(part["labels"], (0, 1), value=-100)[:, 1:]
        of_text = torch.nn.functional.cross_entropy(
            output.logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        of_text = of_text / num_targets
        value = of_text + (output.loss - of_text) * (count_targets(part) / num_targets)
        value.backward()
        total += value.detach().double()
    return total

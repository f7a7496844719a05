"""LoRA (Hu et al., arXiv 2106.09685): small trained matrices beside frozen weights, by the package `peft`.

The frozen weights are held and move as they do without adapters, but layer by layer; adapters are so small that every
rank has them whole, and their gradients are summed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rotorch.core.errors import ConfigError, nearest

ADAPTERS = ("*.lora_A.*", "*.lora_B.*")
"""Name patterns of what LoRA adds to a model."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files that peft keeps adapters in."""

_BASE = ".base_layer"
_NAME = "default"


def add_lora(
    module: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
) -> nn.Module:
    """Puts adapters beside linear layers of `module`, in place, freezes all else, and returns it.

    Call it before `parallelize`; under `rotorch.on_meta()` for a model that is built there. A new adapter adds nothing:
    one of its two matrices is zero.

    Args:
        module: a model of transformers.
        rank: inner width of the adapters.
        alpha: adapters' output is scaled by `alpha / rank`; twice the rank by default.
        dropout: share of an adapter's inputs that are dropped in training.
        targets: last parts of the names of the layers: `["q_proj", "v_proj"]`; by default all linear layers but the
            head.

    Raises:
        ConfigError: the package is missing, a rank below 1, or a target that names no linear layer of the model.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank {rank}: an adapter needs a positive inner width. Write rank=8, for example")
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise ConfigError("lora: needs the package peft. Write pip install 'rotorch[lora]'") from None
    layers = _linear_layers(module)
    for target in targets or ():
        _check_target(target, module=module, layers=layers)
    chosen = sorted(_chosen(targets, module=module, layers=layers))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha_of(alpha, rank=rank),  # type: ignore[arg-type]  # peft divides by the rank
        lora_dropout=dropout,
        target_modules=chosen,  # whole names: of shorter ones peft makes adapters of stacked experts, too
        fan_in_fan_out=any(not isinstance(layer, nn.Linear) for layer in layers.values()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it asks models for what transformers no longer likes
            warnings.simplefilter("ignore", RuntimeWarning)  # of what it did not find: looked at below
            module = inject_adapter_in_model(config, module, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"lora: targets {targets and list(targets)}: {error}") from None
    adapted = sorted(name for name, layer in module.named_modules() if isinstance(layer, LoraLayer))
    if adapted != chosen:
        other = sorted(set(adapted) ^ set(chosen))
        fine = sorted({n.rpartition(".")[2] for n in chosen} - {n.rpartition(".")[2] for n in other})
        raise ConfigError(
            f"lora: of a {type(module).__name__} peft takes {other[0].rpartition('.')[2]!r} for its experts, which are "
            f"no linear layers, and would put adapters elsewhere. Write lora.targets={fine} or some of these"
        )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return module


_ALIKE_ON_PARTS = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("peft_type", "peft_version", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora"),
}
"""Keys of peft's `LoraConfig` for which adapters can be made without the values of the weights beside them."""


def put_adapters_in_again(module: nn.Module, configs: Mapping[str, Any]) -> None:
    """Replaces adapters that peft has made of the ranks' parts of weights by those of whole weights, in place.

    peft takes a DTensor for a layer that is computed in parts. New adapters begin as peft begins them; those of
    half precision become float32, as `peft.get_peft_model` does it by default.

    Args:
        module: the model, with plain weights of whole shapes. Their values are not read.
        configs: peft's, by the adapters' names.

    Raises:
        ConfigError: adapters that are no plain LoRA.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype

    for name, config in configs.items():
        default = LoraConfig()
        other = [] if type(config) is LoraConfig else ["peft_type"]
        other += [key for key, value in vars(default).items() if getattr(config, key, value) != value]
        first = next((key for key in other if key == "peft_type" or key not in _ALIKE_ON_PARTS), None)
        if first is None and config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
            first = "init_lora_weights"
        if first is not None:
            raise ConfigError(
                f"adapter {name!r}: {first}={getattr(config, first)!r}: into a model that is spread over ranks only "
                "plain LoRA can be put. Call peft.get_peft_model before parallelize"
            )
    for name, part in list(module.named_modules()):
        if isinstance(part, BaseTunerLayer):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, part.get_base_layer())
    for name, config in configs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as in `add_lora`
            inject_adapter_in_model(config, module, adapter_name=name)
        cast_adapter_dtype(module, adapter_name=name, autocast_adapter_dtype=True)


def alpha_of(alpha: float | None, *, rank: int) -> float:
    """Returns `alpha`, or its default: adapters add twice their product."""
    return 2 * rank if alpha is None else alpha


def _chosen(targets: Sequence[str] | None, *, module: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """Names of the layers that get adapters: all but the head, or layers whose names end in `targets`."""
    if targets is None:
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        return [name for name, layer in layers.items() if layer is not head]
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in targets)]


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D  # a linear layer with the inputs first, as GPT-2 has it

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear | Conv1D)}


def _check_target(target: str, *, module: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises `ConfigError` unless a target ends names of linear layers, and of nothing else; the head takes none."""
    named = {name: child for name, child in module.named_modules() if f".{name}".endswith(f".{target}")}
    other = next((name for name in named if name not in layers), None)
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if not named:
        known = sorted({name.rpartition(".")[2] for name, layer in layers.items() if layer is not head})
        raise ConfigError(
            f"lora: target {target!r} names no layer of {type(module).__name__}{nearest(target, known=known)}. "
            f"Its linear layers are {', '.join(known)}"
        )
    if other is not None:
        raise ConfigError(
            f"lora: target {target!r} names {other!r}, a {type(named[other]).__name__}; adapters go beside linear "
            "layers. Write the last parts of such layers' names"
        )
    if head is not None and any(child is head for child in named.values()):
        raise ConfigError(
            f"lora: target {target!r} is the head, which is computed with the loss, a slice at a time, and takes no "
            "adapter. Leave it out"
        )


def base_of(module: nn.Module) -> tuple[str, nn.Module]:
    """The model that `peft.get_peft_model` has wrapped, and its name in `module`; any other module, and ""."""
    if not is_wrapped(module):
        return "", module
    base: nn.Module = module.get_base_model()
    return next(name for name, child in module.named_modules() if child is base), base


def is_wrapped(module: nn.Module) -> bool:
    """True if `peft` has wrapped a model in a module of its own."""
    return any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)


def saved_names(module: nn.Module, *, save_embedding_layers: bool | str = "auto", **_: Any) -> Callable[[str], bool]:
    """True if `module.save_pretrained` may write a weight: of a wrapped model, not the frozen ones.

    Args:
        module: the model.
        save_embedding_layers: peft's argument; unless it is False, peft looks whether embeddings are to be written.
    """
    if not is_wrapped(module):
        return lambda name: True
    of_embeddings: set[int] = set()
    if save_embedding_layers is not False:
        layers = (module.get_input_embeddings(), module.get_output_embeddings())
        of_embeddings = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    named = module.named_parameters(remove_duplicate=False)
    left = {name for name, p in named if not p.requires_grad and id(p) not in of_embeddings}
    return lambda name: name not in left or ".lora_" in name or ".modules_to_save." in name


def is_adapter(name: str) -> bool:
    """True if a weight is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def without_adapters(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(f"{_BASE}.", ".")


def with_base_layers(plan: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """Returns a plan that also names the frozen layers inside of adapted ones."""
    if not any(f"{_BASE}." in name for name, _ in module.named_parameters()):
        return dict(plan)
    return {**plan, **{pattern + _BASE: role for pattern, role in plan.items()}}


def adapter_config(module: nn.Module) -> dict[str, Any] | None:
    """Returns the contents of peft's `adapter_config.json`, as plain JSON; None for a module without adapters."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or _NAME not in configs:
        return None
    config = {key: sorted(v) if isinstance(v, set) else v for key, v in configs[_NAME].to_dict().items()}
    return dict(json.loads(json.dumps(config)))


def adapter_scale(config: Mapping[str, Any]) -> float:
    """Factor of the adapters' output, by the result of `adapter_config`."""
    return float(config["lora_alpha"] / config["r"])


def name_in_peft(name: str) -> str:
    """The name that `peft` has for an adapter's weight in its files."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def adapters_of(name: str) -> tuple[str, str] | None:
    """The names of the two matrices beside a frozen weight, A [rank, in] and B [out, rank]; None of any other.

    Args:
        name: of a weight in a model with adapters.
    """
    layer, base, last = name.rpartition(f"{_BASE}.")
    return (f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight") if base and last == "weight" else None


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, *, config: Mapping[str, Any]) -> Tensor:
    """Returns a layer's weight merged with its adapter, as `peft` computes it; unchanged to the bit if that adds 0.

    Args:
        weight: [out, in], or [in, out] of layers that keep their inputs first.
        a: [rank, in].
        b: [out, rank].
        config: what `adapter_config` returned.
    """
    added = (b @ a) * adapter_scale(config)
    if config["fan_in_fan_out"]:
        added = added.T
    return torch.where(added == 0, weight, weight + added)  # -0.0 + 0.0 is another 0.0


def save_lora(module: nn.Module, directory: str | Path, *, values: Mapping[str, Tensor]) -> None:
    """Writes adapters as `peft` does, for `PeftModel.from_pretrained(base, directory)`. One rank.

    Args:
        module: what `add_lora` returned.
        directory: where to; made if need be.
        values: whole weights by name, e.g. `{n: model.full_tensor(n) for n in model.weights if is_adapter(n)}`, which
            all ranks must gather.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {
        name_in_peft(name): value.detach().contiguous().cpu() for name, value in values.items() if is_adapter(name)
    }
    save_file(adapters, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(module), indent=2) + "\n", "utf-8")

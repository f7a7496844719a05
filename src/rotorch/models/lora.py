"""LoRA (Hu et al., arXiv 2106.09685): small trained matrices beside frozen weights, by the package `peft`.

The frozen weights are held and move as they do without adapters, but layer by layer; adapters are so small that every
rank has them whole, and their gradients are summed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from rotorch.core.errors import ConfigError

ADAPTERS = ("*.lora_A.*", "*.lora_B.*")
"""Name patterns of what LoRA adds to a model."""

_BASE = ".base_layer"
_NAME = "default"


def add_lora(module: nn.Module, *, rank: int, alpha: float | None = None, targets: Sequence[str]) -> nn.Module:
    """Puts adapters beside linear layers of `module`, in place, freezes all else, and returns it.

    Call it before `parallelize`; under `rotorch.on_meta()` for a model that is built there.

    Args:
        module: a model of transformers.
        rank: inner width of the adapters.
        alpha: adapters' output is scaled by `alpha / rank`; twice the rank by default.
        targets: last parts of the names of the layers: `["q_proj", "v_proj"]`.

    Raises:
        ConfigError: the package is missing, a rank below 1, or targets that the model does not have.
    """
    if rank < 1:
        raise ConfigError(f"lora: rank {rank}: an adapter needs a positive inner width. Write rank=8, for example")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("lora: needs the package peft. Write pip install 'rotorch[lora]'") from None
    try:
        config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(targets))
        module = inject_adapter_in_model(config, module, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"lora: targets {list(targets)}: {error}") from None
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return module


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def without_adapters(name: str) -> str:
    """The name that a weight has in the model without adapters."""
    return name.replace(f"{_BASE}.", ".")


def with_base_layers(plan: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """A plan that names the frozen layers, too, where adapters stand in their places."""
    if not any(f"{_BASE}." in name for name, _ in module.named_parameters()):
        return dict(plan)
    return {**plan, **{pattern + _BASE: role for pattern, role in plan.items()}}


def save_lora(module: nn.Module, directory: str | Path, *, values: Mapping[str, Tensor]) -> None:
    """Writes adapters as `peft` does, for `PeftModel.from_pretrained(base, directory)`. One rank.

    Args:
        module: what `add_lora` returned.
        directory: where to; made if need be.
        values: whole weights by name, e.g. `{n: model.full_tensor(n) for n in model.weights if is_adapter(n)}`, which
            all ranks must gather.
    """
    config: Any = module.peft_config[_NAME]  # type: ignore[index,union-attr]
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": value.detach().contiguous().cpu()
        for name, value in values.items()
        if is_adapter(name)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2) + "\n", "utf-8")

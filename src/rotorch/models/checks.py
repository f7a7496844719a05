"""State that models keep from one forward to the next: made harmless, or refused by name.

A forward may run more often than once per micro-batch (on every slice, or again in backward), and on every rank with
other data. State that it leaves behind then counts too often, or differs between ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.models.lora import is_wrapped


def make_stateless(module: nn.Module, *, num_ranks: int, device_type: str) -> list[Any]:
    """Switches off caches that training does not use; refuses modules that cannot be trained as they are. In place.

    Args:
        module: the model.
        num_ranks: how many ranks the job has.
        device_type: kind of the devices that it runs on.

    Returns:
        Modules and configurations whose `use_cache` was on.

    Raises:
        ConfigError: a layer that rewrites its weights in forward, differently on every rank; an attention that torch
            has no backward for.
    """
    without_cache: list[Any] = []
    for name, child in module.named_modules():
        for owner in (child, *_configs(child)):
            if getattr(owner, "use_cache", None) is True:  # it would be appended to once per slice
                owner.use_cache = False  # type: ignore[attr-defined]
                without_cache.append(owner)
            if device_type == "cpu" and getattr(owner, "_attn_implementation", None) == "flex_attention":
                raise ConfigError(
                    f"{type(child).__name__}: flex_attention has no backward on cpu in torch. Write "
                    "attn_implementation='sdpa' or 'eager'"
                )
        if num_ranks > 1 and getattr(child, "max_norm", None) is not None and isinstance(child, _LOOKUPS):
            raise ConfigError(
                f"{name!r} has max_norm={child.max_norm}: its forward rewrites the rows that it looks up, on each rank "
                "others, and the ranks' weights would part. Leave max_norm out, or norm rows between steps"
            )
    return without_cache


def refuse_layerdrop(module: nn.Module) -> None:
    """Raises `ConfigError` for a model whose ranks would leave out different layers: they exchange weights by layers.

    Layers are left out by chance in training. Ranks that draw different layers would use each other's weights for the
    wrong layer, or wait for ever.
    """
    for name, child in module.named_modules():
        found = {key: value for key, value in vars(child).items() if key.endswith("layerdrop")}
        for config in _configs(child):
            of_config = {key: value for key, value in vars(config).items() if key.endswith("layerdrop")}
            # Modules have copied these, if they have the layers.
            found |= {key: value for key, value in of_config.items() if key not in _COPIED}
        for key, value in found.items():
            if isinstance(value, (int, float)) and value > 0:
                at = f" of {name!r}" if name else ""
                raise ConfigError(
                    f"{type(module).__name__}: {key}={value}{at}: each rank would leave out other layers, and ranks "
                    f"exchange weights layer by layer. Write {key}=0.0 in its configuration, or use ddp"
                )


_COPIED = {"encoder_layerdrop", "decoder_layerdrop"}


def refuse_wrapped(module: nn.Module) -> None:
    """Raises `ConfigError` for a model that is already parallel, or in an unknown wrapper."""
    if hasattr(module, "forward_backward") and hasattr(module, "parallel"):
        raise ConfigError(f"parallelize: this {type(module).__name__} is parallel already. Give each model once")
    if any(hasattr(m, "_orig_mod") or vars(m).get("_compiled_call_impl") for m in module.modules()):
        raise ConfigError(
            "parallelize: the model is compiled: torch.compile would trace through what goes between ranks. Give the "
            "model as it is, and write compile=True"
        )
    if not is_wrapped(module):
        return
    kinds = {str(getattr(c, "peft_type", "")).rpartition(".")[2] for c in _adapter_configs(module)}
    if not hasattr(module, "get_base_model") or kinds != {"LORA"}:
        said = f"with {', '.join(sorted(kinds))}" if kinds - {""} else "of this kind"
        raise ConfigError(
            f"parallelize: a {type(module).__name__} {said}: ranks can cut adapters of LoRA only. "
            "Write peft.get_peft_model(model, LoraConfig(...)), or merge trained adapters by merge_and_unload()"
        )


def _adapter_configs(module: nn.Module) -> list[object]:
    configs = getattr(module, "peft_config", None)
    return list(configs.values()) if isinstance(configs, dict) else []


def slow_products(dtypes: Collection[torch.dtype], *, device_type: str) -> str:
    """The warning that products of passes in these dtypes are slower than they need be; empty if they are not."""
    if device_type != "cuda" or torch.float32 not in dtypes or torch.get_float32_matmul_precision() != "highest":
        return ""
    return (
        "passes compute in float32, which torch multiplies without tensor cores, 8 to 15 times slower than bfloat16 on "
        'an H100. Write precision="bfloat16" (param_dtype=torch.bfloat16), or allow TF32, which rounds factors to 10 '
        'bits: torch.set_float32_matmul_precision("high"), or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1'
    )


def refuse_float16(dtypes: Collection[torch.dtype | None]) -> None:
    """Raises `ConfigError` if a step computes gradients in float16 without scaling the loss."""
    if torch.float16 in dtypes:
        raise ConfigError(
            "float16: small gradients would become 0, and forward_backward scales no loss. Use bfloat16, or call "
            "model(**batch) and scale its loss by torch.amp.GradScaler"
        )


_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def _configs(child: nn.Module) -> list[object]:
    """The configurations that a Hugging Face module carries, with those inside them."""
    config = getattr(child, "config", None)
    if config is None or isinstance(config, dict):
        return []
    inner = [value for value in vars(config).values() if hasattr(value, "use_cache")]
    return [config, *inner]

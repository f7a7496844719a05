"""What models remember from one forward to the next, and what must not be: made harmless, or refused by name.

A forward may run more often than once per micro-batch (on every slice, or again in backward), and on every rank with
other data. What it leaves behind then counts too often, or differs between ranks.
"""

from __future__ import annotations

from torch import nn

from rotorch.core.errors import ConfigError


def make_stateless(module: nn.Module, *, num_ranks: int, device_type: str) -> None:
    """Switches off caches that training has no use for; refuses what cannot be trained as it is. In place.

    Args:
        module: the model.
        num_ranks: how many ranks the job has.
        device_type: kind of the devices that it runs on.

    Raises:
        ConfigError: a layer that rewrites its weights in forward, differently on every rank; an attention that torch
            has no backward for.
    """
    for name, child in module.named_modules():
        for owner in (child, *_configs(child)):
            if getattr(owner, "use_cache", None) is True:  # it would be appended to once per slice
                owner.use_cache = False
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


_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def _configs(child: nn.Module) -> list[object]:
    """The configurations that a Hugging Face module carries, with those inside them."""
    config = getattr(child, "config", None)
    if config is None or isinstance(config, dict):
        return []
    inner = [value for value in vars(config).values() if hasattr(value, "use_cache")]
    return [config, *inner]

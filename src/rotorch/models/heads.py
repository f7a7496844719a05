"""Numbers of heads, read from modules and their configurations."""

from __future__ import annotations

from torch import nn

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size")
LATENT_HEAD_SIZE = "v_head_dim"
"""Of attentions with latents, whose heads have several sizes."""
GROUP_COUNTS = ("num_key_value_heads", "num_kv_heads", "num_attention_heads", "num_heads", "n_head")
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head")


def num_head_groups(attention: nn.Module) -> int | None:
    """Number of key/value heads that an attention declares; None if it declares none."""
    return _count(attention, GROUP_COUNTS)


def num_heads(attention: nn.Module) -> int | None:
    """Number of query heads that an attention declares; None if it declares none."""
    return _count(attention, _HEAD_COUNTS)


def _count(attention: nn.Module, names: tuple[str, ...]) -> int | None:
    for name in names:
        for source in (attention, getattr(attention, "config", None)):
            try:
                count = getattr(source, name, None)
            except Exception:  # a configuration whose layers differ answers only for each of them
                return None
            if isinstance(count, int):
                return count
    return None

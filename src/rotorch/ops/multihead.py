"""`nn.MultiheadAttention` on some of its heads: outputs and maps of all slices sum to those of the whole.

torch's own forward takes its number of heads and its width from the module, not from the weights, and passes weights to
fused kernels; so it cannot run on slices. This one computes the same from the shapes of the weights.

Shapes: N batch, L queries, S keys, E embedding, H heads of the slice, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range


def multihead_on_slice(
    module: nn.MultiheadAttention,
    heads: Range,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The part of `nn.MultiheadAttention.forward` of the slice of `heads`: output and, if wanted, maps (else None).

    The arguments are those of torch's forward. The module holds the slice's weights; the output's bias is not added.
    """
    if is_causal and attn_mask is None:
        raise ConfigError("nn.MultiheadAttention: is_causal=True needs attn_mask, as torch's own forward does")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q_NHLD, k_NHSD, v_NHSD = _heads(module, query, key, value)
    mask = None if attn_mask is None else _mask(attn_mask, module=module, heads=heads, like=q_NHLD)
    # As in torch's own forward: only then the fused kernel may replace the mask by its own causal one.
    causal = is_causal and key_padding_mask is None and not need_weights
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, like=q_NHLD)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    added = k_NHSD.shape[2] - key.shape[1]
    if mask is not None and added:
        # bias_k and zero attention are keys that every query may see.
        mask = F.pad(mask, (0, added))
    dropout = module.dropout if module.training else 0.0
    maps = None
    if need_weights:
        # By hand: the fused kernel gives no maps.
        scores = q_NHLD @ k_NHSD.transpose(-1, -2) / math.sqrt(q_NHLD.shape[-1])
        maps_NHLS = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
        o_NHLD = maps_NHLS @ v_NHSD
        maps = _as_asked(maps_NHLS, module=module, heads=heads, average=average_attn_weights, batched=batched)
    else:
        o_NHLD = F.scaled_dot_product_attention(
            q_NHLD, k_NHSD, v_NHSD, attn_mask=None if causal else mask, dropout_p=dropout, is_causal=causal
        )
    output = F.linear(o_NHLD.transpose(1, 2).flatten(2), module.out_proj.weight)
    if not batched:
        return output.squeeze(0), maps
    return output if module.batch_first else output.transpose(0, 1), maps


def _heads(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values by heads, with the module's additions to keys and values (bias_k, zeros)."""
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    else:
        weights = module.in_proj_weight.chunk(3)
    # Self-attention: one product in place of three.
    if query is key and key is value and module.in_proj_weight is not None:
        projected = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    else:
        pairs = zip((query, key, value), weights, biases, strict=True)
        projected = tuple(F.linear(x, weight, bias) for x, weight, bias in pairs)
    q, k, v = projected
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([x, added.to(x.dtype).expand(len(x), -1, -1)], dim=1)
            for x, added in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return tuple(x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))


def _additive(mask: Tensor, *, like: Tensor) -> Tensor:
    """The mask as a summand of scores: minus infinity where a boolean mask is true."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)


def _mask(mask: Tensor, *, module: nn.MultiheadAttention, heads: Range, like: Tensor) -> Tensor:
    """`attn_mask` [L, S], or [N * all heads, L, S], for this slice's heads: [1 or N, 1 or H, L, S]."""
    mask = _additive(mask, like=like)
    if mask.dim() == 2:
        return mask[None, None]
    if len(mask) == 1:
        return mask[None]
    by_head = mask.unflatten(0, (-1, module.num_heads))
    return by_head[:, heads.start : heads.stop]


def _as_asked(
    maps_NHLS: Tensor, *, module: nn.MultiheadAttention, heads: Range, average: bool, batched: bool
) -> Tensor:
    """This slice's part of the attention maps that torch's forward returns: the parts of all slices sum to them."""
    if average:
        # By the number of all heads: then the slices' parts sum to the mean.
        maps = maps_NHLS.sum(1) / module.num_heads
    else:
        maps = F.pad(maps_NHLS, (0, 0, 0, 0, heads.start, module.num_heads - heads.stop))
    return maps if batched else maps.squeeze(0)

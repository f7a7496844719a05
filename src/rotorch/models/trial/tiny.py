"""A tiny model of any Hugging Face architecture, made from its configuration class by rules over field names.

[Note: rules]
    The meaning of a field is read off its name (`num_*_heads`, `*intermediate_size`, `*sliding_window`) and never off
    the architecture's. Widths become as small as four heads allow, windows and chunks shorter than the sequences that
    tests use, optional features (grouped heads, biases, norms of queries and keys) are switched on. Lists with an
    entry per layer keep one layer of each kind. Nested configurations are shrunk alike.

    Some architectures do not allow all features at once. `shrunk` offers variants from rich to plain, and the first
    that runs is taken. Later variants fill in fields that a configuration leaves to its checkpoints
    (`layer_types = None`, no rotary parameters).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.shard.materialize import on_meta, take_recipes

VOCAB_SIZE = 128
NUM_DRAWN_TOKENS = 112
"""Token ids from here on stand for images, padding and the like; test data is drawn below."""

_HEADS, _HEAD_DIM = 4, 16
_HIDDEN = _HEADS * _HEAD_DIM
_MAX_LAYERS = 6

_GRID_SIDE = 4

Shrink = int | Callable[[int], int]


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


_RULES: tuple[tuple[str, Shrink], ...] = (
    (r"(num_|n_)?(hidden_|encoder_|decoder_)?layers?|depth|num_layers_per_stack|n_layers_per_\w+", _at_most(2)),
    (r"num_nextn_predict_layers|num_mtp_layers|num_kv_shared_layers", _at_most(1)),
    (r"first_k_dense_replace|num_dense_layers|\w*_offset|\w*layer_start_index", _at_most(1)),
    (r"\w*(_interval|_period|_every_n_layers|sparse_step|group_size|_pattern|layer_step)", _at_most(2)),
    (r"moe_layer_end_index|max_window_layers", _at_most(2)),
    (r"(\w*_)?max_position_embeddings|model_max_length|max_seq_len", 64),
    (r"\w*(vocab_size|codebook_size)(_\w+)?", VOCAB_SIZE),
    (r"heads_per_ngram|ngram_size|split_ngram_parts", _at_most(2)),
    (r"make_\w*divisible_by", _at_most(8)),
    (r"(\w*_)?(expand|num_codebooks|num_code_groups|altup_num_inputs|hc_mult|hc_count)", _at_most(2)),
    # heads
    (r"mamba_n_heads|mamba_num_heads", 2 * _HEADS),
    (r"linear_num_key_heads", 2),
    (r"index(er)?_kv_heads", 1),
    (r"\w*(num_key_value_heads|num_kv_heads|n_kv_heads|_kv_heads)", 2),
    (r"\w*(num_heads|n_heads?|attention_heads)", _HEADS),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim", 8),
    (r"\w*(head_dim|head_size|d_head)", _HEAD_DIM),
    (r"rotary_dim", 8),
    (r"\w*(_rank|lowrank)", 8),
    (r"index_topk|indexer_budget", 8),
    # experts
    (r"(\w*_)?(experts_per_tok(en)?|topk|moe_k|top_k_experts|num_selected_experts)", _at_most(2)),
    (r"\w*n_shared_experts|\w*num_shared_experts", _at_most(2)),
    (r"n_group|num_expert_group", _at_most(2)),
    (r"topk_group", 1),
    (r"zero_expert_num", 2),
    (r"\w*(num_experts|routed_experts|local_experts)", 4),
    # windows and chunks
    (r"index_kpool|\w*block_size|index_topk_blocks|indexer_compress_ratio", _at_most(4)),
    (r"\w*(sliding_window(_size)?|chunk_size|window_size|rel_extent|log_scaling_n_floor|floor_scale)", _at_most(8)),
    # state spaces
    (r"\w*(d_state|state_size)", 8),
    (r"\w*n_groups", _at_most(2)),
    (r"o_groups", _at_most(2)),
    # images
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"pos_emb_(height|width)|position_embedding_size", 16),
    # widths
    (r"\w*moe_intermediate_size|expert_ffn_hidden_size|\w*shared_expert\w*_size|share_expert_dim", 24),
    (r"\w*(intermediate_size|ffn_hidden_size|intermediate_size_mlp|ffn_dim|n_inner)", 48),
    (r"hidden_size_per_layer_input|moe_latent_size", _at_most(16)),
    (r"\w*(hidden_size|embedding_dim|embed_dim|_in_dim|_out_dim|input_dim|output_dim)", _HIDDEN),
    (r"prediction_head_size|d_model|n_embd|dim_model_base", _HIDDEN),
)  # fmt: skip

_OPTIONAL = re.compile(r"\w*(_bias|qk_norm|qk_layernorm)|bias|output_router_logits")
_RESTS = re.compile(r"\w*(dropout|pdrop|jitter)\w*")
_TOKENS = re.compile(r"\w*(token_id|token_index|bos_id|eos_id)")
_KV_HEADS = re.compile(r"\w*(num_key_value_heads|num_kv_heads|n_kv_heads|_kv_heads)")
_FILLED = re.compile(
    r"\w*(experts_per_tok|topk|topk_group|n_group|head_dim|intermediate_size|experts|sliding_window|kv_heads)"
    r"|num_key_value_heads|indexer_\w+"
)
_OF_IMAGES = re.compile(r"visual|vision|image|pixel|video|audio")  # they come with a mask of their places
_PER_LAYER = re.compile(r"\w*(layer|types|pattern|heads_per|limits|window|rope_theta)\w*")


@dataclass(frozen=True)
class _Variant:
    """Choice of features: fewer key/value heads than heads, flags off by default, fields unset by default."""

    grouped: bool
    optional: bool
    filled: bool = False
    sections: bool = False


_VARIANTS = tuple(
    _Variant(grouped, optional, filled, sections)
    for sections in (False, True)
    for filled in (False, True)
    for optional in (True, False)
    for grouped in (True, False)
)


_GPU_ATTENTION = re.compile("flash|flex|/")
"""In names of attentions that do not run on CPU: transformers' own, and kernels of its hub."""


def shrunk(config_class: type) -> Iterator[Any]:
    """Yields tiny configurations of a class, from rich in features to plain (see [Note: rules]).

    Invalid ones are left out; if all are, raises what was wrong with the last.
    """
    failure: Exception | None = None
    valid = 0
    for variant in _VARIANTS:
        try:
            config = _shrink(config_class(), variant)
        except Exception as error:
            failure = error
            continue
        valid += 1
        yield config
    if not valid and failure is not None:
        raise failure


def shrunk_like(config: Any) -> Iterator[Any]:
    """Yields tiny configurations that are like one that is there in all but its sizes. Invalid ones are left out."""
    for sections in (False, True):
        for grouped in (True, False):
            try:
                small = _shrink(config, _Variant(grouped, optional=False, sections=sections), rebuild=False)
            except Exception:
                continue
            if _GPU_ATTENTION.search(str(getattr(small, "_attn_implementation", ""))):
                small._attn_implementation = "eager"  # a trial runs on CPU, and heads are apart in any attention
            yield small


def number_for(name: str) -> int | None:
    """A small value for a field that is not set, by the rules; None if no rule knows it."""
    if _RESTS.fullmatch(name):
        return 0
    small = _number(name, 1 << 20)
    return None if small == 1 << 20 else int(small)


def _shrink(default: Any, variant: _Variant, *, rebuild: bool = True) -> Any:
    """A small configuration of `default`'s class: made anew, with what follows from its fields, or a changed copy."""
    values = {k: v for k, v in vars(default).items() if not k.startswith("_")}
    layers = _layers_to_keep(default)
    given: dict[str, Any] = {}
    tokens = iter(range(VOCAB_SIZE - 1, NUM_DRAWN_TOKENS, -1))
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(type(value), "model_type"):
            given[name] = _shrink(type(value)() if rebuild else value, variant, rebuild=rebuild)
        elif isinstance(value, bool):
            if variant.optional and _OPTIONAL.fullmatch(name):
                given[name] = True
        elif value is None and variant.filled and name.endswith("mlp_layer_types"):
            given[name] = ["dense", *["sparse"] * (len(layers.kept) - 1)] if layers is not None else None
        elif value is None and variant.filled and name == "layer_types":
            given[name] = _kinds_spoken_of(values, count=len(layers.kept)) if layers is not None else None
        elif value is None and variant.filled and _FILLED.fullmatch(name):
            given[name] = number_for(name)
        elif isinstance(value, list | tuple) and layers is not None and len(value) == layers.of and layers.of > 1:
            given[name] = [_number(name, value[i]) for i in layers.kept]
        elif isinstance(value, dict) and "rope" in name:
            of_kind = {"rope_type": "default", "rope_theta": 10_000.0} if variant.filled and not value else value
            given[name] = _shrink_rope(of_kind, values, sections=variant.sections)
            kinds = dict.fromkeys(values.get("layer_types") or ())
            if variant.sections and variant.filled and not any(isinstance(v, dict) for v in value.values()):
                given[name] = {kind: dict(given[name]) for kind in kinds} or given[name]
        elif isinstance(value, dict) and "rates" in name:
            given[name] = {k: min(v, 4 * (i + 1)) for i, (k, v) in enumerate(value.items())}
        elif isinstance(value, float | int) and _RESTS.fullmatch(name):
            given[name] = 0.0
        elif isinstance(value, int) and _TOKENS.fullmatch(name):
            given[name] = next(tokens) if value >= NUM_DRAWN_TOKENS else value
        elif isinstance(value, int):
            given[name] = _number(name, value)
            if name == "intermediate_size" and "pixel_shuffle_ratio" in values:  # so many places are folded into one
                given[name] = int(_HIDDEN / values["pixel_shuffle_ratio"] ** 2)
    if not variant.grouped or "kv_lora_rank" in values:  # latent attention has no groups
        given |= {k: _HEADS for k in given if _KV_HEADS.fullmatch(k)}
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:  # how much of it turns
        given["head_dim"] = given["qk_rope_head_dim"]
    if layers is not None:
        given[layers.field] = len(layers.kept)
    changed = {k: v for k, v in given.items() if k not in values or v != values[k]}
    if rebuild:
        return type(default)(**changed)
    small = copy.deepcopy(default)
    for name, value in changed.items():
        setattr(small, name, value)
    return small


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value == 0:  # zero says that there is no such thing
        return value
    for pattern, small in _RULES:
        if re.fullmatch(pattern, name):
            return small(value) if callable(small) else small
    return value


class _Layers:
    """Layers of a configuration that are kept: one of each kind, in order."""

    def __init__(self, field: str, of: int, kept: list[int]) -> None:
        self.field, self.of, self.kept = field, of, kept


def _layers_to_keep(config: Any) -> _Layers | None:
    field = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    count = getattr(config, field, None)
    if not isinstance(count, int):
        return None
    lists = [v for k, v in vars(config).items() if isinstance(v, list) and len(v) == count and _PER_LAYER.fullmatch(k)]
    kinds: dict[str, int] = {}
    for i in range(count):
        kinds.setdefault(repr([v[i] for v in lists]), i)
    kept = sorted(kinds.values())[:_MAX_LAYERS]
    for i in range(count):
        if len(kept) < 2 and i not in kept:
            kept = sorted([*kept, i])
    return _Layers(field, count, kept)


def _kinds_spoken_of(fields: Iterable[str], *, count: int) -> list[str]:
    """A kind for each of `count` layers: full attention last, before it those that fields are about (`conv_bias`)."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    spoken = [k for k in ALLOWED_LAYER_TYPES if any(f.startswith(f"{k.removesuffix('_attention')}_") for f in fields)]
    rest = [kind for kind in spoken if kind != "full_attention"][: count - 1]
    return [*rest, *["full_attention"] * (count - len(rest))]


def _shrink_rope(parameters: dict[str, Any], config: dict[str, Any], *, sections: bool) -> dict[str, Any]:
    """Sections of rotary positions add up to half of a head's rotated size."""
    small: dict[str, Any] = {}
    half = int(_HEAD_DIM * parameters.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in parameters.items():
        if isinstance(value, dict):
            small[name] = _shrink_rope(value, config, sections=sections)
        elif name == "mrope_section":
            parts = [max(1, part * half // sum(value)) for part in value]
            parts[0] += half - sum(parts)
            small[name] = parts
        elif name in ("original_max_position_embeddings",):
            small[name] = 32
        else:
            small[name] = value
    if sections and "rope_type" in parameters:
        side = max(1, 3 * half // 8)
        small.setdefault("mrope_section", [side, side, half - 2 * side])
    return small


def inputs_for(
    model_class: type, config: Any, *, num_rows: int, num_tokens: int, seed: int = 0, embedded: bool = False
) -> dict[str, Tensor]:
    """Random inputs for the arguments of a model class's forward, by name; their first dims divide by rows.

    Token ids, images, patches with their grid or positions, embeddings; of what it does not need, none but token ids
    or images.

    Args:
        model_class: of transformers.
        config: tiny.
        num_rows: sequences or images.
        num_tokens: of each sequence.
        seed: of the values.
        embedded: embeddings in place of token ids, and what another model gives this one, too.
    """
    parameters = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    asked = {name: p.default is p.empty for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    made: dict[str, Tensor] = {}
    gridded = "grid_thw" in asked and not asked.get("input_ids")
    if gridded:
        made["grid_thw"] = torch.tensor([[1, _GRID_SIDE, _GRID_SIDE]] * num_rows)
    placed = asked.get("pixel_position_ids", False)
    for name, needed in asked.items():
        if name == "input_ids" and not (gridded or embedded or asked.get("inputs_embeds")):
            made[name] = torch.randint(NUM_DRAWN_TOKENS, (num_rows, num_tokens), generator=generator)
        elif name == "pixel_position_ids" and needed:
            places = torch.cartesian_prod(*[torch.arange(_GRID_SIDE)] * 2)
            made[name] = places.expand(num_rows, -1, -1).clone()
        elif name in ("pixel_values", "hidden_states") and (gridded or placed):
            times = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
            channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
            patches, width = _GRID_SIDE**2, channels * times * config.patch_size**2
            made[name] = normal(num_rows * patches, width) if gridded else normal(num_rows, patches, width)
        elif name == "pixel_values" and (needed or "input_ids" not in asked):
            size = getattr(config, "image_size", 16)
            made[name] = normal(num_rows, getattr(config, "num_channels", 3), size, size)
        elif name.endswith(("embeds", "hidden_states")) and (needed or (embedded and not _OF_IMAGES.search(name))):
            made[name] = normal(num_rows, num_tokens, config.hidden_size)
    return made


def never_set(model_class: type, config: Any) -> tuple[str, ...]:
    """Names of weights that a model's own initialisation forgets: they have whatever lay in their memory."""
    with on_meta():
        recipes = take_recipes(model_class._from_config(config))  # type: ignore[attr-defined]
    return tuple(name for name, recipe in recipes.items() if not recipe)


def with_values(model_class: type, config: Any, *, never_set_names: Sequence[str] | None = None) -> nn.Module:
    """A model all of whose weights have values, from torch's generator: the same on every rank that seeds it alike."""
    names = never_set(model_class, config) if never_set_names is None else never_set_names
    module: nn.Module = model_class._from_config(config)  # type: ignore[attr-defined]
    for name in names:
        nn.init.normal_(module.get_parameter(name), std=0.02)
    return module

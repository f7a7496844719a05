"""Checks of a model's configuration against its class: known keys, possible sizes, a model that can be built.

[Note: keys]
    transformers takes any key: an unknown key becomes an attribute that no code reads, so a misspelt
    size is silently the default. A class knows its fields, their aliases (`attribute_map`), and the keys that its
    constructor consumes or sets (older spellings such as `rope_theta`). Any other key is refused in a run's own table.
    Published files, and tables within a configuration, carry notes of other programs: there a key is refused only if
    it is spelt almost like a field that is missing.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from textwrap import shorten
from typing import Any

from torch import nn

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.quantities import format_bytes

_NOTES = frozenset(
    {
        *(
            "model_type",
            "architectures",
            "auto_map",
            "transformers_version",
            "torch_dtype",
            "dtype",
            "quantization_config",
        ),
        *("_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation", "attn_implementation"),
    }
)
"""Keys that any configuration may have."""

_NEAR = 0.85
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_SIZES_OF_SOME = ("moe_intermediate_size", "n_inner", "ffn_dim", "d_ff")
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_LAYERS = 4096
_MOST_ELEMENTS = 1 << 48  # of one weight: more than all memory of any machine


def check_keys(
    values: Mapping[str, Any], *, config: Any, make: Callable[[dict[str, Any]], Any], source: str, is_own: bool
) -> None:
    """Every key is one that the configuration's class knows (see [Note: keys]); tables within it, too.

    Args:
        values: the contents of a `config.json`.
        config: the configuration made of them.
        make: makes it.
        source: of `values`, for the message.
        is_own: the values are written in the run's own file, and not by another program.

    Raises:
        ConfigError: names the key, and the nearest that there is.
    """
    unknown = _unknown(values, config=config, make=make)
    known = sorted(_fields(config) - _NOTES)
    for key in unknown:
        near = difflib.get_close_matches(key, [name for name in known if name not in values], n=1, cutoff=_NEAR)
        if is_own or near:
            meant = f" (did you mean {near[0]!r}?)" if near else nearest(key, known=known)
            where = f"{source}.{key}" if is_own else f"{source}: {key!r}"
            raise ConfigError(
                f"model: {where} = {values[key]!r}: {type(config).__name__} has no such key{meant}. "
                "Write one that it has, or leave it out"
            )
    for name in getattr(config, "sub_configs", {}):
        inner, table = getattr(config, name, None), values.get(name)
        if inner is not None and isinstance(table, dict):
            check_keys(table, config=inner, make=type(inner).from_dict, source=f"{source}.{name}", is_own=False)


def _unknown(values: Mapping[str, Any], *, config: Any, make: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Keys that became attributes which the configuration does not have without them."""
    left = [key for key in values if key not in _fields(config) and key in vars(config)]
    if not left:
        return []
    try:
        without = make({key: value for key, value in values.items() if key not in left})
    except Exception:  # then one of them is needed
        return []
    return [key for key in left if not hasattr(without, key)]


def _fields(config: Any) -> set[str]:
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    return names | set(getattr(config, "attribute_map", {})) | set(getattr(config, "sub_configs", {})) | _NOTES


def check_sizes(values: Mapping[str, Any], *, aliases: Mapping[str, str], source: str) -> None:
    """Sizes are positive and shares are shares, before a constructor divides by them.

    Args:
        values: the contents of a `config.json`.
        aliases: the class's names for sizes that others call otherwise: GPT-2 has `n_layer` for `num_hidden_layers`.
        source: of `values`, for the message.

    Raises:
        ConfigError: names the key and its value.
    """
    sizes = {*_SIZES, *_SIZES_OF_SOME, *(alias for name, alias in aliases.items() if name in _SIZES)}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if key in sizes and value < 1:
            raise ConfigError(f"model: {source}: {key} = {value}. Write 1 or more")
        if key == "rope_theta" and value <= 0:
            raise ConfigError(f"model: {source}: {key} = {value}. Write a positive number, e.g. 10000")
        if key in _SOFT_CAPS and value <= 0:
            raise ConfigError(f"model: {source}: {key} = {value}. Write a positive number, or leave it out")
        if key == "partial_rotary_factor" and not 0 < value <= 1:
            raise ConfigError(f"model: {source}: {key} = {value}: not a share of a head. Write more than 0, at most 1")
        if key.endswith(("dropout", "pdrop")) and not 0 <= value < 1:
            raise ConfigError(f"model: {source}: {key} = {value}: not a fraction. Write 0 or more, below 1")
        if key.endswith(("_eps", "_epsilon")) and not 0 < value < 1:
            raise ConfigError(f"model: {source}: {key} = {value}. Write a small positive number, e.g. 1e-6")


def check_values(config: Any, *, source: str) -> None:
    """Sizes fit each other, and no weight is larger than any machine.

    Raises:
        ConfigError: names the key and its value.
    """
    for each in _language_configs(config):
        sizes = {name: value for name in _SIZES if isinstance(value := of_every_layer(each, name), int)}
        check_sizes(sizes, aliases={}, source=source)
        _check_experts(each, source=source)
        rope = of_every_layer(each, "rope_parameters")
        for table in (rope, *rope.values()) if isinstance(rope, dict) else ():  # one for all layers, or by their type
            if isinstance(table, dict) and "rope_theta" in table:
                check_sizes({"rope_theta": table["rope_theta"]}, aliases={}, source=source)
        window = of_every_layer(each, "sliding_window")
        if isinstance(window, int) and window < 1 and getattr(each, "use_sliding_window", True):
            raise ConfigError(f"model: {source}: sliding_window = {window}. Write 1 or more, or leave it out")
        layers, width, heads = (sizes.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        if layers is not None and layers > _MOST_LAYERS:
            raise ConfigError(
                f"model: {source}: {_called(each, 'num_hidden_layers')} = {layers}. Write {_MOST_LAYERS} or less"
            )
        _check_rotary(each, sizes=sizes, source=source)
        if width is not None and (widest := max(width, sizes.get("vocab_size", 1))) * width > _MOST_ELEMENTS:
            name = "hidden_size" if widest == width else "vocab_size"
            raise ConfigError(
                f"model: {source}: {_called(each, name)} = {widest}: one weight of {widest} x {width} would take "
                f"{format_bytes(4 * widest * width)}. Write smaller sizes"
            )
        of_keys = sizes.get("num_key_value_heads")
        if heads is not None and of_keys is not None and heads % of_keys:
            fits = [number for number in range(1, heads + 1) if heads % number == 0]
            raise ConfigError(
                f"model: {source}: {_called(each, 'num_key_value_heads')} = {of_keys} does not divide "
                f"{_called(each, 'num_attention_heads')} = {heads}. Write one of {', '.join(map(str, fits))}"
            )


def _check_experts(config: Any, *, source: str) -> None:
    """A token goes to no more experts than there are; a model may have none, and send none."""
    found = {name: value for name in _EXPERTS if isinstance(value := of_every_layer(config, name), int)}
    top = of_every_layer(config, "num_experts_per_tok")
    if not found or not isinstance(top, int):
        return
    name, experts = next(iter(found.items()))
    if experts < 0 or top < 0 or top > experts:
        raise ConfigError(
            f"model: {source}: {_called(config, 'num_experts_per_tok')} = {top} of {_called(config, name)} = "
            f"{experts}. Write as many experts as a token goes to, or more"
        )
    if experts and not top:
        raise ConfigError(f"model: {source}: {_called(config, 'num_experts_per_tok')} = 0. Write 1 or more")


def _check_rotary(config: Any, *, sizes: Mapping[str, int], source: str) -> None:
    """Rotary positions turn pairs of features, so a head has an even number of them."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope or hasattr(config, "qk_rope_head_dim"):
        return
    width, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    features = sizes.get("head_dim") or (width // heads if width and heads else 0)
    share = rope.get("partial_rotary_factor", 1.0)
    turned = int(features * share) if isinstance(share, int | float) else 0
    if turned % 2:
        raise ConfigError(
            f"model: {source}: heads of {features} features, of which rotary positions turn {turned}: an odd number. "
            f"Write {_called(config, 'head_dim')} (or {_called(config, 'hidden_size')}) so that it is even"
        )


def of_every_layer(config: Any, name: str) -> Any:
    """A field of a configuration; None if it has no such field, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # so transformers answers where layers differ
        return None


def _language_configs(config: Any) -> Iterator[Any]:
    yield config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text_config is not config:
        yield text_config


def _called(config: Any, name: str) -> str:
    """A size's name in this class: GPT-2 has `n_layer` for `num_hidden_layers`."""
    return str(getattr(config, "attribute_map", {}).get(name, name))


def built(build: Callable[[], nn.Module], *, config: Any) -> nn.Module:
    """`build()`; its failures become an error of one line.

    Raises:
        ConfigError: the constructor's own words, with the key whose value they name.
    """
    try:
        return build()
    except ConfigError:
        raise
    except Exception as error:
        words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        if (asked := re.search(r"DefaultCPUAllocator: .*?tried to allocate (\d+) bytes", words)) is not None:
            words = f"one of its weights would take {format_bytes(int(asked[1]))}, which this machine does not have"
        key = _key_of(error, config=config)
        raise ConfigError(
            f"model: transformers cannot build this {config.model_type}{f' with {key}' if key else ''}: "
            f"{shorten(words, _MOST_CHARACTERS, placeholder=' ...')}. Write another value in its configuration"
        ) from error


_MOST_CHARACTERS = 300


def _key_of(error: Exception, *, config: Any) -> str:
    """The key whose value an error names: "hidden_act = 'silly'" for `KeyError('silly')`; else nothing."""
    named = {str(argument) for argument in error.args} | set(re.findall(r"['\"](\w+)['\"]", str(error)))
    for each in _language_configs(config):
        for key, value in each.to_dict().items():
            inside = value.items() if isinstance(value, dict) else [(None, value)]
            for inner, leaf in inside:
                if isinstance(leaf, str) and leaf in named and key not in _NOTES:
                    return f"{key if inner is None else f'{key}.{inner}'} = {leaf!r}"
    return ""

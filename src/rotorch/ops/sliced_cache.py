"""A key-value cache to which all slices of an attention append, each to layers of its own (rtp, `generate`).

Slice k of layer l is layer `l + k * num_layers` of the user's own cache: operations on all its layers (reorder for
beams, crop, repeat) reach all slices, and its length is that of slice 0. A decoder beside an encoder has two such
caches in one, of its own tokens and of the encoder's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from rotorch.core.errors import ConfigError

_OF_BOTH = ("self_attention_cache", "cross_attention_cache")
"""The caches in that of a decoder beside an encoder."""

_NUM_LAYERS = "_rotorch_num_layers"
"""Attribute of a cache with layers for all slices: number of layers of a slice."""


def is_cache(value: Any) -> bool:
    """Returns True if an argument is a cache of transformers."""
    return hasattr(value, "get_seq_length")


def of_slice(cache: Any, index: int) -> Any:
    """Stand-in for the cache in the forward of one slice of an attention.

    Args:
        cache: the user's own, after `make_room`.
        index: number of the slice.
    """
    if not hasattr(cache, _OF_BOTH[0]):
        return CacheOfSlice(cache, index)
    both = copy.copy(cache)  # of its class, which attentions ask for
    for name in _OF_BOTH:
        setattr(both, name, CacheOfSlice(getattr(cache, name), index))
    # Each slice computes the encoder's keys and values once; whether it has, its own layers say.
    both.is_updated = {n: layer.is_initialized for n, layer in enumerate(both.cross_attention_cache.layers)}
    return both


class CacheOfSlice:
    """Takes the cache's place in the forward of one slice of an attention.

    Args:
        cache: the user's own, after `make_room`.
        index: number of the slice.
    """

    def __init__(self, cache: Any, index: int) -> None:
        self._cache, self._num_layers = cache, getattr(cache, _NUM_LAYERS)
        self._first = index * self._num_layers

    @property
    def layers(self) -> list[Any]:
        """The slice's own."""
        return list(self._cache.layers[self._first : self._first + self._num_layers])

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Appends the slice's keys and values; returns all of its keys and values so far."""
        if layer_idx >= self._num_layers:
            raise ConfigError(
                f"rtp: layer {layer_idx} appends to a cache that its model made for {self._num_layers} layers. Write "
                "use_cache=False"
            )
        return self._cache.update(keys, values, layer_idx + self._first, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens that a layer of the slice has seen."""
        return int(self._cache.get_seq_length(layer_idx + self._first))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        # Data (flags, sizes) is alike for all slices; a method would act on layers of all of them.
        if callable(value):
            raise ConfigError(
                f"rtp: a forward calls {name} of its cache, which caches of slices do not have. Write use_cache=False"
            )
        return value


def make_room(cache: Any, *, module: torch.nn.Module, name: str, num_slices: int) -> None:
    """Gives a cache layers for all slices, before the first of them appends.

    Raises:
        ConfigError: gradients are computed, which would append again in backward; keys and values of whole heads are
            in it already; it has no list of layers.
    """
    if torch.is_grad_enabled():
        raise ConfigError(
            f"rtp: {name!r} is given a cache of keys and values, to which backward would append again. "
            "Leave use_cache and past_key_values out of the batch, or write torch.no_grad()"
        )
    if hasattr(cache, _OF_BOTH[0]):
        for part in _OF_BOTH:
            make_room(getattr(cache, part), module=module, name=name, num_slices=num_slices)
        return
    if hasattr(cache, _NUM_LAYERS):
        return
    layers = getattr(cache, "layers", None)
    number = len(layers or ()) or getattr(getattr(module, "config", None), "num_hidden_layers", 0)
    if not isinstance(layers, list) or not number or any(layer.is_initialized for layer in layers):
        raise ConfigError(
            f"rtp: a {type(cache).__name__} that is filled already, or has no list of layers, cannot take keys and "
            "values of slices. Write use_cache=False"
        )
    if not layers:
        layers = [cache.layer_class_to_replicate() for _ in range(number)]
    # Copies of empty layers: settings such as a sliding window belong to each slice's own.
    cache.layers = [copy.deepcopy(layer) for _ in range(num_slices) for layer in layers]
    setattr(cache, _NUM_LAYERS, number)

"""Refusals of outputs that no rank has whole, before a loss is computed on a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel


def refuse_cut_request(model: ParallelModel, kwargs: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a call asks for hidden states or attention maps of which each rank has a part.

    Args:
        model: whose layout counts.
        kwargs: of the call; what they leave out is the configuration's.
    """
    if model.num_feature_ranks > 1:
        for name in ("output_hidden_states", "output_attentions"):
            if _asks(model, kwargs, name):
                raise _cut(name.removeprefix("output_"), f"Leave {name} out")


def refuse_cut_outputs(model: ParallelModel, kwargs: Mapping[str, Any], output: Any) -> None:
    """Raises `ConfigError` if a call returns hidden states of which each rank has a part, or no attention maps.

    Args:
        model: whose layout counts.
        kwargs: of the call.
        output: of the module's forward.
    """
    if not isinstance(output, Mapping):
        return
    for name, value in output.items():
        if model.num_feature_ranks > 1 and "hidden_state" in name and value is not None:
            raise _cut(name, "Give the model a head")
        if name.endswith("attentions") and value == () and _asks(model, kwargs, "output_attentions"):
            raise ConfigError(
                "output_attentions: attention runs on slices of its heads under this layout, and no rank has the maps "
                "of all of them. Leave output_attentions out, or write ddp, fsdp, or rtp over shared memory"
            )


def _cut(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{what}: this layout cuts activations along their features, and each rank has a part of them. {remedy}, or "
        "write ddp, fsdp, rtp or megatron"
    )


def _asks(model: ParallelModel, kwargs: Mapping[str, Any], name: str) -> bool:
    asked = kwargs.get(name)
    return bool(getattr(getattr(model.module, "config", None), name, False) if asked is None else asked)

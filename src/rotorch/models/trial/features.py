"""Trial on a tiny model of the same kind: are its outputs the same with activations cut along their features?

[Note: trial of features]
    The rules of `models/features.py` know weights only. Modules also have code between their weights: adding and
    scaling treat every feature alike, but a norm without weights, or a mean over features, would be taken over a part
    of them without an error. So a model with the same configuration but smaller sizes is built and run twice at once,
    in two threads, each with one half of all features. If a layer needs the other half, or a norm sums over both, the
    threads exchange theirs. Concatenated, their outputs must be the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotorch.core.spec import Cut, GridCut, ModelSpec, Weight
from rotorch.models.feature_sums import complete_sums
from rotorch.models.trial.two_threads import (
    ThreadExchange,
    differ,
    first_tensor,
    in_two_threads,
    key_of,
    tiny_of,
    trial,
)
from rotorch.shard.sites import find_sites

_known: dict[str, str] = {}
_known_last: dict[str, str] = {}


def is_from_config(module: nn.Module) -> bool:
    """True if a model is made from a configuration, so that there can be a tiny one of its kind."""
    return hasattr(type(module), "_from_config") and hasattr(getattr(module, "config", None), "to_dict")


def last_linear(module: nn.Module) -> str:
    """The name of the weight of the linear layer that runs last of all layers in a pass of a Hugging Face model.

    What that gives is the model's output, if it is no language-model head. "" if the last layer is of another kind, or
    if no tiny model runs. Deterministic, the same on all ranks.
    """
    key = key_of(module)
    if key not in _known_last:
        with trial():
            found = tiny_of(module)
            _known_last[key] = "" if isinstance(found, str) else _last_of(*found[:2])
    return _known_last[key]


def why_not_in_halves(module: nn.Module, *, describe: Callable[[nn.Module], ModelSpec]) -> str:
    """Returns the reason why a model's features cannot be cut (see [Note: trial of features]); "" if they can.

    Deterministic, the same on all ranks; draws from no random generator of the caller's.

    Args:
        module: the model.
        describe: makes the spec of another model alike, with its cuts on a grid.
    """
    key = key_of(module)
    if key not in _known:
        with trial():
            found = tiny_of(module)
            _known[key] = found if isinstance(found, str) else _try(*found, describe=describe)
    return _known[key]


def _last_of(tiny: nn.Module, inputs: dict[str, Any]) -> str:
    ran: list[str] = []
    for name, layer in tiny.named_modules():
        if any(p is not None for p in layer._parameters.values()):
            layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    tiny(**inputs)
    return f"{ran[-1]}.weight" if ran and type(tiny.get_submodule(ran[-1])) is nn.Linear else ""


def _try(
    tiny: nn.Module, inputs: dict[str, Any], expected: Tensor, *, describe: Callable[[nn.Module], ModelSpec]
) -> str:
    spec = describe(tiny)
    return spec.features_stay_whole or _compare(tiny, spec, inputs, expected)


def _compare(tiny: nn.Module, spec: ModelSpec, inputs: dict[str, Any], expected: Tensor) -> str:
    def run(mine: int, exchange: ThreadExchange) -> Tensor:
        return first_tensor(_Half(copy.deepcopy(tiny), spec, mine=mine, exchange=exchange)(copy.deepcopy(inputs)))

    halves = in_two_threads(run)
    if isinstance(halves, Exception):
        return f"a tiny one does not run on half of its features ({' '.join(str(halves).split())[:200]})"
    if not any(w.grid is not None and w.grid.whole_output for w in spec.weights):
        halves = [torch.cat(halves, -1)]
    if any(differ(found, expected) for found in halves):
        return "a tiny one gives something else on halves of its features: it does more with them than its weights say"
    return ""


class _Half(TorchFunctionMode):
    """Runs a model on one half of its features. Its matrices stay whole; it takes its half of what they give.

    Args:
        model: a copy of its own; changed.
        spec: with cuts on a grid.
        mine: number of this half.
        exchange: with the other one.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, *, mine: int, exchange: ThreadExchange) -> None:
        super().__init__()
        self._model, self._mine, self._exchange = model, mine, exchange
        self._matrices: dict[int, Weight] = {}
        sites = find_sites(model)
        for weight in spec.weights:
            cut, site = weight.grid or GridCut(), sites[weight.name][0]
            whole = site.module._parameters[site.attribute]
            if whole is None:
                raise AssertionError(f"{weight.name} is not there")
            if cut.rows is not None or cut.whole_output:
                self._matrices[id(whole)] = weight
            elif cut.columns is not None:
                dim = cut.columns.dim
                part = nn.Parameter(self._half_of(whole.detach(), cut.columns, size=weight.shape[dim], dim=dim))
                for each in sites[weight.name]:
                    each.put(part)
                if cut.sums:
                    complete_sums(site.module, mine=part.shape[0], total=weight.shape[0], sum_over=self._sum_over)

    def __call__(self, inputs: dict[str, Any]) -> Any:
        with self:
            return self._model(**inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = self._matrices.get(id(args[1])) if len(args) > 1 else None
        if weight is None or weight.grid is None or func not in (F.linear, F.embedding):
            return func(*args, **kwargs)
        rows, columns = weight.grid.rows, weight.grid.columns
        if weight.grid.whole_output and columns is not None:
            return F.linear(self._whole_of(args[0], columns, size=weight.shape[1]), *args[1:], **kwargs)
        if rows is None or columns is None:
            raise AssertionError(f"{weight.name} is no matrix on a grid")
        if func is F.embedding:
            return self._half_of(func(*args, **kwargs), columns, size=weight.shape[1], dim=-1)
        inputs, outputs = (columns, rows) if weight.grid.is_table else (rows, columns)
        x = args[0]
        if weight.grid.is_table or x.shape[-1] != weight.shape[1]:  # else it comes from outside, and is whole
            x = self._whole_of(x, inputs, size=weight.shape[1])
        y = self._half_of(F.linear(x, args[1]), outputs, size=weight.shape[0], dim=-1)
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return y if bias is None else y + bias

    def _half_of(self, whole: Tensor, cut: Cut, *, size: int, dim: int) -> Tensor:
        ranges = cut.ranges(size, num_slices=2, index=self._mine)
        return torch.cat([whole.narrow(dim, r.start, r.length) for r in ranges], dim)

    def _whole_of(self, half: Tensor, cut: Cut, *, size: int) -> Tensor:
        whole = half.new_empty(*half.shape[:-1], size)
        for index, part in enumerate(self._exchange.both(self._mine, half)):
            ranges = cut.ranges(size, num_slices=2, index=index)
            for r, block in zip(ranges, part.split([r.length for r in ranges], -1), strict=True):
                whole.narrow(-1, r.start, r.length).copy_(block)
        return whole

    def _sum_over(self, part: Tensor) -> Tensor:
        return sum(self._exchange.both(self._mine, part))

"""Trial on a tiny model: are its outputs the same with activations cut along the sequence inside of its layers?

[Note: trial along tokens]
    Between the modules of a layer that have matrices (attentions, MLPs) a model adds, scales and normalises token by
    token, as far as a plan can tell; but a layer's code may also shift its tokens by one, or mix in other tokens. So a
    model with the same configuration but smaller sizes runs twice at once, in two threads. Each thread has a chunk of
    the tokens from the input of the first layer on; every child of a layer that has a matrix gets all tokens, and its
    output is cut again; behind the last layer all tokens are concatenated. The outputs of both threads must equal those
    of the whole model. The chunks are not equally long.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.models.stages import layer_order
from rotorch.models.trial.two_threads import (
    ThreadExchange,
    differ,
    first_tensor,
    in_two_threads,
    key_of,
    tiny_of,
    trial,
)

_known: dict[str, str] = {}


def why_not_along_tokens(module: nn.Module) -> str:
    """Returns the reason why activations in a model's layers cannot be cut along the sequence; "" if they can.

    See [Note: trial along tokens]. The same on all ranks; draws from no random generator of the caller's.

    Args:
        module: the model; it has a pipeline plan, which says what its layers are.
    """
    key = key_of(module)
    if key not in _known:
        with trial():
            found = tiny_of(module)
            _known[key] = found if isinstance(found, str) else _try(*found)
    return _known[key]


def _try(tiny: nn.Module, inputs: dict[str, Any], expected: Tensor) -> str:
    def run(mine: int, exchange: ThreadExchange) -> Tensor:
        model = copy.deepcopy(tiny)
        _TokenShard(model, mine=mine, exchange=exchange)
        return first_tensor(model(**copy.deepcopy(inputs)))

    outputs = in_two_threads(run)
    if isinstance(outputs, Exception):
        return f"a tiny one does not run on shards of its tokens ({' '.join(str(outputs).split())[:200]})"
    if any(differ(found, expected) for found in outputs):
        return (
            "a tiny one gives something else with its tokens cut between attentions and MLPs: its layers do more there "
            "than treat every token alike"
        )
    return ""


class _TokenShard:
    """Runs the layers of a model on a chunk of the tokens.

    Args:
        model: a copy of its own; gets hooks.
        mine: number of this chunk.
        exchange: with the other thread.
    """

    def __init__(self, model: nn.Module, *, mine: int, exchange: ThreadExchange) -> None:
        self._mine, self._exchange = mine, exchange
        self._rows, self._lengths = 0, (0, 0)
        layers = [model.get_submodule(name) for name in layer_order(model).layers]
        layers[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        layers[-1].register_forward_hook(self._end)
        for layer in layers:
            for child in layer.children():
                if any(p.dim() > 1 for p in child.parameters()):
                    child.register_forward_pre_hook(self._make_whole, with_kwargs=True)
                    child.register_forward_hook(self._cut)

    def _begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        self._rows, tokens = hidden.shape[:2]
        self._lengths = (tokens // 2 + 1, tokens - tokens // 2 - 1)
        own = self._own(hidden)
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": own})

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        return (self._whole(output[0]), *output[1:]) if isinstance(output, tuple) else self._whole(output)

    def _make_whole(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        leaves, tree = tree_flatten((args, kwargs))
        found = [self._is_own(x) for x in leaves]
        if not any(found):
            raise ValueError(f"{type(module).__name__} gets no hidden states of [rows, tokens, features]")
        leaves = [self._whole(x) if cut else x for x, cut in zip(leaves, found, strict=True)]
        made: tuple[Any, dict[str, Any]] = tree_unflatten(leaves, tree)
        return made

    def _cut(self, _: nn.Module, __: Any, output: Any) -> Any:
        leaves, tree = tree_flatten(output)
        all_tokens = (self._rows, sum(self._lengths))
        leaves = [
            self._own(x) if isinstance(x, Tensor) and x.dim() == 3 and x.shape[:2] == all_tokens else x for x in leaves
        ]
        return tree_unflatten(leaves, tree)

    def _is_own(self, x: Any) -> bool:
        own = (self._rows, self._lengths[self._mine])
        return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[:2] == own

    def _own(self, x: Tensor) -> Tensor:
        return x.split(self._lengths, dim=1)[self._mine]

    def _whole(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange.both(self._mine, x), dim=1)

"""Bytes alive in a traced backward, layer by layer, and the operations between the head and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from rotorch.traced.live_storages import LiveStorages, tensors_in


def is_trained(parameter: nn.Parameter) -> bool:
    """True if a parameter gets gradients."""
    return parameter.requires_grad


@dataclass(frozen=True)
class Interval:
    """A part of a layer's backward, which ends when the gradient of a weight is made, or with the backward.

    Attributes:
        made: bytes of the layer's gradients that were made before.
        alive: after each change, bytes beyond those that were alive when the layer's backward began.
    """

    made: int
    alive: list[int]


_AS_IT_WAS = ("View", "UnsafeView", "Slice", "Alias", "ToCopy", "Clone", "Transpose", "Squeeze", "Unsqueeze")
"""What a node of autograd is called that changes no value but by rounding."""


def _keeps(node: Node, *, numel: int) -> bool:
    """True if an operation keeps a tensor of so many elements for its backward."""
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return any(isinstance(each, Tensor) and each.numel() == numel for each in saved)


def _path(start: Node | None, stop: Node | None) -> list[Node]:
    """The nodes from one to another, without that one, by any way; none if there is no way."""
    ways: list[list[Node]] = [] if start is None or stop is None else [[start]]
    seen: set[Node] = set()
    while ways:
        way = ways.pop()
        for node, _ in way[-1].next_functions:
            if node is stop:
                return way
            if node is not None and node not in seen:
                seen.add(node)
                ways.append([*way, node])
    return []


class Backwards:
    """Bytes alive in the backward of each layer, from one gradient of a weight to the next, and behind the layers.

    Args:
        live: counts them.

    Attributes:
        behind: the most between the head and the last layer, beyond those alive when that one's backward began.
    """

    def __init__(self, live: LiveStorages) -> None:
        self.behind = 0
        self._live = live
        self._found: dict[str, list[Interval]] = {}
        self._base = self._made = 0
        self._is_behind = False
        self._logits: Tensor | None = None

    def of(self, name: str) -> list[Interval]:
        """Returns the intervals of a layer's backward."""
        return self._found.get(name, [])

    def watch(self, name: str, layer: nn.Module) -> None:
        """Watches a layer of a model that nobody uses behind the trace: its hooks stay."""

        def begins(_: Tensor) -> None:
            self._found[name], self._made, self._base = [], 0, self._live.made_bytes()
            since = self._live.made_since()
            if self._is_behind:
                self.behind, self._is_behind = max(since) - self._base, False

        def ends(_: Tensor) -> None:
            if self._found.get(name):
                self._note(name)

        def made(weight: Tensor) -> None:
            self._note(name)
            self._made += weight.nbytes

        def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.requires_grad:
                hidden.register_hook(ends)

        def gave(_: nn.Module, __: Any, output: Any) -> None:
            hidden = next(tensors_in(output))
            if hidden.requires_grad:
                hidden.register_hook(begins)

        for weight in filter(is_trained, layer.parameters()):
            weight.register_post_accumulate_grad_hook(made)
        layer.register_forward_pre_hook(given, with_kwargs=True)
        layer.register_forward_hook(gave)

    def watch_head(self, head: nn.Module) -> None:
        """Watches what lies between a head and the last layer."""

        def begins(_: Tensor) -> None:
            self._live.made_since()
            self._is_behind = True

        def given(_: nn.Module, args: tuple[Any, ...]) -> None:
            hidden = next(tensors_in(args))
            if hidden.requires_grad:
                hidden.register_hook(begins)

        def gave(_: nn.Module, __: Any, output: Any) -> None:
            self._logits = next(tensors_in(output))

        head.register_forward_pre_hook(given)
        head.register_forward_hook(gave)

    def on_logits(self, loss: Tensor) -> tuple[int, int]:
        """Numbers of element-wise operations between the head and a loss, and of those that keep one of its tensors.

        Asked for before the loss's backward. Operations of a cross entropy itself are no part of them; of another loss
        nothing is known.
        """
        logits, self._logits = self._logits, None
        path = [] if logits is None else _path(loss.grad_fn, logits.grad_fn)
        names = [node.name() for node in path]
        ends = [place for place, name in enumerate(names) if name.startswith("LogSoftmax")]
        if logits is None or not ends:
            return 0, 0
        between = [node for node in path[ends[-1] + 1 :] if not node.name().startswith(_AS_IT_WAS)]
        return len(between), sum(_keeps(node, numel=logits.numel()) for node in between)

    def _note(self, name: str) -> None:
        if name in self._found:
            alive = [now - self._base for now in self._live.made_since()]
            self._found[name].append(Interval(self._made, alive))

"""Shards in the memory of an inner model: the outer one's DTensors lie over the same memory, as do gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rotorch.hold.sharded_weights import Memory, ShardPlacement
from rotorch.shard.sharded_weight import ShardedWeight, dtensor_like


class InnerMemory(Memory):
    """The memory of an inner model's weights, as far as this rank owns them.

    The inner model puts tensors into the module for a pass, and has the rule for gradients of earlier steps: they are
    handed to it before a step. Weights that it does not hold are empty here.

    Args:
        inner: the inner model's weights by name, borrowed ones included.
        owned: names of the weights that this rank owns.
    """

    def __init__(self, inner: Mapping[str, ShardedWeight], *, owned: set[str]) -> None:
        super().__init__()
        self._inner, self._owned = inner, owned

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._inner[placement.weight.name].local if self.has_values(placement.weight.name) else None

    def has_values(self, name: str) -> bool:
        return name in self._owned

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter | None:
        return None  # the inner model puts the tensors of a pass into the module

    def adds_in_place(self, name: str) -> bool:
        return True

    def gradient_goes(self, name: str) -> bool:
        return name in self._owned and self._inner[name].gradient_goes

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Hands gradients that the user has not cleared to the inner model, which starts next."""
        for name, inner in self._inner.items():
            held = weights[name]
            # The user sees, and may have frozen, the outer parameter only.
            inner.parameter.requires_grad_(held.parameter.requires_grad)
            before = held.local_grad if name in self._owned else None  # a borrowed weight's is of this step only
            if before is None:
                inner.parameter.grad = None
            # Same address: the inner model has this gradient already, and adds to it in place.
            elif inner.local_grad is None or inner.local_grad.data_ptr() != before.data_ptr():
                inner.parameter.grad = dtensor_like(inner.parameter, before)

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """The inner model's completed gradients; zeros for unused weights, since other ranks may have used them."""
        found = {}
        for name, held in weights.items():
            if held.parameter.requires_grad:
                gradient = self._inner[name].local_grad if name in self._owned else None
                if gradient is not None:  # known only now: a sum over ranks may have put it where it stays
                    held.gradient_stays = self._inner[name].gradient_stays
                found[name] = torch.zeros_like(held.local) if gradient is None else gradient
        return found

    def break_off(self, weights: Mapping[str, ShardedWeight], error: BaseException) -> None:
        """Drops earlier gradients if the inner model has dropped any: they lie in the same memory."""
        gone = [
            name
            for name in self._owned
            if weights[name].parameter.grad is not None and self._inner[name].parameter.grad is None
        ]
        for held in weights.values() if gone else ():
            held.parameter.grad = None

"""Gradients in few flat buffers: one for all weights whose gradients are summed over the same ranks.

A shard may be held by several ranks, over which its gradient is summed after backward; so such gradients lie side by
side from the beginning, autograd adds to them in place, and a sum is one message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotorch.comm.axis_group import AxisGroup
from rotorch.hold.sharded_weights import Memory, ShardPlacement
from rotorch.shard.sharded_weight import ShardedWeight


class FlatGradients(Memory):
    """Gradients side by side; shards in memory that is passed in, so that other ranks can read them.

    Args:
        sums: by name, the axis groups over which a gradient is summed, one after another.
        homes: by name, memory for a shard; the others get memory of their own.
    """

    def __init__(self, *, sums: Mapping[str, tuple[AxisGroup, ...]], homes: Mapping[str, Tensor]) -> None:
        super().__init__(gradients_stay=True)
        self._axis_groups, self._homes = dict(sums), dict(homes)
        self._flat: dict[tuple[tuple[AxisGroup, ...], torch.dtype], Tensor] = {}
        self._in_flat: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._homes.get(placement.weight.name)

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        super().start(weights)
        if not torch.is_grad_enabled():  # an evaluation leaves gradients as they are
            return
        if not self._flat:  # not before the first step: until then the user may freeze weights
            self._lay_out(weights)
        for flat in self._flat.values():
            # Zeros, not None: the whole buffer is summed, also for weights that no pass of this rank uses.
            flat.zero_()
        for name, gradient in self._in_flat.items():
            leaf = weights[name].leaf
            assert leaf is not None
            # Autograd adds in place to a gradient that is there, so every step's gradients stay in the buffer.
            leaf.grad = gradient
        self._versions = {name: gradient._version for name, gradient in self._in_flat.items()}

    def _lay_out(self, weights: Mapping[str, ShardedWeight]) -> None:
        alike: dict[tuple[tuple[AxisGroup, ...], torch.dtype], list[ShardedWeight]] = {}
        for name, held in weights.items():
            if held.leaf is not None and held.leaf.requires_grad:
                alike.setdefault((self._axis_groups[name], held.local.dtype), []).append(held)
        for key, same in alike.items():
            sizes = [held.local.numel() for held in same]
            self._flat[key] = torch.empty(sum(sizes), dtype=key[1], device=same[0].local.device)
            for held, part in zip(same, self._flat[key].split(sizes), strict=True):
                # .data: then each part counts the writes into it alone, by which `unused` knows it.
                self._in_flat[held.name] = part.view_as(held.local).data

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        return [
            name
            for name, gradient in self._in_flat.items()
            if gradient._version == self._versions[name] and weights[name].parameter.requires_grad
        ]

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """Sums each buffer over its ranks. A weight that no pass has used counts as zeros."""
        for (axis_groups, _), flat in self._flat.items():
            for axis_group in axis_groups:
                # One after another: together the sums over single axes are the sum over all their ranks.
                axis_group.all_reduce(flat)
        return super().complete(weights)

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        return list(self._flat.values())

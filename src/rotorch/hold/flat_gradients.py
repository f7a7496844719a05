"""Gradients in few flat buffers: one for all weights whose gradients are summed over the same ranks.

A shard may be held by several ranks, over which its gradient is summed; so such gradients lie side by side from the
beginning, autograd adds to them in place, and few messages sum them.

Over messages a sum over one axis leaves in parts while backward goes on (`early_sums.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rotorch.comm.axis_group import AxisGroup
from rotorch.hold.early_sums import EarlySums, Part, in_runs
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
        self._early = EarlySums(())

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._homes.get(placement.weight.name)

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        super().start(weights)
        if not torch.is_grad_enabled():  # an evaluation leaves gradients as they are
            return
        if not self._flat:  # not before the first step: until then the user may freeze weights
            self._lay_out(weights)
        self._early.start()  # before zeros are written: sums of a step that broke off write to the buffer
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
        parts: list[Part] = []
        for name, held in weights.items():
            if held.leaf is not None and held.leaf.requires_grad:
                alike.setdefault((self._axis_groups[name], held.local.dtype), []).append(held)
        for key, same in alike.items():
            sizes = [held.local.numel() for held in same]
            self._flat[key] = torch.empty(sum(sizes), dtype=key[1], device=same[0].local.device)
            for held, part in zip(same, self._flat[key].split(sizes), strict=True):
                # .data: then each part counts the writes into it alone, by which `unused` knows it.
                self._in_flat[held.name] = part.view_as(held.local).data
            if self._leaves_early(key[0]):
                parts += self._in_parts(self._flat[key], same, axis_group=key[0][0])
        self._early = EarlySums(parts)

    @staticmethod
    def _leaves_early(axis_groups: Sequence[AxisGroup]) -> bool:
        return len(axis_groups) == 1 and axis_groups[0].transport == "messages"

    @staticmethod
    def _in_parts(flat: Tensor, same: Sequence[ShardedWeight], *, axis_group: AxisGroup) -> list[Part]:
        leaves = {held.name: held.leaf for held in same if held.leaf is not None}
        sizes = {held.name: held.local.numel() for held in reversed(same)}
        runs, parts, stop = in_runs(list(sizes.items())), [], flat.numel()
        for run in runs:
            start = stop - sum(sizes[name] for name in run)
            neighbours = flat[start:stop]
            parts.append(
                Part(
                    run,
                    lambda neighbours=neighbours: [neighbours],
                    axis_group.all_reduce_later,
                    leaves=[leaves[name] for name in run],
                )
            )
            stop = start
        return parts

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Encloses the forward and backward of a micro-batch."""
        return self._early.micro_batch(last=last)

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        return [
            name
            for name, gradient in self._in_flat.items()
            if gradient._version == self._versions[name] and weights[name].parameter.requires_grad
        ]

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """Sums each buffer over its ranks. A weight that no pass has used counts as zeros."""
        self._early.send_rest()
        for (axis_groups, _), flat in self._flat.items():
            for axis_group in () if self._leaves_early(axis_groups) else axis_groups:
                # One after another: together the sums over single axes are the sum over all their ranks.
                axis_group.all_reduce(flat)
        self._early.wait()
        return super().complete(weights)

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        return list(self._flat.values())

"""Gradients in few flat buffers: one for all weights whose gradients are summed over the same ranks.

A shard may be held by several ranks, over which its gradient is summed; so such gradients lie side by side from the
beginning, autograd adds to them in place, and few messages sum them.

[Note: under backward]
    Over messages a sum over one axis leaves in parts while backward goes on: a part when the last micro-batch has added
    to all of its weights. Backward comes to the last weights first, so parts leave from the last on, in the same order
    on every rank, whatever each has used; parts that were not reached leave after backward. How often a micro-batch
    adds to a weight (more than once, where a checkpoint in it runs a backward of its own) is learned from the steps
    before: the first one sums everything after backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rotorch.comm.axis_group import AxisGroup, Wait
from rotorch.core.errors import RankFailure
from rotorch.hold.sharded_weights import Memory, ShardPlacement
from rotorch.shard.sharded_weight import ShardedWeight

_PARTS = 8
"""Of a buffer: the last one to leave, which nothing hides, is as small a part of it; messages stay few."""


@dataclass
class _Part:
    """Neighbours in a buffer that leave together.

    Attributes:
        names: of the weights.
        flat: their gradients.
        axis_group: over which they are summed.
        versions: of the gradients when the sum left; None before that.
        wait: for the sum.
    """

    names: tuple[str, ...]
    flat: Tensor
    axis_group: AxisGroup
    versions: dict[str, int] | None = None
    wait: Wait | None = field(default=None, repr=False)


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
        self._parts: list[_Part] = []
        """In the order in which they leave."""
        self._added: Counter[str] = Counter()
        """How often the last micro-batch of this step has added to a gradient."""
        self._expected: Counter[str] | None = None
        """The most of the steps so far."""
        self._is_last = False

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._homes.get(placement.weight.name)

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        super().start(weights)
        if not torch.is_grad_enabled():  # an evaluation leaves gradients as they are
            return
        if not self._flat:  # not before the first step: until then the user may freeze weights
            self._lay_out(weights)
        for part in self._parts:
            if part.wait is not None:  # of a step that broke off: it writes to the buffer
                part.wait()
            part.versions = part.wait = None
        self._added.clear()
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
            axis_groups, _ = key
            if len(axis_groups) == 1 and axis_groups[0].transport == "messages":
                self._cut(self._flat[key], same, axis_group=axis_groups[0])

    def _cut(self, flat: Tensor, same: Sequence[ShardedWeight], *, axis_group: AxisGroup) -> None:
        """Cuts a buffer into parts that leave under backward."""
        runs: list[list[ShardedWeight]] = [[]]
        least = -(-flat.numel() // _PARTS)
        for held in reversed(same):
            if sum(other.local.numel() for other in runs[-1]) >= least:
                runs.append([])
            runs[-1].append(held)
        stop = flat.numel()
        for run in runs:
            start = stop - sum(held.local.numel() for held in run)
            self._parts.append(_Part(tuple(held.name for held in run), flat[start:stop], axis_group))
            stop = start
            for held in run:
                assert held.leaf is not None
                held.leaf.register_post_accumulate_grad_hook(partial(self._note, held.name))

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """The block in which gradients of a step become complete (see [Note: under backward])."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False

    def _note(self, name: str, _: Tensor) -> None:
        """Called when autograd has added to a gradient."""
        if not self._is_last:
            return
        self._added[name] += 1
        if (expected := self._expected) is None:
            return
        for part in self._parts:
            if part.versions is None:
                if not all(0 < expected[each] <= self._added[each] for each in part.names):
                    return
                self._send(part)

    def _send(self, part: _Part) -> None:
        part.versions = {name: self._in_flat[name]._version for name in part.names}
        part.wait = part.axis_group.all_reduce_later(part.flat)

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        return [
            name
            for name, gradient in self._in_flat.items()
            if gradient._version == self._versions[name] and weights[name].parameter.requires_grad
        ]

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """Sums each buffer over its ranks. A weight that no pass has used counts as zeros.

        Raises:
            RankFailure: a gradient was added to after its sum had left.
        """
        for part in self._parts:
            if part.versions is None:
                self._send(part)
        in_parts = {(part.axis_group,) for part in self._parts}
        for (axis_groups, _), flat in self._flat.items():
            for axis_group in axis_groups if axis_groups not in in_parts else ():
                # One after another: together the sums over single axes are the sum over all their ranks.
                axis_group.all_reduce(flat)
        for part in self._parts:
            assert part.wait is not None and part.versions is not None
            part.wait()
            part.wait = None
            if late := [name for name, version in part.versions.items() if self._in_flat[name]._version != version]:
                raise RankFailure(
                    f"a step adds more often to the gradient of {late[0]!r} than those before, after its sum over "
                    "ranks had left. Use a weight as often in every step, and torch's checkpoint with "
                    "use_reentrant=False"
                )
        if self._added:  # nothing in a loop of the user's own, which tells no last micro-batch
            self._expected = (self._expected or Counter()) | self._added
        return super().complete(weights)

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        return list(self._flat.values())

"""Sums over replicas that a loop's backwards leave to a later one, as torch's DistributedDataParallel has `no_sync`.

Gradients that are not summed yet stay in the parameters; a backward that sums adds its own to them first. Gradients
that were summed before have one more sum before them then: they are kept on the first replica, and the others have
zeros. An optimizer's step in between is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotorch.shard.sharded_weight import ShardedWeight


@dataclass
class PutOffSums:
    """State of this rank's gradients: summed over replicas, or not yet. Equal on all ranks.

    Attributes:
        share: the part that what all replicas have alike must have of a sum on this one: 1 on the first one, or by what
            the strategy divides sums, and 0 on the others.
        asked: the step that is going on leaves its sums to a later one (see `asking`).
        due: names of weights whose gradients, if there are any, have not been summed. One that is frozen meanwhile
            stays among them: sums do not reach it.
    """

    share: float
    asked: bool = False
    due: set[str] = field(default_factory=set)

    def is_summed(self, name: str) -> bool:
        """True if a weight's gradient, if there is one, is that of all ranks."""
        return name not in self.due

    @contextmanager
    def asking(self, asked: bool, *, changes: bool) -> Iterator[None]:
        """Encloses a step.

        Args:
            asked: it leaves its sums to a later one.
            changes: gradients; if not, they are put back as they were, behind it.
        """
        before, self.asked = set(self.due), asked
        try:
            yield
        finally:
            self.asked = False
            if not changes:
                self.due = before

    @torch.no_grad()
    def begin(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Begins a step with gradients: those of earlier steps become parts of a sum, if this one leaves its own."""
        there = {name for name, held in weights.items() if held.parameter.grad is not None}
        self.due &= there
        if not self.asked:
            return
        for name in there - self.due:
            held = weights[name]
            gradient = held.parameter.grad
            if gradient is None or not held.parameter.requires_grad:
                continue
            self.due.add(name)  # from here on, also if the step breaks off
            held.parameter.grad = self.part_of(gradient)

    def part_of(self, gradient: Tensor) -> Tensor:
        """This rank's part in a sum that shall be a gradient which all replicas have; another tensor, unless it is all.

        The loop may have kept the given one. No product with 0, of which infinite gradients have none.
        """
        if self.share == 1.0:
            return gradient
        return gradient * self.share if self.share else torch.zeros_like(gradient)

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Ends it: gradients of trained weights are summed now, or not yet."""
        trained = {name for name, held in weights.items() if held.parameter.requires_grad}
        self.due = self.due | trained if self.asked else self.due - trained

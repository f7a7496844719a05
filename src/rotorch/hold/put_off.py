"""Sums over replicas that a loop's backwards leave to a later one, as torch's DistributedDataParallel has `no_sync`.

Gradients that are not summed yet stay in the parameters; a backward that sums adds its own to them first. Gradients
that were summed before have one more sum before them then: they are kept on the first replica, and the others have
zeros. An optimizer's step in between is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rotorch.shard.sharded_weight import ShardedWeight


@dataclass
class PutOffSums:
    """State of this rank's gradients: summed over replicas, or not yet. Equal on all ranks.

    Attributes:
        share: the part that what all replicas have alike must have of a sum on this one: 1 on the first one, or by what
            the strategy divides sums, and 0 on the others.
        asked: the step that is going on leaves its sums to a later one (see `asking`).
        are_due: gradients that are there have not been summed.
    """

    share: float
    asked: bool = False
    are_due: bool = False

    def are_done(self) -> bool:
        """True if gradients that are there are those of all ranks."""
        return not self.are_due

    @contextmanager
    def asking(self, asked: bool) -> Iterator[None]:
        """Encloses a step that leaves its sums to a later one, if `asked`."""
        self.asked = asked
        try:
            yield
        finally:
            self.asked = False

    @torch.no_grad()
    def begin(self, weights: Iterable[ShardedWeight]) -> None:
        """Begins a step with gradients: those of earlier steps become parts of a sum, if this one leaves its own."""
        there = [held for held in weights if held.parameter.grad is not None]
        if not there:
            self.are_due = False
        if not self.asked or self.are_due:
            return
        self.are_due = bool(there)  # from here on, also if the step breaks off
        for held in there if self.share != 1.0 else ():
            gradient = held.parameter.grad
            # Another tensor: the loop may have kept this one. Not a product: infinite gradients have no share of 0.
            held.parameter.grad = gradient * self.share if self.share else torch.zeros_like(gradient)

    def end(self) -> None:
        """Ends it: all gradients that are there are summed now, or none."""
        self.are_due = self.asked

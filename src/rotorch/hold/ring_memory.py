"""Shards that are the home slices of a ring, and gradients that come home to it; what nobody cuts lies beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rotorch.comm.ring import Ring
from rotorch.core.errors import RankFailure
from rotorch.hold.sharded_weights import Memory, ShardPlacement
from rotorch.ops.rotate import RotatingUnit
from rotorch.shard.sharded_weight import ShardedWeight


class RingMemory(Memory):
    """The weights of rotating units in the ring's memory; the others each in its own.

    A step adds to gradients of slices where they lie, also to those that the user has not cleared: they are not set
    aside. So a step that breaks off while it adds to earlier gradients takes all of them with it.

    Args:
        ring: of this rank.
        units: what goes round.
    """

    def __init__(self, ring: Ring, units: Sequence[RotatingUnit]) -> None:
        super().__init__(gradients_stay=ring.size > 1)  # of whole weights: in the buffers of their sums
        self._ring = ring
        self._units = {unit.item: [weight.name for weight in unit.unit.weights] for unit in units if unit.trained}
        self._slices: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._adds_up = False
        """Whether this step adds to gradients that were there before it."""
        for unit in units:
            names = [weight.name for weight in unit.unit.weights]
            slices = unit.slices.views(ring.home_weights(unit.item), index=ring.position)
            gradients = unit.slices.views(ring.home_gradients(unit.item), index=ring.position)
            self._slices |= zip(names, slices, strict=True)
            self._gradients |= zip(names, gradients, strict=True)

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._slices.get(placement.weight.name)

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter | None:
        return None if held.name in self._slices else super().leaf(placement, held)

    def gradient_stays(self, name: str) -> bool:
        return name in self._gradients or super().gradient_stays(name)

    def adds_in_place(self, name: str) -> bool:
        return name in self._gradients

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Opens the ring for a step. All ranks."""
        super().start(weights)
        fresh = [True] * len(self._ring.numels)
        for item, names in self._units.items():
            fresh[item] = self._nothing_accumulated([weights[name] for name in names])
        self._adds_up = torch.is_grad_enabled() and not all(fresh)
        self._ring.start(fresh=fresh)

    def _nothing_accumulated(self, unit: Sequence[ShardedWeight]) -> bool:
        """Whether the user has cleared a unit's gradients; if only some of them, those become zero."""
        if all(held.parameter.grad is None for held in unit):
            return True
        for held in unit:
            buffer, there = self._gradients[held.name], held.local_grad
            if there is None:
                buffer.zero_()
            elif there.data_ptr() != buffer.data_ptr():
                buffer.copy_(there)
        return False

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """What has come home; the ring itself has ended its step before."""
        home = {
            name: self._gradients[name]
            for item, names in self._units.items()
            for name in names
            if not self._ring.fresh[item] and weights[name].parameter.requires_grad
        }
        return {**super().complete(weights), **home}

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Slices that have moved return. All ranks."""
        self._adds_up = False
        self._ring.restore_owners()

    def break_off(self, weights: Mapping[str, ShardedWeight], error: BaseException) -> None:
        """Slices return if all ranks are here; the error says so if they cannot."""
        try:
            self._ring.restore_owners(after=error)
        except RankFailure as lost:
            error.add_note(str(lost))
        for held in weights.values():
            if self._adds_up:  # a part of this step is in them, on some ranks more than on others
                held.parameter.grad = None
            held.put_back()
        self._adds_up = False

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        whole = (held.local_grad for name, held in weights.items() if name not in self._gradients)
        return [self._ring.all_home_gradients, *(grad for grad in whole if grad is not None)]

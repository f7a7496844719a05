"""Shards in a ring's home slices, and gradients that come home to it; replicated weights lie in memory of their own."""

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

    A step adds to gradients of slices in place, also to ones that the user has not cleared: these are not set aside. So
    a step that breaks off while it adds to earlier gradients loses all of them.

    Args:
        ring: of this rank.
        units: the units whose slices rotate.
    """

    def __init__(self, ring: Ring, units: Sequence[RotatingUnit]) -> None:
        super().__init__()
        self._ring = ring
        self._trained = [unit for unit in units if unit.trained]
        self._names = {unit.item: [weight.name for weight in unit.unit.weights] for unit in units}
        self._slices: dict[str, Tensor] = {}
        self._staying: dict[int, list[Tensor]] = {}
        """By unit: views of gradients that stay."""
        self._adds_up = False
        """True if this step adds to gradients of earlier steps."""
        for unit in units:
            home = _in_one([ring.home_weights(item) for item in unit.items])
            self._slices |= zip(self._names[unit.item], unit.slices.home.views(home, index=ring.position), strict=True)

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        return self._slices.get(placement.weight.name)

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter | None:
        return None if held.name in self._slices else super().leaf(placement, held)

    def gradient_stays(self, name: str) -> bool:
        return name in self._slices or super().gradient_stays(name)

    def adds_in_place(self, name: str) -> bool:
        return name in self._slices

    def gradient_goes(self, name: str) -> bool:
        return name in self._slices and not self._ring.gradients_stay

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Opens the ring for a step. All ranks."""
        super().start(weights)
        for unit in self._trained:
            unit.reached.clear()
        fresh = [True] * len(self._ring.numels)
        for unit in self._trained:
            nothing = self._nothing_accumulated(unit, [weights[name] for name in self._names[unit.item]])
            for item in unit.items:
                fresh[item] = nothing
        self._adds_up = torch.is_grad_enabled() and not all(fresh)
        self._ring.start(fresh=fresh)

    def _nothing_accumulated(self, unit: RotatingUnit, held: Sequence[ShardedWeight]) -> bool:
        """Returns True if the user has cleared a unit's gradients; if only some of them, zeroes those."""
        gradients = [weight.local_grad if weight.parameter.requires_grad else None for weight in held]
        if all(there is None for there in gradients):
            return True
        if not torch.is_grad_enabled():  # an evaluation adds nothing
            return False
        for buffer, there in zip(self._gradients(unit), gradients, strict=True):
            # The ring adds to all weights of a unit or overwrites all: one flag per item.
            if there is None:
                buffer.zero_()
            elif there.data_ptr() != buffer.data_ptr():
                # The user has put a gradient of their own there: the step adds to it, in the ring's memory.
                buffer.copy_(there)
        return False

    def _gradients(self, unit: RotatingUnit) -> list[Tensor]:
        """Views of the gradients of a unit's weights where the ring has them now."""
        found = self._staying.get(unit.item)
        if found is None:
            home = _in_one([self._ring.home_gradients(item) for item in unit.items])
            found = unit.slices.home.views(home, index=self._ring.position)
            if self._ring.gradients_stay:
                self._staying[unit.item] = found
        return found

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        home = [
            name
            for unit in self._trained
            for number, name in enumerate(self._names[unit.item])
            if number not in unit.reached and weights[name].parameter.requires_grad
        ]
        return [*super().unused(weights), *home]

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """The gradients that have come home; the ring has ended its step before."""
        home: dict[str, Tensor] = {}
        for unit in self._trained:
            for item in unit.items:
                if self._ring.fresh[item]:
                    # No backward has come to it: it holds an earlier step's. Other replicas may have used it.
                    self._ring.home_gradients(item).zero_()
            found = zip(self._names[unit.item], self._gradients(unit), strict=True)
            home |= {name: gradient for name, gradient in found if weights[name].parameter.requires_grad}
        return {**super().complete(weights), **home}

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Returns moved slices to their owners. All ranks."""
        self._adds_up = False
        self._ring.restore_owners()

    def break_off(self, weights: Mapping[str, ShardedWeight], error: BaseException) -> None:
        """Returns slices to their owners if all ranks are here; else adds a note to `error`."""
        try:
            self._ring.restore_owners(after=error)
        except RankFailure as lost:
            error.add_note(str(lost))
        for held in weights.values():
            if self._adds_up:  # they hold some of this step's additions, not the same on every rank
                held.parameter.grad = None
            held.put_back()
        self._adds_up = False

    def whole_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        """Gradients of replicated weights."""
        whole = (held.local_grad for name, held in weights.items() if name not in self._slices)
        return [grad for grad in whole if grad is not None]

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        items = [item for unit in self._trained for item in unit.items]  # frozen units have none
        return [*self._ring.home_gradients_of(items), *self.whole_gradients(weights)]


def _in_one(parts: Sequence[Tensor]) -> Tensor:
    """The memory of parts that lie side by side, as one tensor."""
    first, numel = parts[0], sum(part.numel() for part in parts)
    return first if len(parts) == 1 else first.as_strided((numel,), (1,))

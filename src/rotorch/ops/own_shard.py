"""The one slice of a module's weights that stays on a rank, among ranks that share a batch.

Inputs are equal on all ranks, and an output is a part of a sum: so the module runs once, unchanged, between a pair of
conjugate operations (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rotorch.core.spec import Unit
from rotorch.ops.conjugates import ParallelRegion
from rotorch.ops.partial_module import ModuleSlices, Prove, RunOnSlice
from rotorch.ops.random_state import own_rng


class OwnShard(ModuleSlices):
    """This rank's slice of a unit, which the module has during a pass.

    Args:
        module: the unit's.
        unit: its description.
        shards: this rank's part of each weight by name.
        region: the operations at the module's inputs and outputs.
        strategy: kind of the strategy, for errors.

    [Note: nothing on this rank]
        Where there are fewer groups (heads) than ranks, the last ranks hold nothing of the unit. They run it on zeros
        of the first slice's shape, which give zeros of the right shape for any code of the module, while the others
        compute.
    """

    def __init__(
        self, module: nn.Module, unit: Unit, *, shards: Mapping[str, Tensor], region: ParallelRegion, strategy: str
    ) -> None:
        self.strategy, self.num_slices = strategy, region.axis_group.size
        self._module, self._unit, self._shards, self._region = module, unit, shards, region
        # Such a rank takes part in every sum all the same, or the others would wait for it.
        self._is_empty = not any(shards[w.name].numel() for w in unit.weights)

    @property
    def index(self) -> int:
        return 0 if self._is_empty else self._region.axis_group.position

    def own(self) -> list[Tensor] | None:
        return None if self._is_empty else [self._shards[w.name].detach() for w in self._unit.weights]

    def total(self, run: RunOnSlice, leaves: list[Any], prove: Prove) -> list[Tensor]:
        """Runs the module once and sums over ranks."""
        region, active = self._region, self._module.training
        entered = region.enter_all(leaves)
        weights = self._zeros() if self._is_empty else None  # the pass has put the shards there
        with own_rng(region.axis_group.position, like=leaves, active=active), region.inside():
            parts = run(weights, entered)
        # Before the proof, which may raise on one rank only: the others wait in these sums.
        sums = [region.leave(part) for part in parts]
        prove(lambda weights: run(weights, entered)[0])
        return sums

    def _zeros(self) -> list[Tensor]:
        n = self.num_slices
        return [self._shards[w.name].new_zeros(w.slice_shape(num_slices=n, index=0)) for w in self._unit.weights]

"""A layout of a run with all that its time depends on: the model, its batch, and speeds of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from rotorch.core.layout import Layout
from rotorch.core.shared_context import SequenceRanks
from rotorch.core.spec import Unit
from rotorch.core.strategy import Strategy, sharing, with_visits
from rotorch.core.traffic import MicroBatch
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.prediction import unit_layout
from rotorch.planner.shared_tokens import own_tokens
from rotorch.planner.speeds import Group, Speeds
from rotorch.planner.workload import Cutting, FoldedModel, Numerics
from rotorch.strategies import sequence_ranks


@dataclass(frozen=True)
class Planned:
    """A layout with all that its time depends on.

    Attributes:
        model: with its units as the innermost strategy holds them.
        strategies: outermost first.
        batch: one micro-batch of one rank, or of several that share its sequences.
        accumulation: micro-batches of a step.
        speeds: of the cluster.
        numerics: numerics of the model.
        parts: layers of each pipeline stage, where there are stages.
        groups: positions of the ranks of each axis; left out: as the mesh has them, innermost strategies on neighbours.
        ddp_overlaps: True if sums over replicas run beside the last backward where they can.
    """

    model: FoldedModel
    strategies: tuple[Strategy, ...]
    batch: MicroBatch
    accumulation: int
    speeds: Speeds
    numerics: Numerics
    parts: tuple[range, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    ddp_overlaps: bool = True

    @cached_property
    def stages(self) -> StageStrategy | None:
        """The strategy that cuts the model into stages, if one does."""
        return next((s for s in self.strategies if isinstance(s, StageStrategy)), None)

    @cached_property
    def gathers_stages(self) -> bool:
        """True if a stage is gathered whole before it computes."""
        gathering = any(strategy.gathers_weights for strategy in (*sharing(self.strategies), self.inner))
        return self.stages is not None and gathering

    @cached_property
    def inner(self) -> Strategy:
        """The innermost strategy."""
        return self.strategies[-1]

    @cached_property
    def ring(self) -> Strategy | None:
        """The strategy whose slices visit."""
        return with_visits(self.strategies)

    @cached_property
    def sequence_ranks(self) -> SequenceRanks:
        """Ranks that share a sequence."""
        return sequence_ranks(self.strategies)

    @cached_property
    def own(self) -> MicroBatch:
        """The part of a micro-batch that one rank computes."""
        return own_tokens(self.batch, num_ranks=self.sequence_ranks.num_ranks)

    @cached_property
    def group_of(self) -> dict[str, Group]:
        """Groups of ranks by axis."""
        axes = [(axis, size) for strategy in self.strategies for axis, size in strategy.axes.items()]
        sizes = [size for _, size in axes]
        meshed = {axis: Group(size, prod(sizes[number + 1 :])) for number, (axis, size) in enumerate(axes)}
        return {**meshed, **self.groups}

    @cached_property
    def outer_axes(self) -> tuple[str, ...]:
        """Axes of replicas of what other strategies hold."""
        return tuple(axis for s in self.strategies[:-1] if s.kind == "ddp" for axis in s.axes)

    @cached_property
    def early_sums(self) -> str:
        """The gradients that are summed over replicas under backward: those of "all" units, of "layers", or "none"."""
        inside = self.strategies[1:] or self.strategies
        kind = inside[0].kind if self.ddp_overlaps and self.strategies[0].kind == "ddp" else ""
        layers = kind == "megatron" or (kind == "fsdp" and len(inside) == 1)
        return "all" if kind in ("ddp", "rtp") else "layers" if layers else "none"

    @cached_property
    def cutting(self) -> Cutting:
        """The way in which the innermost strategy, and slices that visit, cut a rank's operators."""
        ring, inner = self.ring, self.inner
        slices = 1 if ring is None else ring.num_ranks
        if inner.kind == "megatron":
            return Cutting(interior=inner.num_ranks, slices=slices)
        if ring is not None:
            return Cutting(slices=slices)
        if inner.kind == "atp":
            features = inner.axes[inner.feature_axes[0]]
            return Cutting(interior=inner.num_ranks // features, features=features)
        if inner.feature_axes:
            side = inner.axes[inner.feature_axes[0]]
            return Cutting(interior=side, features=side, steps=side)
        return Cutting()

    def layout_of(self, unit: Unit) -> Layout:
        """Layout of a unit, as ranks hold it that share what the innermost strategy holds."""
        strategies = (*sharing(self.strategies), self.inner)
        return unit_layout(unit, strategies=strategies, positions=[0] * len(strategies))

"""Bytes that autograd keeps of a layout's micro-batches until their backward, on one rank, by traced layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rotorch.core.spec import Unit, UnitKind
from rotorch.core.strategy import Strategy, sharing, with_visits
from rotorch.core.traffic import MicroBatch
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.memory_at_rest import FixedMemory, linear_features
from rotorch.planner.pipeline_time import in_flight, kept_together
from rotorch.planner.traced import PerRow, Traced, TracedLayer
from rotorch.planner.workload import FoldedModel


@dataclass(frozen=True)
class Cuts:
    """Numbers of ranks that activations are cut among: interiors of layers, the residual stream, and all around."""

    interior: float = 1.0
    stream: float = 1.0
    outside: float = 1.0


def cuts_of(strategy: Strategy) -> Cuts:
    """Returns the cuts of the innermost strategy of a layout."""
    n = float(strategy.num_ranks)
    if strategy.kind == "megatron":  # which cuts tokens inside of layers only
        return Cuts(interior=n, stream=n if strategy.token_axes else 1.0)
    if strategy.kind == "atp":
        features = strategy.axes[strategy.feature_axes[0]]
        return Cuts(interior=n / features, stream=features, outside=features)
    if strategy.feature_axes:
        side = float(strategy.axes[strategy.feature_axes[0]])
        return Cuts(interior=side, stream=side, outside=side)
    return Cuts()


@dataclass(frozen=True)
class KeptBytes:
    """Micro-batches of a layout, and what one rank keeps of them.

    Attributes:
        model: folded.
        traced: its passes.
        strategies: outermost first.
        batch: one micro-batch, of the tokens that a rank has of a sequence.
        accumulation: micro-batches of a step.
        parts: layers of each stage, where there are stages.
        slots_bytes: of buffers that grow with the batch.
        keys: by class of layers, bytes of keys and values that the layer keeps of a sequence which ranks share.
        attending: the same of what there is beside them in their backward.
        visits_by_name: of units that have a number of visits of their own.
        head_parts: in which a slice of the head visits.
        device: of ranks, "cpu" or "cuda".
    """

    model: FoldedModel
    traced: Traced
    strategies: Sequence[Strategy]
    batch: MicroBatch
    accumulation: int
    parts: Sequence[range]
    slots_bytes: float
    keys: tuple[float, ...]
    attending: tuple[float, ...]
    visits_by_name: Mapping[str, int]
    head_parts: int
    device: str

    @property
    def inner(self) -> Strategy:
        return self.strategies[-1]

    @cached_property
    def stages(self) -> StageStrategy | None:
        return next((s for s in self.strategies if isinstance(s, StageStrategy)), None)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches that each stage keeps at a time."""
        return (1,) if self.stages is None else in_flight(self.stages, self.accumulation)

    @cached_property
    def cuts(self) -> Cuts:
        return cuts_of(self.inner)

    @property
    def gathers(self) -> bool:
        """True if layers are gathered one after another."""
        gathering = self.inner.kind == "fsdp" or any(strategy.gathers_weights for strategy in self.sharing)
        return gathering and self.stages is None  # a stage is gathered at once

    @property
    def in_whole_layers(self) -> bool:
        """True if a rank of a stage computes whole layers, of which each moment of a backward is known."""
        holds = self.stages is not None and (self.inner is self.stages or self.inner.kind == "fsdp")
        return holds and not self.sharing and all(layer.backward for layer in self.traced.layers)

    @cached_property
    def ring(self) -> Strategy | None:
        """The strategy whose slices visit."""
        return with_visits(self.strategies)

    def visits(self, units: Iterable[Unit]) -> int:
        """Number of visits of units' slices, one after another; 1 without a ring."""
        if self.ring is None:
            return 1
        cut = (unit for unit in units if unit.kind is not UnitKind.REPLICATED)
        return max((self.visits_by_name.get(unit.name, self.ring.num_ranks) for unit in cut), default=1)

    def visits_in(self, number: int) -> int:
        """The same of a layer, by the number of its class."""
        return self.visits(self.model.classes[number].units)

    @cached_property
    def whole_experts(self) -> bool:
        """True if slices are sets of whole experts."""
        return any(getattr(s, "experts", "cut") == "whole" for s in (*self.sharing, self.inner))

    @property
    def mixes(self) -> bool:
        """True if layers have experts."""
        return any(layer.experts.row_bytes for layer in self.traced.layers)

    @property
    def sharing(self) -> tuple[Strategy, ...]:
        """Strategies around the innermost one whose ranks share what that one holds."""
        return sharing(self.strategies)

    @property
    def again(self) -> bool:
        """True if backward recomputes layers from their inputs."""
        return any(strategy.recomputes_layers for strategy in (*self.sharing, self.inner))

    @property
    def by_units(self) -> bool:
        """True if layers are recomputed unit by unit, a slice at a time."""
        return bool(getattr(self.ring, "recomputes_units", False))

    @property
    def rows(self) -> int:
        return self.batch.num_rows

    def _kept(self, rank: FixedMemory) -> tuple[float, float, bool, int]:
        """Bytes that autograd keeps (of all micro-batches, of one layer), presence of a head, fewest in flight."""
        stages, layers, in_flight = self.stages, self.traced.layers, self.in_flight
        each: list[float] = []
        for stage in rank.stages or (0,):
            part = self.parts[stage] if stages is not None else range(self.model.num_layers)
            here = self._of_part(stage, part)
            last = stages is None or stage == stages.num_stages - 1
            outside = self.traced.outside.of(self.rows, cut=self.cuts.outside)
            if not last:  # what is before the layers, and tables of positions, which each stage makes
                outside -= self.traced.behind.of(self.rows, cut=self.cuts.outside)
            if last and self.by_units and any(unit.kind is UnitKind.REPLICATED for unit in self.model.after):
                outside -= max((layer.given.of(self.rows) for layer in layers), default=0.0)  # the norm's output
            if stage and part and part.start not in self._again_in(stage, part):  # for the gradient that it is to have
                here += layers[self.model.pattern[part.start]].unsaved_input.of(self.rows, cut=self.cuts.stream)
            if self._again_in(stage, part):
                outside += self.traced.unsaved_shared.of(self.rows)
            if not last:  # the output is kept until its gradient comes
                here += max((layer.given.of(self.rows, cut=self.cuts.stream) for layer in layers), default=0.0)
            if last and stages is not None:  # of each micro-batch; one's are counted where the loss is
                here += self._logits_bytes
            each.append(here + outside)
        kept = sum(in_flight[stage] * bytes_ for stage, bytes_ in zip(rank.stages or (0,), each, strict=True))
        if stages is not None and (stages.splits_backward or stages.num_chunks > 1):
            kept = self._kept_together(stages, rank, each)
        has_head = stages is None or stages.num_stages - 1 in rank.stages
        kept -= self._logits_bytes if stages is not None and has_head else 0.0
        fewest = min(in_flight[stage] for stage in rank.stages or (0,))
        return kept, max(map(self._of_layer, range(len(layers))), default=0.0), has_head, fewest

    def _kept_together(self, stages: StageStrategy, rank: FixedMemory, each: Sequence[float]) -> float:
        """Bytes that all stages of a rank keep at the same time; `each`: of a micro-batch, by stage.

        Behind a backward that leaves weight gradients to be made, operands of linear layers are kept. Strategies that
        run layers their own way put nothing off.
        """
        put_off = [self._operands(stage) if self.in_whole_layers else 0.0 for stage in rank.stages]
        position = stages.stages_by_rank.index(rank.stages)
        moments = kept_together(stages, self.accumulation)[position]
        sizes = list(zip(each, put_off, strict=True))
        return max(
            sum(whole * a + late * b for (whole, late), (a, b) in zip(moment, sizes, strict=True)) for moment in moments
        )

    @property
    def _logits_bytes(self) -> float:
        """Bytes of the logits of one micro-batch that a loss keeps, on one rank; 0 if a slice at a time exists."""
        if self.model.head is None or self.ring is not None or self.cuts != Cuts():
            return 0.0
        return self._logits

    @property
    def _logits(self) -> float:
        """Bytes of the logits of one micro-batch, whole; 0 without a head."""
        if self.model.head is None:
            return 0.0
        columns = next(weight.shape[0] for weight in self.model.head.weights if len(weight.shape) == 2)
        return float(self.rows * self.batch.num_tokens * columns * self.batch.loss_itemsize)

    def _operands(self, stage: int) -> float:
        """Bytes of a stage's inputs of linear layers, and of the gradients of their outputs, of one micro-batch."""
        assert self.stages is not None
        features = 0
        for number, count in self.model.counts_of(self.parts[stage]).items():
            features += count * sum(map(linear_features, self.model.classes[number].units))
        if stage == self.stages.num_stages - 1:
            features += sum(map(linear_features, self.model.after))
        return float(features * self.rows * self.batch.num_tokens * self.batch.itemsize)

    def _of_layer(self, number: int) -> float:
        layer, keys = self.traced.layers[number], self.keys[number]
        if self.by_units and layer.attentions:  # which are not computed again
            return layer.given.of(self.rows) * 2 + layer.attention.of(self.rows) + keys
        if self.by_units:  # inputs of both of its units and of norms behind them, and for some what attention gives
            return layer.given.of(self.rows) * ((2 if self.again else 3) + self._norms_behind(number))
        if self.again:
            return layer.given.of(self.rows, cut=self.cuts.stream)
        return self._all_kept(number)

    def _norms_behind(self, number: int) -> int:
        """Norms of a layer beside those before its units: of their outputs."""
        whole = (unit for unit in self.model.classes[number].units if unit.kind is UnitKind.REPLICATED)
        weights = (weight for unit in whole for weight in unit.weights if weight.name.endswith("weight"))
        return max(0, sum(weight.shape == (self.model.width,) for weight in weights) - 2)

    def _all_kept(self, number: int) -> float:
        """A layer of which nothing is computed again."""
        layer = self.traced.layers[number]
        return self._all_of(layer, cut=self.cuts.interior, times=self.visits_in(number)) + self.keys[number]

    def _of_part(self, stage: int, part: range) -> float:
        """The layers of a stage, or of the whole model."""
        again = self._again_in(stage, part)
        others = range(again.stop, part.stop)
        found = sum(count * self._of_layer(number) for number, count in self.model.counts_of(again).items())
        return found + sum(count * self._all_kept(number) for number, count in self.model.counts_of(others).items())

    def _again_in(self, stage: int, part: range) -> range:
        """The layers of a stage that a rank computes again, of which it keeps the inputs: the first ones."""
        if self.stages is not None and self.stages.recomputes_some:
            return self.stages.recomputed(stage, part=part)
        return part if self.again or self.by_units else part[:0]

    def _redone(self, rank: FixedMemory) -> Iterable[int]:
        """Classes of the layers that a rank computes again."""
        if self.stages is None or not self.stages.recomputes_some:
            return range(len(self.traced.layers)) if self.again else ()
        again = (self._again_in(stage, self.parts[stage]) for stage in rank.stages)
        return {number for part in again for number in self.model.counts_of(part)}

    def _whole(self, number: int) -> float:
        """A layer whose interior is there again, a slice at a time where units are computed in slices."""
        if self.by_units:
            layer = self.traced.layers[number]
            slices = self.cuts.interior * self.visits_in(number)
            inside = self._all_of(replace(layer, attention=PerRow()), cut=slices, times=1)
            return inside - self._norms_behind(number) * layer.given.of(self.rows)  # whose inputs are kept
        return self._all_kept(number)

    def _all_of(self, layer: TracedLayer, *, cut: float, times: int) -> float:
        """Bytes of a layer whose interior is cut; `times`: slices of a ring that are there at once."""
        interior = layer.interior
        if self.ring is not None:  # nobody keeps slices that were cast for a visit
            interior = interior.without_constant()
        kept = layer.stream.of(self.rows, cut=self.cuts.stream) + layer.attention.of(self.rows)
        repeated = 0.0
        if not self.whole_experts:
            repeated = layer.repeated.of(self.rows) * (times - 1 / cut)
        return kept + interior.of(self.rows, cut=cut) + repeated

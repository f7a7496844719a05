"""Bytes that a rank holds whatever the batch is: at rest, by the Layouts, and what is gathered for a pass.

[Note: gathered]
    `fully_shard` has whole: the weights around the layers, from beginning to end; and during a layer's backward this
    layer, the layer fetched ahead, the gradient of each and the message that sends it, beside the head's gradient.
    Around another strategy the gradient of a layer is summed before the next one is made. A pipeline gathers a stage at
    once, and its gradients are whole until the unit of micro-batches ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotorch.core.spec import Unit, UnitKind, Weight
from rotorch.core.strategy import Strategy, sharing
from rotorch.core.whole_experts import WholeExperts
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.prediction import Prediction, predict_part
from rotorch.planner.workload import FoldedModel
from rotorch.strategies.fsdp.plan import FSDP
from rotorch.strategies.single.plan import Single


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that are whole for a while (see [Note: gathered]).

    Attributes:
        root: around the layers.
        head: the gradient of a head.
        before: the gradients of what lies before the layers.
        root_message: what sends the gradients of the root.
        block: the largest layer.
        gradient: its gradient, in the dtype of passes.
        message: what sends that, in the dtype of sums; none where gradients are sent as they are.
        layers: all layers, if they stay whole from forward to backward.
        stage: a whole stage, where that is gathered at once.
        stage_gradients: its gradients, until they are summed.
    """

    root: float = 0.0
    head: float = 0.0
    before: float = 0.0
    root_message: float = 0.0
    block: float = 0.0
    gradient: float = 0.0
    message: float = 0.0
    layers: float = 0.0
    stage: float = 0.0
    stage_gradients: float = 0.0


@dataclass(frozen=True)
class FixedMemory:
    """Memory of one rank that does not depend on the batch.

    Attributes:
        by_category: bytes of weights, gradients, optimizer, and slots.
        around: of the gradients, those of what lies around the layers.
        gathered: weights that are whole for a while.
        stages: numbers of the stages that the rank holds; none without a pipeline.
        rank: number of the rank.
    """

    by_category: dict[str, float]
    around: float
    gathered: Gathered
    stages: tuple[int, ...]
    rank: int


def at_rest(
    model: FoldedModel, *, strategies: Sequence[Strategy], parts: Sequence[range] = ()
) -> tuple[FixedMemory, ...]:
    """Returns the memory of each rank that may hold most: in a pipeline one per stage, else the first.

    Args:
        model: with its units as the innermost strategy holds them, of one layer per class.
        strategies: outermost first.
        parts: layers of each stage, where there are stages.
    """
    stages = next((s for s in strategies if isinstance(s, StageStrategy)), None)
    around = tuple(s for s in strategies if s is not stages) or (Single(),)
    if stages is not None and stages.gathers_weights and stages.ranks_per_stage > 1:
        around = (*(s for s in around if s.kind != "single"), FSDP(size=stages.ranks_per_stage))
    held_bytes = _HeldBytes(model, around)
    if stages is None:
        everything = held_bytes.of([range(model.num_layers)], first=True, last=True, borrows=False)
        gathered = held_bytes.gathered if held_bytes.gathers else Gathered()
        return (FixedMemory(everything, held_bytes.around_bytes, gathered, (), 0),)
    inside = 1
    for strategy in strategies[strategies.index(stages) + 1 :]:
        inside *= strategy.num_ranks
    whole = _HeldBytes(model, held_bytes.gathered_for, gathered=True) if held_bytes.gathers else None
    found = []
    for position, mine in enumerate(stages.stages_by_rank):
        first, last = 0 in mine, stages.num_stages - 1 in mine
        held = held_bytes.of([parts[n] for n in mine], first=first, last=last, borrows=last and not first)
        gathered = Gathered()
        if whole is not None:  # a stage is, and its gradients
            each = [whole.in_pass([parts[n]], first=n == 0, last=n == stages.num_stages - 1) for n in mine]
            weights, learned = max(each, key=sum)
            gathered = Gathered(stage=weights, stage_gradients=learned)
        outside = held_bytes.around_bytes if first or last else 0.0
        found.append(FixedMemory(held, outside, gathered, mine, position * stages.ranks_per_stage * inside))
    return tuple(found)


class _HeldBytes:
    """Bytes that ranks hold of each class of layers, and of the weights around the layers.

    Args:
        model: folded.
        strategies: outermost first.
        gathered: leave out experts that stay on their ranks.
    """

    def __init__(self, model: FoldedModel, strategies: Sequence[Strategy], *, gathered: bool = False) -> None:
        self.model, self._is_gathered = model, gathered
        self._inner, self._shared = strategies[-1], any(s.gathers_weights for s in sharing(strategies))
        self._reshards = all(getattr(strategy, "reshard", True) for strategy in strategies)
        self.gathers = self._inner.gathers_weights or self._shared
        self._before, self._after, *self._layers = (
            self._predicted(units, strategies)
            for units in (model.before, model.after, *(layer.units for layer in model.classes))
        )

    @property
    def gathered_for(self) -> tuple[Strategy, ...]:
        """The strategy that computes with what is gathered."""
        return (self._inner,) if self._shared else (Single(),)

    @property
    def around_bytes(self) -> float:
        """Bytes of gradients of weights around the layers."""
        return self._before.trained_bytes + self._after.trained_bytes

    @property
    def gathered(self) -> Gathered:
        """Bytes of weights that are whole for a while, or as much of them as the inner strategy's ranks hold."""
        around = sum(map(self._whole_bytes, (*self.model.before, *self.model.after)))
        head = self.model.head
        learns = [replace(unit, weights=trained_weights(unit)) for unit in ([] if head is None else [head])]
        tables = [replace(unit, weights=trained_weights(unit)) for unit in self.model.before]
        blocks = [sum(map(self._whole_bytes, layer.units)) for layer in self.model.classes]
        sums = [sum(self._whole_bytes(unit, summed=True) for unit in layer.units) for layer in self.model.classes]
        # fully_shard's gradients have the dtype of passes until they are sent; others are sent as they are.
        own_gradients = max(sums if self._shared else blocks, default=0.0)
        return Gathered(
            root=around,
            head=sum(self._whole_bytes(unit, summed=self._shared) for unit in learns),
            before=sum(self._whole_bytes(unit, summed=self._shared) for unit in tables),
            root_message=sum(
                self._whole_bytes(replace(unit, weights=trained_weights(unit)), summed=True)
                for unit in (*self.model.before, *self.model.after)
            ),
            block=max(blocks, default=0.0),
            gradient=own_gradients,
            message=0.0 if self._shared else max(sums, default=0.0),
            layers=0.0 if self._reshards else sum(c.count * b for c, b in zip(self.model.classes, blocks, strict=True)),
        )

    def _whole_bytes(self, unit: Unit, *, summed: bool = False) -> float:
        """Bytes of a unit while its layer is whole, in the dtype of passes, or of sums of gradients.

        0 of experts that stay on their ranks.
        """
        share = unit.num_bytes if summed else unit.bytes_in_pass
        if self._shared:
            return float(self._inner.layout(unit).resident_bytes * share / max(unit.num_bytes, 1))
        return 0.0 if unit.note(WholeExperts) is not None else float(share)

    def _predicted(self, units: Sequence[Unit], strategies: Sequence[Strategy]) -> Prediction:
        held = (unit for unit in units if not self._is_gathered or unit.note(WholeExperts) is None)
        spec = replace(self.model.spec, units=tuple(held))
        return predict_part(spec, strategies=strategies, rank=0)

    def in_pass(self, parts: Sequence[range], *, first: bool, last: bool) -> tuple[float, float]:
        """Bytes of some layers, and of what lies before and behind them, as a pass has them; of their gradients."""
        held = self._predictions(parts, first=first, last=last)
        weights = sum(count * (each.copies_bytes or each.weights_bytes) for each, count in held)
        return weights, sum(count * each.trained_bytes for each, count in held)

    def _predictions(self, parts: Sequence[range], *, first: bool, last: bool) -> list[tuple[Prediction, int]]:
        predictions = [(self._layers[n], count) for part in parts for n, count in self.model.counts_of(part).items()]
        return predictions + [(self._before, 1)] * first + [(self._after, 1)] * last

    def of(self, parts: Sequence[range], *, first: bool, last: bool, borrows: bool) -> dict[str, float]:
        """Bytes by category of some layers, and of what lies before and behind them."""
        held = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0, "slots": 0.0}
        for prediction, count in self._predictions(parts, first=first, last=last):
            for category in ("weights", "gradients", "optimizer"):
                held[category] += count * (prediction.ledger[category] or 0)
            held["slots"] = max(held["slots"], 0 if self.gathers else prediction.transient_bytes)
        if borrows and not any(unit.logits for unit in self.model.after):  # a head that the first stage owns
            held["weights"] += self._before.weights_bytes + self._before.copies_bytes
            held["gradients"] += self._before.trained_bytes
        return held


def trained_weights(unit: Unit) -> tuple[Weight, ...]:
    """Weights of a unit that get gradients."""
    return tuple(weight for weight in unit.weights if weight.trained)


def linear_features(unit: Unit) -> int:
    """Features of inputs of a unit's linear layers and of their outputs; columns of a module share an input."""
    matrices = [weight for weight in trained_weights(unit) if len(weight.shape) == 2]
    inputs = [weight.shape[1] for weight in matrices if weight.cut is None or weight.cut.dim == 1]
    shared = [weight.shape[1] for weight in matrices if weight.cut is not None and weight.cut.dim == 0]
    together = max(shared, default=0) if unit.kind is UnitKind.MODULE else sum(shared)
    return sum(weight.shape[0] for weight in matrices) + sum(inputs) + together

"""Bytes that a rank holds and sends by the Layouts, for a whole model under composed strategies. Pure Python."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from rotorch.core.layout import Layout, combine_layouts, copies_beside
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.stages import in_stage
from rotorch.core.strategy import Strategy, sharing
from rotorch.core.traffic import MicroBatch, Phase
from rotorch.core.zigzag import zigzag

_ADAMW_COUNTER_BYTES = 4
"""AdamW keeps its number of steps beside each parameter."""


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes of one rank.

    Attributes:
        weights_bytes: weights at rest.
        trained_bytes: of these, weights that get gradients, which are as large.
        transient_bytes: beyond that, in a pass.
        slots_bytes: of these, buffers that slices pass through, there from step to step.
        num_weights: number of trained parameters that it holds (parts of).
        sent_bytes: per kind of transfer, in one step of one micro-batch.
        padding_bytes: bytes that weights take beyond themselves.
        num_messages: number of messages, or collectives, in such a step.
        copies_bytes: copies of weights, in the dtype of passes, that stay from step to step.
    """

    weights_bytes: int
    transient_bytes: int
    slots_bytes: int
    num_weights: int
    sent_bytes: dict[str, int]
    trained_bytes: int
    padding_bytes: int = 0
    num_messages: int = 0
    copies_bytes: int = 0

    @property
    def ledger(self) -> dict[str, int | None]:
        """Bytes by category of `traced/live_storages.py`; None where there is no formula.

        What autograd saves, and how much of the logits exists at the highest moment of a step, depends on the model's
        code: a formula would be a guess.
        """
        return {
            "weights": self.weights_bytes + self.padding_bytes + self.copies_bytes,
            "gradients": self.trained_bytes,
            "optimizer": 2 * self.trained_bytes + _ADAMW_COUNTER_BYTES * self.num_weights,
            "activations": None,
            "slots": self.slots_bytes,
            "logits": None,
            "other": None,
        }

    @property
    def total_sent_bytes(self) -> int:
        """Bytes sent, of all kinds."""
        return sum(self.sent_bytes.values())


def predict(
    spec: ModelSpec, *, strategies: Sequence[Strategy], rank: int, batch: MicroBatch | None = None
) -> Prediction:
    """Sums the Layouts of `spec` under `strategies` (outermost first) on `rank`.

    Args:
        spec: the model.
        strategies: outermost first.
        rank: the rank to predict for.
        batch: batch of the rank, for strategies that move activations, or of all ranks that share its sequences; None
            leaves activations out.
    """
    return _predict(_units_of(spec, strategies=strategies), strategies=strategies, rank=rank, batch=batch)


def predict_ranks(
    spec: ModelSpec, *, strategies: Sequence[Strategy], batch: MicroBatch | None = None
) -> list[Prediction]:
    """Predicts for every rank, by number, as `predict` does; ranks that are alike are worked out once.

    Args:
        spec: the model.
        strategies: outermost first.
        batch: batch of each rank, for strategies that move activations; None leaves activations out.
    """
    spec = _units_of(spec, strategies=strategies)
    found: dict[tuple[int, ...], Prediction] = {}
    ranks = []
    for rank in range(prod(strategy.num_ranks for strategy in strategies)):
        positions = _positions(strategies, rank=rank)
        differ = tuple(0 if s.ranks_alike else at for s, at in zip(strategies, positions, strict=True))
        if differ not in found:
            found[differ] = _predict(spec, strategies=strategies, rank=rank, batch=batch)
        ranks.append(found[differ])
    return ranks


def _predict(spec: ModelSpec, *, strategies: Sequence[Strategy], rank: int, batch: MicroBatch | None) -> Prediction:
    """`predict` of units as strategies hold them (`_units_of`)."""
    num_weights = sum(weight.trained for weight in spec.weights)
    part = _part_of_rank(spec, strategies=strategies, rank=rank)
    return replace(predict_part(part, strategies=strategies, rank=rank, batch=batch), num_weights=num_weights)


def predict_part(
    spec: ModelSpec, *, strategies: Sequence[Strategy], rank: int, batch: MicroBatch | None = None
) -> Prediction:
    """Sums the Layouts of units as strategies hold them; `rank` takes part in all of these units."""
    positions = _positions(strategies, rank=rank)
    total = combine_layouts(unit_layout(unit, strategies=strategies, positions=positions) for unit in spec.units)
    trained = total
    if not all(weight.trained for weight in spec.weights):
        trained = combine_layouts(
            unit_layout(replace(unit, weights=weights), strategies=strategies, positions=positions)
            for unit in spec.units
            if (weights := tuple(weight for weight in unit.weights if weight.trained))
        )
    transfers = list(total.transfers)
    if batch is not None:
        own = _own_tokens(batch, strategies=strategies, positions=positions)
        for strategy, position in zip(strategies, positions, strict=True):
            given = batch if strategy.context_axes else own
            for unit in spec.units:
                transfers += strategy.activation_transfers(unit, batch=given, position=position)
    sent: dict[str, int] = defaultdict(int)
    for transfer in transfers:
        sent[str(transfer.kind)] += transfer.sent_bytes
    inner = strategies[-1].layout_of(spec, batch=batch, position=positions[-1])
    # Buffers of a strategy that shares what the innermost one holds come on top of that one's.
    transient, slots = (total.transient_bytes, total.slots_bytes) if sharing(strategies) else (0, 0)
    return Prediction(
        weights_bytes=total.resident_bytes,
        transient_bytes=inner.transient_bytes + transient,
        slots_bytes=inner.slots_bytes + slots,
        num_weights=sum(weight.trained for weight in spec.weights),
        sent_bytes=dict(sent),
        trained_bytes=trained.resident_bytes,
        padding_bytes=total.padding_bytes,
        copies_bytes=total.copies_bytes,
        num_messages=sum(transfer.num_messages for transfer in transfers if transfer.sent_bytes),
    )


def _own_tokens(batch: MicroBatch, *, strategies: Sequence[Strategy], positions: Sequence[int]) -> MicroBatch:
    """The part of a micro-batch that the rank at these positions computes."""
    for strategy, position in zip(strategies, positions, strict=True):
        for size in strategy.context_axes.values():
            chunks = zigzag(batch.num_tokens, num_ranks=size)[position % size]
            batch = replace(batch, num_tokens=sum(chunk.length for chunk in chunks))
    return batch


def part_of_rank(spec: ModelSpec, *, strategies: Sequence[Strategy], rank: int) -> ModelSpec:
    """The units that `rank` has anything to do with under `strategies` (outermost first)."""
    return _part_of_rank(_units_of(spec, strategies=strategies), strategies=strategies, rank=rank)


def _part_of_rank(spec: ModelSpec, *, strategies: Sequence[Strategy], rank: int) -> ModelSpec:
    for strategy, position in zip(strategies, _positions(strategies, rank=rank), strict=True):
        spec = strategy.part_of(spec, position=position)
    return spec


def _units_of(spec: ModelSpec, *, strategies: Sequence[Strategy]) -> ModelSpec:
    for strategy in strategies:
        spec = strategy.units_of(spec)
    return spec


def unit_layout(unit: Unit, *, strategies: Sequence[Strategy], positions: Sequence[int]) -> Layout:
    """Layout of a unit under strategies, outermost first, on the rank at these positions of theirs.

    The innermost strategy cuts the unit; each outer one then treats what that left on the rank as a whole.
    """
    *outer, (inner, at) = zip(strategies, positions, strict=True)
    layout = here = inner.layout(unit, position=at)
    copies = _copies(inner, unit, layout_of=partial(inner.layout, position=at))
    for strategy, position in reversed(outer):
        unit = inner.held(unit, layout=here, position=at)
        inside, inner, at = (inner, at), strategy, position
        here = strategy.layout_around(unit, position=position)
        if strategy.shares_inside and strategy.gathers_weights:
            layout = _sums_of_rows(layout, strategy.held(unit, layout=here, position=position), *inside)
        transient = layout.transient_bytes + here.transient_bytes
        transfers = layout.transfers + here.transfers
        layout = replace(layout, resident_bytes=here.resident_bytes, transient_bytes=transient, transfers=transfers)
        if strategy.shares_inside:  # then what passes compute with is its own
            copies = _copies(strategy, unit, layout_of=partial(strategy.layout_around, position=position))
            slots, outbox = here.slots_bytes, here.outbox_bytes
            layout = replace(layout, slots_bytes=slots, padding_bytes=here.padding_bytes, outbox_bytes=outbox)
    return replace(layout, copies_bytes=copies)


def _sums_of_rows(layout: Layout, rows: Unit, inner: Strategy, position: int) -> Layout:
    """The inner strategy's layout, whose sums at a step's end are of the rows of gradients that a rank has by then."""
    passes = tuple(t for t in layout.transfers if t.phase is not Phase.STEP)
    if len(passes) == len(layout.transfers):
        return layout
    sums = tuple(t for t in inner.layout(rows, position=position).transfers if t.phase is Phase.STEP)
    return replace(layout, transfers=passes + sums)


def _copies(strategy: Strategy, unit: Unit, *, layout_of: Callable[[Unit], Layout]) -> int:
    """Bytes of copies of a unit that stay from step to step, by the strategy that holds it."""
    stays = strategy.keeps_copies(unit) and not in_stage(unit).borrowed  # a borrowed weight's is freed with it
    return copies_beside(unit, layout_of=layout_of) if stays else 0


def _positions(strategies: Sequence[Strategy], *, rank: int) -> list[int]:
    """Returns the position of `rank` in each strategy; the innermost varies fastest."""
    positions: list[int] = []
    for strategy in reversed(strategies):
        size = prod(strategy.axes.values())
        positions.insert(0, rank % size)
        rank //= size
    return positions

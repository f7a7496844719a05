"""Costs of layers by traced passes, to cut a model into pipeline stages within a limit of memory.

[Note: a stage's peak]
    A stage that holds its weights itself is at its highest where most micro-batches are kept, beside what one of them
    has in passing (planner/memory.py, [Note: moments]): so costs of layers add up to a stage's peak, but for what is in
    passing, of which the largest counts. What is before the layers is kept with the first layer, what is behind with
    the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost, layer_costs
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.planner.traced import Traced
from rotorch.planner.workload import fold


def counted_costs(
    spec: ModelSpec, traced: Traced, *, strategies: Sequence[Strategy], batch: MicroBatch, halves: bool = False
) -> tuple[LayerCost, ...]:
    """Returns the costs of each layer; bytes of activations are counted, operations and the rest are estimates.

    Args:
        spec: the model.
        traced: its passes, for the batch's precision and tokens.
        strategies: outermost first; the innermost one has the stages.
        batch: one micro-batch of one rank.
        halves: of each half of a layer, as `layer_costs` has them.
    """
    model, rows, per_layer = fold(spec), batch.num_rows, 2 if halves else 1
    again = strategies[-1].recomputes_layers
    costs = layer_costs(spec, batch=batch, recompute=again, halves=halves)
    last = len(costs) - 1
    found = []
    for number, cost in enumerate(costs):
        place = model.pattern[number // per_layer]
        layer = traced.layers[place]
        given = layer.given.of(rows)
        whole = layer.stream.of(rows) + layer.interior.of(rows) + layer.attention.of(rows)
        is_first_half = number % per_layer == 0
        kept = whole
        if halves:
            kept = whole - layer.second.of(rows) if is_first_half else layer.second.of(rows)
        if again:
            kept = given if is_first_half else 0.0
        outside = traced.outside.of(rows) - traced.behind.of(rows) if number == 0 else 0.0
        behind = traced.behind.of(rows) if number == last else 0.0
        # Beyond what the layer keeps, in its backward; its output's gradient; a next input and a gradient under way.
        passing = max((point.row_bytes * rows + point.constant_bytes for point in layer.backward), default=0.0)
        passing += 3 * given
        loss = traced.logits.of(rows) + 2 * given if number == last else 0.0
        redone = max(loss, passing - behind + (whole - given if is_first_half else 0.0))
        found.append(
            replace(
                cost,
                activation_bytes=round(kept + outside + behind),
                saved_bytes=round(whole - given) if is_first_half and not again and whole > given else 0,
                passing_bytes=round(redone if again else max(loss, passing - behind)),
                redone_bytes=round(redone),
                output_bytes=round(given),
            )
        )
    return tuple(found)

"""Costs of layers by traced passes, to cut a model into pipeline stages within a limit of memory.

[Note: a stage's peak]
    A stage that holds its weights itself is at its highest where most micro-batches are kept, beside what one of them
    has in passing (planner/memory.py, [Note: moments]): so costs of layers add up to a stage's peak, but for what is in
    passing, of which the largest counts. Hidden states before the layers are kept with the first layer, those behind
    with the last one, and so are logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost, layer_costs
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.planner.memory import Traced
from rotorch.planner.memory_at_rest import trained_weights
from rotorch.planner.workload import fold


def counted_costs(
    spec: ModelSpec, traced: Traced, *, strategies: Sequence[Strategy], batch: MicroBatch
) -> tuple[LayerCost, ...]:
    """Returns the costs of each layer; bytes of activations are counted, operations and the rest are estimates.

    Args:
        spec: the model.
        traced: its passes, for the batch's precision and tokens.
        strategies: outermost first; the innermost one has the stages.
        batch: one micro-batch of one rank.
    """
    model, rows = fold(spec), batch.num_rows
    again = strategies[-1].recomputes_layers
    found = []
    for number, (cost, place) in enumerate(zip(layer_costs(spec, batch=batch), model.pattern, strict=True)):
        layer, units = traced.layers[place], model.classes[place].units
        given = layer.given.of(rows)
        whole = layer.stream.of(rows) + layer.interior.of(rows) + layer.attention.of(rows)
        is_first, is_last = number == 0, number == model.num_layers - 1
        outside = traced.outside.of(rows) if is_first or is_last else 0.0
        largest = max((w.num_bytes for unit in units for w in trained_weights(unit)), default=0)
        passing = traced.temporaries.row_bytes * rows + min(traced.temporaries.constant_bytes, largest)
        loss = traced.logits.of(rows) if is_last else 0.0
        found.append(
            replace(
                cost,
                backward_flops=cost.backward_flops + (cost.again_flops if again else 0),
                again_flops=0 if again else cost.again_flops,
                activation_bytes=round((given if again else whole) + outside),
                saved_bytes=0 if again else max(0, round(whole - given)),
                passing_bytes=round(max(loss, passing + (whole if again else 0.0))),
                redone_bytes=round(max(loss, passing + whole)),
            )
        )
    return tuple(found)

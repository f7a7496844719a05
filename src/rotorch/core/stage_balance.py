"""Cuts of a row of layers into pipeline stages, by estimates of each layer's time and memory.

[Note: estimates]
    All ranks are alike, so time is counted in operations: two per weight of a matrix and token, of experts as many as a
    token goes to; in attention two per feature of all heads and per attended token, for scores and for values, half of
    which a causal mask leaves out. A look-up takes none, a head as any matrix. Backward takes twice as much as
    forward, and recomputing once more.
    Memory is the state that stays from step to step (weights, gradients, two states of AdamW), and for each micro-batch
    that waits for its backward the outputs of matrices, hidden states, and logits with their gradient. Where a stage is
    gathered from its ranks, whole weights and gradients are added. Both are estimates: only the comparison of layers
    with each other, and with a large head, matters. Within a limit of memory bytes matter, and those of activations
    are then counted (planner/stage_costs.py), as DawnPiper (arXiv 2505.05856) measures them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from rotorch.core.errors import ConfigError
from rotorch.core.quantities import format_bytes
from rotorch.core.traffic import MicroBatch

if TYPE_CHECKING:
    from rotorch.core.spec import ModelSpec, Weight

NOMINAL = MicroBatch(num_rows=1, num_tokens=1024)
"""The micro-batch of estimates where the batch is not known. Only attention's share of a layer depends on it."""

_STATES = 4
"""Weights, gradients and two states of AdamW, each as large."""
_STATES_OF_BORROWED = 2
"""For a weight that another stage owns: its values and its gradient."""


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer; the first one's include the modules before the layers, the last one's those behind them.

    Attributes:
        forward_flops: of one micro-batch.
        backward_flops: of one micro-batch, recomputation included.
        state_bytes: weights, gradients and optimizer.
        activation_bytes: kept of one micro-batch between its forward and its backward.
        gathered_bytes: whole weights and gradients, which exist besides while they are gathered.
        again_flops: of one micro-batch, of computing the layer again in backward.
        saved_bytes: of `activation_bytes`, what is not kept then.
        passing_bytes: beside all of these at the highest moment of the layer's passes.
        redone_bytes: the same if it is computed again.
        output_bytes: of one micro-batch, handed on by a stage that ends with it, and kept; alike for all layers.
    """

    forward_flops: int
    backward_flops: int
    state_bytes: int
    activation_bytes: int
    gathered_bytes: int = 0
    again_flops: int = 0
    saved_bytes: int = 0
    passing_bytes: int = 0
    redone_bytes: int = 0
    output_bytes: int = 0

    @property
    def flops(self) -> int:
        """Operations of one micro-batch, forward and backward."""
        return self.forward_flops + self.backward_flops


def layer_costs(
    spec: ModelSpec, *, batch: MicroBatch = NOMINAL, recompute: bool = False, halves: bool = False
) -> tuple[LayerCost, ...]:
    """Estimates each layer's costs (see [Note: estimates]).

    Args:
        spec: the model.
        batch: one micro-batch.
        recompute: layers keep only their inputs, and compute the rest again in backward.
        halves: of each half of a layer, an entry. A layer that is computed again is so as a whole: the first half has
            what that saves of both.
    """
    order = spec.order
    number_of, per_layer = (order.place_number, 2) if halves else (order.layer_number, 1)
    last = len(order.layers) * per_layer - 1
    tokens = batch.num_rows * batch.num_tokens
    hidden = tokens * order.width * batch.itemsize
    attention = 2 * tokens * batch.num_tokens * order.attention_width
    flops = [attention if place % per_layer == 0 else 0 for place in range(last + 1)]
    kept = [2 * hidden // per_layer] * (last + 1)
    state, gathered = [0] * (last + 1), [0] * (last + 1)
    head_flops = logits = 0
    for weight in spec.weights:
        layers = [number_of(name) for name in (weight.name, *weight.aliases)]
        owner, *others = dict.fromkeys(min(max(layer, 0), last) for layer in layers)
        copied = weight.numel * (weight.copy_itemsize or 0)
        state[owner] += (_STATES if weight.trained else 1) * weight.num_bytes + copied
        for layer in others:
            state[layer] += (_STATES_OF_BORROWED if weight.trained else 1) * weight.num_bytes + copied
        for layer in (owner, *others):
            gathered[layer] += weight.numel * weight.itemsize_in_pass + (weight.num_bytes if weight.trained else 0)
        for layer in layers:
            used, outputs = _per_token(weight, experts=order.experts_per_token)
            if layer > last:
                head_flops += 2 * tokens * used
                logits += 2 * tokens * outputs * batch.loss_itemsize  # with their gradient
            elif layer >= 0:  # before the layers are look-ups, which take no products
                flops[layer] += 2 * tokens * used
                kept[layer] += tokens * outputs * batch.itemsize
    again, whole, inputs = ([0] * (last + 1) for _ in range(3))
    for first in range(0, last + 1, per_layer):
        both = slice(first, first + per_layer)
        again[first], whole[first], inputs[first] = sum(flops[both]), sum(kept[both]), hidden
    return tuple(
        LayerCost(
            forward_flops=flops[layer] + (head_flops if layer == last else 0),
            backward_flops=(3 if recompute else 2) * flops[layer] + (2 * head_flops if layer == last else 0),
            state_bytes=state[layer],
            activation_bytes=(inputs[layer] if recompute else kept[layer]) + (logits if layer == last else 0),
            gathered_bytes=gathered[layer],
            again_flops=0 if recompute else again[layer],
            saved_bytes=0 if recompute else max(0, whole[layer] - inputs[layer]),
            redone_bytes=whole[layer],
        )
        for layer in range(last + 1)
    )


def _per_token(weight: Weight, *, experts: int) -> tuple[int, int]:
    """Elements of a weight that a token is multiplied with, and output features; only of experts that it goes to."""
    match weight.shape:
        case (number, *matrix) if len(matrix) == 2:
            chosen = min(experts, number) or number
            return weight.numel // max(number, 1) * chosen, max(matrix) * chosen
        case (outputs, _, *_):
            return weight.numel, outputs
    return weight.numel, 0


def balanced(
    costs: Sequence[LayerCost],
    *,
    kept: Sequence[int],
    limit_bytes: float | None = None,
    shared_by: int = 1,
    gathered: float = 0.0,
    halves: bool = False,
) -> tuple[range, ...]:
    """Cuts layers into stages, none empty, so that the slowest stage is as fast as possible.

    Of all such cuts it takes one whose largest stage in memory is smallest, and of those the most even one in time.

    Args:
        costs: of the layers.
        kept: per stage, number of micro-batches whose activations it holds at a time.
        limit_bytes: no stage may take more; None: no limit.
        shared_by: number of ranks that share the weights of a stage.
        gathered: fraction of `gathered_bytes` that counts for a stage; 0 where nothing is gathered.
        halves: costs are those of half layers.

    Raises:
        ConfigError: no cut keeps every stage within the limit; gives the bytes of the best one.
    """
    limit = inf if limit_bytes is None else limit_bytes
    how: dict[str, Any] = {"shared_by": shared_by, "gathered": gathered, "halves": halves}
    return _cut(costs, kept=kept, limit_bytes=limit, again=False, **how)[0]


def balanced_within(
    costs: Sequence[LayerCost],
    *,
    kept: Sequence[int],
    limit_bytes: float,
    shared_by: int = 1,
    gathered: float = 0.0,
    halves: bool = False,
) -> tuple[tuple[range, ...], tuple[int, ...]]:
    """The same within a limit to which stages keep by computing their first layers again, as few as it takes.

    Args:
        costs: of the layers.
        kept: per stage, number of micro-batches whose activations it holds at a time.
        limit_bytes: no stage may take more.
        shared_by: number of ranks that share the weights of a stage.
        gathered: fraction of `gathered_bytes` that counts for a stage.
        halves: costs are those of half layers, of which both are computed again, or none.

    Returns:
        The stages, and the number of layers that each computes again.
    """
    how: dict[str, Any] = {"shared_by": shared_by, "gathered": gathered, "halves": halves}
    return _cut(costs, kept=kept, limit_bytes=limit_bytes, again=True, **how)


def _cut(
    costs: Sequence[LayerCost],
    *,
    kept: Sequence[int],
    limit_bytes: float,
    shared_by: int,
    gathered: float,
    halves: bool,
    again: bool,
) -> tuple[tuple[range, ...], tuple[int, ...]]:
    from rotorch.core.stage_cuts import Cuts, Row  # NumPy: most commands cut no stages

    def sums(each: Iterable[int]) -> list[int]:
        return list(accumulate(each, initial=0))

    if len(costs) < len(kept):
        raise AssertionError(f"{len(costs)} layers make no {len(kept)} stages")
    row = Row(
        flops=sums(cost.flops for cost in costs),
        again=sums(cost.again_flops for cost in costs),
        state=sums(cost.state_bytes for cost in costs),
        activations=sums(cost.activation_bytes for cost in costs),
        saved=sums(cost.saved_bytes for cost in costs),
        gathered=sums(cost.gathered_bytes for cost in costs),
        passing=[cost.passing_bytes for cost in costs],
        redone=[cost.redone_bytes for cost in costs],
        output=max(cost.output_bytes for cost in costs),
    )
    per_layer = 2 if halves else 1
    grain = per_layer if again else 0
    cuts = Cuts(row, kept=kept, shared_by=shared_by, gathered=gathered, largest=limit_bytes, grain=grain)
    found = cuts.best()
    if found is None:
        helps = not again and any(cost.again_flops for cost in costs)
        raise ConfigError(
            f"no cut of {len(costs) // per_layer} layers into {len(kept)} stages keeps each within "
            f"{format_bytes(limit_bytes)}: the best one takes {format_bytes(cuts.smallest())}. Write more memory, more "
            f"ranks, a smaller micro-batch{', or recompute=auto' if helps else ''}"
        )
    return found

"""ZeroPP's table (arXiv 2402.03791): a pipeline in units of micro-batches, so that a gather of weights serves many.

[Note: the order of a rank]
    Micro-batches are grouped into units of U. A rank takes a unit's forwards chunk by chunk, its backwards chunk by
    chunk the other way, and the next unit's forwards when all its backwards are started. Among ready actions the order
    is: input gradients, which other ranks wait for; forwards; weight gradients, which no rank waits for and which fill
    the gaps, also of the next unit.

[Note: the bubble]
    With forward, input and weight gradient of one slot each, rank 0 is through with the forwards of a unit before its
    first input gradient comes back from P - 1 forwards and P backwards on other ranks, if U >= 2P - 1; with two chunks
    or more it has the other chunks' forwards to do, and U >= P is enough. Then no rank is idle but while the pipeline
    fills: P - 1 chunk slots of 3VM + P - 1, where 1F1B has 3V (P - 1).

[Note: pending weight gradients]
    Where forwards are always ready, weight gradients only wait. With no limit, the memory kept for them grows with
    every unit (P = 4, V = 1, U = 7: 10 micro-batches after 4 units, 38 after 32). So a unit's forwards also wait until
    weight gradients of at most `pending_units` whole units are open, which bounds micro-batches in flight by so many
    units and one. If U >= 2P - 1 and M is a multiple of U, none need be pending: a unit's own gaps take all of them,
    and the bubble is the same. Else those of one unit are kept for the next one's gaps. A short unit at the end still
    finds fewer than it has gaps, and the bubble is larger.
"""

from __future__ import annotations

from collections.abc import Iterator

from rotorch.pipelining.actions import ActionKind, Placement, Schedule
from rotorch.pipelining.baselines import check_shape
from rotorch.pipelining.play import Choice, Progress, play


def smallest_unit(*, num_ranks: int, num_chunks: int) -> int:
    """The fewest micro-batches per unit with no bubble but that of filling the pipeline ([Note: the bubble])."""
    return 2 * num_ranks - 1 if num_chunks == 1 else num_ranks


def make_zeropp_schedule(
    *,
    num_ranks: int,
    num_chunks: int = 1,
    num_micro_batches: int,
    unit: int | None = None,
    pending_units: int | None = None,
) -> Schedule:
    """ZeroPP's table, of plain rows.

    Args:
        num_ranks: that the model is spread over (P).
        num_chunks: stages per rank (V).
        num_micro_batches: per step (M); need not be a multiple of the unit.
        unit: micro-batches per gather of weights and reduction of gradients (U); None: `smallest_unit`, or all of them.
        pending_units: whole units whose weight gradients may be open when the next one's forwards begin; None: 0, or 1
            where that makes the bubble smaller (see [Note: pending weight gradients]).

    Raises:
        ConfigError: if a size is below 1, or the unit larger than the step.
    """
    check_shape("zeropp", num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=num_micro_batches, unit=unit)
    if unit is None:
        unit = min(smallest_unit(num_ranks=num_ranks, num_chunks=num_chunks), num_micro_batches)
    if pending_units is None:
        pending_units = 0 if unit >= 2 * num_ranks - 1 and num_micro_batches % unit == 0 else 1

    def rule(rank: int, now: Progress) -> Iterator[Choice]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards, inputs, weights = (sum(c[s] for s in stages) for c in (now.forwards, now.inputs, now.weights))
        per_unit = unit * num_chunks
        all_of_them = num_micro_batches * num_chunks
        if inputs < all_of_them:
            yield ActionKind.BACKWARD_INPUT, stages[-1 - _chunk(inputs, unit, num_chunks, num_micro_batches)]
        if forwards < all_of_them:
            before = forwards // per_unit  # whole units whose forwards are done
            if inputs >= before * per_unit and weights >= (before - pending_units) * per_unit:
                yield ActionKind.FORWARD, stages[_chunk(forwards, unit, num_chunks, num_micro_batches)]
        if weights < inputs:
            yield ActionKind.BACKWARD_WEIGHT, stages[-1 - _chunk(weights, unit, num_chunks, num_micro_batches)]

    return Schedule(
        name="zeropp",
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_micro_batches=num_micro_batches,
        unit=unit,
        placement=Placement.LOOP,
        most_in_flight=num_chunks * min((1 + pending_units) * unit, num_micro_batches),
        rows=play(rule, num_ranks=num_ranks, num_stages=num_ranks * num_chunks, num_micro_batches=num_micro_batches),
    )


def _chunk(done: int, unit: int, num_chunks: int, num_micro_batches: int) -> int:
    """The chunk whose turn it is after `done` steps in the order of units, chunks, micro-batches."""
    whole_units, rest = divmod(done, unit * num_chunks)
    return rest // min(unit, num_micro_batches - whole_units * unit)

"""The schedules that ZeroPP is compared with, each from its paper; `make_schedule` makes them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rotorch.core.errors import ConfigError, nearest
from rotorch.pipelining.actions import Action, ActionKind, Placement, Schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741

Row = Iterator[Action]


def make_schedule(
    name: str, *, num_ranks: int, num_chunks: int = 1, num_micro_batches: int, unit: int | None = None
) -> Schedule:
    """A baseline's table, of plain rows.

    Args:
        name: one of `BASELINES`.
        num_ranks: that the model is spread over.
        num_chunks: stages per rank.
        num_micro_batches: per step.
        unit: micro-batches per gather of weights and reduction of gradients; None: all of a step.

    Raises:
        ConfigError: if there is no such schedule, or it does not exist in this shape.
    """
    if name not in BASELINES:
        raise ConfigError(
            f"schedule {name!r}: unknown{nearest(name, known=BASELINES)}. Write one of {', '.join(BASELINES)}"
        )
    unit = check_shape(name, num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=num_micro_batches, unit=unit)
    baseline, shape = BASELINES[name], (num_ranks, num_chunks, num_micro_batches)
    check_chunks(name, num_chunks=num_chunks)
    if baseline.in_rounds:
        _check_rounds(name, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_micro_batches=num_micro_batches,
        unit=unit,
        placement=baseline.placement,
        most_in_flight=min(baseline.most_in_flight(*shape), num_chunks * num_micro_batches),
        rows=tuple(tuple(baseline.row(rank, *shape)) for rank in range(num_ranks)),
    )


def check_shape(name: str, *, num_ranks: int, num_chunks: int, num_micro_batches: int, unit: int | None) -> int:
    """Raises `ConfigError` for sizes that no schedule has; returns the unit (all micro-batches, if None)."""
    sizes = {"ranks": num_ranks, "chunks": num_chunks, "micro-batches": num_micro_batches}
    sizes |= {} if unit is None else {"unit": unit}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError(f"schedule {name}: {what} = {size}. Write 1 or more")
    if unit is not None and unit > num_micro_batches:
        raise ConfigError(
            f"schedule {name}: a unit of {unit} micro-batches, but a step has {num_micro_batches}. "
            f"Write a unit of at most {num_micro_batches}"
        )
    return num_micro_batches if unit is None else unit


# ---------------------------------------------------------------- rows


def _gpipe(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    for kind in (F, B):
        for micro_batch in range(num_micro_batches):
            yield Action(kind, rank, micro_batch)


def _one_forward_one_backward(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """As many forwards as there are ranks from here on, then a backward for each further forward (arXiv 1806.03377)."""
    ahead = min(num_ranks - rank, num_micro_batches)
    for micro_batch in range(ahead):
        yield Action(F, rank, micro_batch)
    for micro_batch in range(num_micro_batches):
        yield Action(B, rank, micro_batch)
        if micro_batch + ahead < num_micro_batches:
            yield Action(F, rank, micro_batch + ahead)


def _interleaved(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """1F1B over several stages per rank, a round of micro-batches through each in turn (arXiv 2104.04473)."""
    per_round = _per_round(num_ranks, num_micro_batches)
    rounds = range(0, num_micro_batches, per_round)
    order = [(chunk, first + i) for first in rounds for chunk in range(num_chunks) for i in range(per_round)]
    forwards = [Action(F, chunk * num_ranks + rank, micro_batch) for chunk, micro_batch in order]
    backwards = [Action(B, (num_chunks - 1 - chunk) * num_ranks + rank, micro_batch) for chunk, micro_batch in order]
    ahead = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), len(order))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(order) - ahead :]


def _per_round(num_ranks: int, num_micro_batches: int) -> int:
    return num_micro_batches // max(1, num_micro_batches // num_ranks)


def _looped_bfs(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """All micro-batches through one stage, then through the next; backwards the other way (arXiv 2211.05953)."""
    forwards = [
        (chunk * num_ranks + rank, micro_batch)
        for chunk in range(num_chunks)
        for micro_batch in range(num_micro_batches)
    ]
    yield from (Action(F, *what) for what in forwards)
    yield from (Action(B, *what) for what in reversed(forwards))


def _zb_h1(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """1F1B with weight gradients as much later as a rank has others before it; its memory (arXiv 2401.10241, 3.1)."""
    ahead = min(num_ranks - 1 - rank, num_micro_batches)
    for micro_batch in range(ahead):
        yield Action(F, rank, micro_batch)
    for micro_batch in range(num_micro_batches):
        if micro_batch + ahead < num_micro_batches:
            yield Action(F, rank, micro_batch + ahead)
        yield Action(I, rank, micro_batch)
        if micro_batch >= rank:
            yield Action(W, rank, micro_batch - rank)
    for micro_batch in range(max(0, num_micro_batches - rank), num_micro_batches):
        yield Action(W, rank, micro_batch)


def _zbv(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Row:
    """Two stages per rank, there and back, in 1F1B's memory (arXiv 2401.10241, 6).

    The pattern is for as many micro-batches as fill the pipeline; those beyond the step's are left out.
    """
    there, back = rank, 2 * num_ranks - 1 - rank
    after = num_ranks - rank  # ranks from here on
    full = max(num_micro_batches, 2 * num_ranks - 1)
    pattern = [(F, there)] * (2 * after - 1)
    pattern += [(F, back), (F, there)] * rank
    pattern += [(F, back), (I, back), (W, back)] * after
    pattern += [(F, there), (I, there), (W, there), (F, back), (I, back), (W, back)] * (full - num_ranks - after + 1)
    pattern += [(I, there), (W, there), (F, back), (I, back), (W, back)] * (after - 1)
    pattern += [(I, there), (I, back)] * rank
    pattern += [(I, there), (W, there)] * after
    pattern += [(W, back)] * rank + [(W, there)] * rank
    done = dict.fromkeys(pattern, 0)
    for kind, stage in pattern:
        if done[kind, stage] < num_micro_batches:
            yield Action(kind, stage, done[kind, stage])
        done[kind, stage] += 1


# ---------------------------------------------------------------- shapes


def check_chunks(name: str, *, num_chunks: int) -> None:
    """Raises `ConfigError` if a baseline has no table with so many stages per rank."""
    baseline = BASELINES[name]
    if baseline.any_chunks or num_chunks == baseline.usual_chunks:
        return
    if baseline.placement is Placement.V:
        raise ConfigError(
            f"schedule {name}: {num_chunks} chunks per rank, but it has two, on the way there and back. Write 2 chunks"
        )
    raise ConfigError(
        f"schedule {name}: {num_chunks} chunks per rank, but it has one stage per rank. "
        "Write 1 chunk, or a schedule with more: interleaved_1f1b, looped_bfs, zeropp"
    )


def _check_rounds(name: str, *, num_ranks: int, num_micro_batches: int) -> None:
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise ConfigError(
            f"schedule {name}: {num_micro_batches} micro-batches over {num_ranks} ranks are not {rounds} rounds of "
            f"equal size. Write a multiple of {num_ranks}: {rounds * num_ranks} or {(rounds + 1) * num_ranks}"
        )


# ---------------------------------------------------------------- by name


@dataclass(frozen=True)
class Baseline:
    """Recipe of a schedule; its functions take the numbers of ranks, of chunks per rank, and of micro-batches.

    Attributes:
        row: of a rank, which is the first argument.
        placement: distribution of stages over ranks.
        most_in_flight: see `Schedule`; more than a step has counts as all of a step.
        usual_chunks: stages per rank by default.
        any_chunks: True if there may be more or fewer.
        in_rounds: True if micro-batches go in rounds of equal size.
    """

    row: Callable[[int, int, int, int], Row]
    placement: Placement
    most_in_flight: Callable[[int, int, int], int]
    usual_chunks: int = 1
    any_chunks: bool = False
    in_rounds: bool = False


BASELINES = {
    "gpipe": Baseline(_gpipe, Placement.LOOP, lambda p, v, m: m),
    "1f1b": Baseline(_one_forward_one_backward, Placement.LOOP, lambda p, v, m: p),
    "interleaved_1f1b": Baseline(
        _interleaved,
        Placement.LOOP,
        lambda p, v, m: (v - 1) * _per_round(p, m) + 2 * p - 1,
        usual_chunks=2,
        any_chunks=True,
        in_rounds=True,
    ),
    "looped_bfs": Baseline(_looped_bfs, Placement.LOOP, lambda p, v, m: v * m, usual_chunks=2, any_chunks=True),
    "zb_h1": Baseline(_zb_h1, Placement.LOOP, lambda p, v, m: p),
    "zbv": Baseline(_zbv, Placement.V, lambda p, v, m: 2 * p, usual_chunks=2),
}

"""The schedules that ZeroPP is held against, each from its paper; `make_schedule` makes them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rotorch.core.errors import ConfigError, nearest
from rotorch.pipelining.actions import Action, ActionKind, Placement, Schedule

F, B = ActionKind.FORWARD, ActionKind.BACKWARD

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
    rows, placement, check = BASELINES[name]
    check(name, num_ranks, num_chunks, num_micro_batches)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_micro_batches=num_micro_batches,
        unit=unit,
        placement=placement,
        rows=tuple(tuple(rows(rank, num_ranks, num_chunks, num_micro_batches)) for rank in range(num_ranks)),
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


# ---------------------------------------------------------------- shapes


def _one_chunk(name: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    if num_chunks != 1:
        raise ConfigError(
            f"schedule {name}: {num_chunks} chunks per rank, but it has one stage per rank. "
            "Write 1 chunk, or a schedule with more: interleaved, looped_bfs"
        )


Rows = Callable[[int, int, int, int], Row]
Check = Callable[[str, int, int, int], None]

BASELINES: dict[str, tuple[Rows, Placement, Check]] = {
    "gpipe": (_gpipe, Placement.LOOP, _one_chunk),
    "1f1b": (_one_forward_one_backward, Placement.LOOP, _one_chunk),
}
"""By name: how a rank's row is made, which rank holds which stage, and what is asked of the shape."""

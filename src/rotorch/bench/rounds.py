"""Turns of layouts that run side by side, and the fair comparison of their times.

[Note: method]
    All rows are alive at the same time and take turns, a few steps each (A B C, B C A, ...: the first row changes from
    round to round). A machine that slows down for seconds then slows all of them, and cancels out of ratios within a
    round; the reported figure is the median of the rounds' ratios. All ranks of a row wait for each other
    before each step. A step lasts from the start of the first rank until the last one has finished its optimizer. The
    first `WARM_UP_STEPS` steps of a row do not count, nor does the first of every turn: caches are cold then, and ranks
    return unused memory to the system when their turn ends, so that all rows fit into it.

[Note: limit]
    The limit is as many ranks, each with a replica of the whole model in plain torch, its own share of the data and its
    own optimizer, without communication. The ranks share cores, caches and memory bandwidth as those of the other rows
    do, so the limit is the speed of a layout with free communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rotorch.bench.rank import StepTime
from rotorch.bench.ranks import RowRanks
from rotorch.core.errors import RankFailure

WARM_UP_STEPS = 3
STEPS_TO_WAKE = 1
"""First steps of a turn that do not count."""


@dataclass
class Times:
    """Step times and losses of one row.

    Attributes:
        rounds: seconds of each step, by round.
        optimizer_s: seconds of each step in clipping and the optimizer (the slowest rank).
        losses: of every step from the first one on, by rank.
    """

    rounds: list[list[float]] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    @property
    def all_s(self) -> list[float]:
        """Seconds of every step that counts."""
        return [seconds for turn in self.rounds for seconds in turn]

    def add(self, turn: Sequence[Sequence[StepTime]], *, dropped: int) -> None:
        """Takes over a turn, for each rank its steps. Of the first `dropped` of them only losses count."""
        steps = list(zip(*turn, strict=True))
        self.losses += [[time.loss for time in step] for step in steps]
        counted = steps[dropped:]
        if counted:
            self.rounds.append([max(t.end_s for t in step) - min(t.start_s for t in step) for step in counted])
            self.optimizer_s += [max(t.end_s - t.gradients_s for t in step) for step in counted]


@dataclass(frozen=True)
class Ratio:
    """Speed of one row relative to another: 2 is twice as many tokens per second.

    Attributes:
        rounds: of the medians of each round.
        best: of the best steps of both.
    """

    rounds: list[float]
    best: float

    @property
    def median(self) -> float:
        """Median of the rounds' ratios."""
        return median(self.rounds)


def ratio(row: Times, *, to: Times) -> Ratio:
    """Compares two rows round by round."""
    rounds = [median(theirs) / median(ours) for ours, theirs in zip(row.rounds, to.rounds, strict=True)]
    return Ratio(rounds, min(to.all_s) / min(row.all_s))


def take_turns(
    rows: Mapping[str, RowRanks],
    *,
    num_rounds: int,
    num_steps: int,
    failed: Callable[[str, RankFailure], None],
    advanced: Callable[[str], None] = lambda text: None,
) -> dict[str, Times]:
    """Runs all rows in turns (see [Note: method]) and returns the times of those that ended well.

    Args:
        rows: ranks that are built, by row.
        num_rounds: number of rounds that count.
        num_steps: steps of a row in a round.
        failed: told of a row that failed; the others go on without it.
        advanced: told after each turn what comes next.
    """
    times = {row: Times() for row in rows}
    order = list(rows)
    for number in range(-1, num_rounds):
        start = max(number, 0) % max(len(order), 1)
        for row in order[start:] + order[:start]:
            if row not in times:
                continue
            advanced(f"{'warm-up' if number < 0 else f'round {number + 1}'}: {row}")
            try:
                turn = rows[row].ask("steps", count=WARM_UP_STEPS if number < 0 else STEPS_TO_WAKE + num_steps)
            except RankFailure as failure:
                del times[row]
                failed(row, failure)
            else:
                times[row].add(turn, dropped=WARM_UP_STEPS if number < 0 else STEPS_TO_WAKE)
    return times

"""The actions of a pipeline's ranks: the table that a generator writes and an executor runs.

A model is cut into `num_ranks * num_chunks` stages. A rank holds `num_chunks` of them, its chunks, and does the actions
of its row one after another. Messages pass between neighbouring stages only, and only where those lie on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rotorch.core.errors import RotorchError


class ScheduleError(RotorchError, ValueError):
    """A table that cannot be run, or breaks what its generator promises: names rank, place in the row and action."""


class ActionKind(StrEnum):
    """The kind of an action; its value is its symbol in a table: 3F5 is stage 3's forward of micro-batch 5."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients at once: of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    """Gathers the stage's weights whole."""
    RESHARD = "RESHARD"
    """Frees the gathered weights."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Sums the stage's weight gradients over the ranks that share it, and keeps a part: once per unit."""
    SEND_FORWARD = "SEND_F"
    """Sends the stage's output to the next stage."""
    RECV_FORWARD = "RECV_F"
    """Receives the stage's input from the stage before."""
    SEND_BACKWARD = "SEND_B"
    """Sends the gradient of the stage's input to the stage before."""
    RECV_BACKWARD = "RECV_B"
    """Receives the gradient of the stage's output from the next stage."""

    __hash__ = str.__hash__  # Enum's own runs in Python, at every look-up of an action


COMPUTE = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT},
)
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})
MESSAGES = SENDS | RECEIVES


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a row.

    Attributes:
        kind: of the action.
        stage: of the whole pipeline, 0 to `num_ranks * num_chunks - 1`.
        micro_batch: its number; None for actions on the stage's weights (UNSHARD, RESHARD, REDUCE_GRAD).
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


class Placement(StrEnum):
    """Distribution of stages over ranks."""

    LOOP = "loop"
    """Round after round in the same direction: 0 1 2 3 0 1 2 3."""
    V = "v"
    """There and back: 0 1 2 3 3 2 1 0. At the turning points no message is needed."""

    def rank_of(self, stage: int, *, num_ranks: int) -> int:
        """The rank that holds `stage`."""
        turn, position = divmod(stage, num_ranks)
        return num_ranks - 1 - position if self is Placement.V and turn % 2 else position


@dataclass(frozen=True)
class Schedule:
    """A pipeline's table.

    Attributes:
        name: of its generator: "1f1b".
        num_ranks: number of ranks that the stages lie on (P).
        num_chunks: stages per rank (V).
        num_micro_batches: per step (M).
        unit: micro-batches that share a gather of weights and a reduction of gradients (U); the last unit of a step is
            shorter where M is not a multiple.
        placement: distribution of stages over ranks.
        most_in_flight: the most micro-batches of its stages that a rank has between forward and weight gradient at a
            time. `validate.py` holds the generator to it; divided by `num_chunks` it compares across schedules.
        rows: each rank's actions, in order. Plain rows have `COMPUTE` only, lowered ones (`lower.py`) all kinds.
    """

    name: str
    num_ranks: int
    num_chunks: int
    num_micro_batches: int
    unit: int
    placement: Placement
    most_in_flight: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, of all ranks together."""
        return self.num_ranks * self.num_chunks

    @property
    def num_units(self) -> int:
        """Number of units per step; the last may be shorter."""
        return -(-self.num_micro_batches // self.unit)

    def unit_of(self, micro_batch: int) -> int:
        """The unit that a micro-batch belongs to."""
        return micro_batch // self.unit

    def micro_batches_of(self, unit: int) -> range:
        """The micro-batches of one unit."""
        return range(unit * self.unit, min((unit + 1) * self.unit, self.num_micro_batches))

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        if 0 <= stage < self.num_stages:
            return self._ranks[stage]
        return self.placement.rank_of(stage, num_ranks=self.num_ranks)  # of a table that is not valid

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(self.placement.rank_of(stage, num_ranks=self.num_ranks) for stage in range(self.num_stages))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, its chunks, in the order of the model."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def count(self, kind: ActionKind, *, rank: int) -> int:
        """Number of actions of `kind` that `rank` does in a step: for UNSHARD, of gathers that it takes part in."""
        return sum(action.kind is kind for action in self.rows[rank])

    @property
    def splits_backward(self) -> bool:
        """True if any input gradient is computed apart from its weight gradient."""
        return any(action.kind is ActionKind.BACKWARD_INPUT for row in self.rows for action in row)


def peer_stage(action: Action) -> int:
    """The stage at the other end of a message."""
    match action.kind:
        case ActionKind.SEND_FORWARD | ActionKind.RECV_BACKWARD:
            return action.stage + 1
        case ActionKind.RECV_FORWARD | ActionKind.SEND_BACKWARD:
            return action.stage - 1
    raise ValueError(f"{action} is no message")


def counterpart(action: Action) -> Action:
    """The other end of a message: of stage 2's SEND_FORWARD stage 3's RECV_FORWARD."""
    return Action(_OTHER_END[action.kind], peer_stage(action), action.micro_batch)


_OTHER_END = {
    ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}


def table(rows: Sequence[Sequence[Action]]) -> str:
    """The rows as text, a line per rank, for error messages and failed tests."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))

"""What the ranks of a pipeline do, action by action: the table that a generator writes and an executor runs.

A model is cut into `num_ranks * num_chunks` stages. A rank holds `num_chunks` of them, its chunks, and does the actions
of its row one after another. Messages pass between neighbouring stages only, and only where those lie on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rotorch.core.errors import RotorchError


class ScheduleError(RotorchError, ValueError):
    """A table that cannot be run, or breaks what its generator promises: names rank, place in the row and action."""


class ActionKind(StrEnum):
    """What an action does; the value is how it is written in a table: 3F5 is stage 3's forward of micro-batch 5."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients at once: of the stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    """Gathers the stage's weights whole."""
    RESHARD = "RESHARD"
    """Frees what was gathered."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Sums the stage's weight gradients over those who share it, and keeps a part: once per unit."""
    SEND_FORWARD = "SEND_F"
    """Sends the stage's output to the next stage."""
    RECV_FORWARD = "RECV_F"
    """Receives the stage's input from the stage before."""
    SEND_BACKWARD = "SEND_B"
    """Sends the gradient of the stage's input to the stage before."""
    RECV_BACKWARD = "RECV_B"
    """Receives the gradient of the stage's output from the next stage."""


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
        kind: what is done.
        stage: of the whole pipeline, 0 to `num_ranks * num_chunks - 1`.
        micro_batch: which one; None for what concerns the stage's weights (UNSHARD, RESHARD, REDUCE_GRAD).
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


class Placement(StrEnum):
    """Which rank holds which stage."""

    LOOP = "loop"
    """Round after round in the same direction: 0 1 2 3 0 1 2 3."""
    V = "v"
    """There and back: 0 1 2 3 3 2 1 0. The turning points hand over without a message."""

    def rank_of(self, stage: int, *, num_ranks: int) -> int:
        """The rank that holds `stage`."""
        turn, position = divmod(stage, num_ranks)
        return num_ranks - 1 - position if self is Placement.V and turn % 2 else position


@dataclass(frozen=True)
class Schedule:
    """A pipeline's table.

    Attributes:
        name: of its generator: "1f1b".
        num_ranks: how many ranks the stages lie on (P).
        num_chunks: stages per rank (V).
        num_micro_batches: per step (M).
        unit: micro-batches that share a gather of weights and a reduction of gradients (U); the last unit of a step has
            what is left where M is not a multiple.
        placement: which rank holds which stage.
        most_in_flight: the most micro-batches of its stages that a rank is between forward and weight gradient of at a
            time. `validate.py` holds the generator to it; divided by `num_chunks` it compares across schedules.
        rows: per rank what it does, in order. Plain rows hold `COMPUTE` only, lowered ones (`lower.py`) all of it.
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
        """Of all ranks."""
        return self.num_ranks * self.num_chunks

    @property
    def num_units(self) -> int:
        """Per step; the last may be shorter."""
        return -(-self.num_micro_batches // self.unit)

    def unit_of(self, micro_batch: int) -> int:
        """The unit that a micro-batch belongs to."""
        return micro_batch // self.unit

    def micro_batches_of(self, unit: int) -> range:
        """Those of one unit."""
        return range(unit * self.unit, min((unit + 1) * self.unit, self.num_micro_batches))

    def rank_of(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return self.placement.rank_of(stage, num_ranks=self.num_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, its chunks, in the order of the model."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def count(self, kind: ActionKind, *, rank: int) -> int:
        """How often `rank` does `kind` in a step: of UNSHARD, how many gathers it takes part in."""
        return sum(action.kind is kind for action in self.rows[rank])

    @property
    def splits_backward(self) -> bool:
        """Whether any input gradient is taken apart from its weight gradient."""
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
    other = {
        ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
        ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
        ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
        ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
    }
    return Action(other[action.kind], peer_stage(action), action.micro_batch)


def table(rows: Sequence[Sequence[Action]]) -> str:
    """The rows as text, a rank a line: what a failed test shows."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))

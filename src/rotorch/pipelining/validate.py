"""Checks of a lowered table: an executor may trust any table that passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotorch.pipelining.actions import (
    COMPUTE,
    MESSAGES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    counterpart,
)
from rotorch.pipelining.lower import gives, needs
from rotorch.pipelining.simulate import simulate

GATHERS_PER_UNIT = 2
"""Of each stage: for the forwards of a unit of micro-batches, and for its backwards."""


def validate(schedule: Schedule, *, weight_gradients_need_weights: bool = True) -> None:
    """Raises `ScheduleError`, which names rank, index and action, unless the lowered table keeps all of this.

    - Every stage computes every micro-batch once: forward, and both gradients together or apart; on the stage's rank.
    - A computation's inputs stand before it, or come by a message that does; each message has its two ends.
    - No rank waits for ever: with blocking messages, with all messages between two computations in one batch, and with
      messages that are waited for where they are used.
    - Stages compute with whole weights. They are gathered at most twice per unit, and their gradients are summed once
      per unit, after its last and before the next unit's first.
    - No rank is ever in the middle of more micro-batches than `schedule.most_in_flight`.

    Args:
        schedule: lowered.
        weight_gradients_need_weights: as in `lower`.
    """
    rows = [_Row(schedule, rank) for rank in range(schedule.num_ranks)]
    for row in rows:
        row.holds_actions_once()
        row.keeps_order()
        row.has_whole_weights(weight_gradients_need_weights)
        row.sums_once_per_unit()
        row.stays_within_bounds()
    _messages_have_two_ends(rows)
    simulate(schedule)
    simulate(schedule, blocking=True)
    _batches_pass(schedule)


@dataclass(frozen=True)
class _Row:
    schedule: Schedule
    rank: int

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.schedule.rows[self.rank]

    def wrong(self, index: int, what: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule.name}: rank {self.rank}, action {index} ({self.actions[index]}): {what}")

    def holds_actions_once(self) -> None:
        """Checks that every computation of the rank's stages is there exactly once, and no message twice."""
        schedule, seen = self.schedule, set[Action]()
        stages = schedule.stages_of(self.rank)
        for index, action in enumerate(self.actions):
            if action.stage not in stages:
                raise self.wrong(index, f"the rank holds stages {stages} only")
            if action.kind in COMPUTE or action.kind in MESSAGES:
                if action.micro_batch is None or not 0 <= action.micro_batch < schedule.num_micro_batches:
                    raise self.wrong(index, f"micro-batches are 0 to {schedule.num_micro_batches - 1}")
                parts = {action}
                if action.kind is ActionKind.BACKWARD:
                    parts = {replace(action, kind=ActionKind.BACKWARD_WEIGHT), gives(action)}
                if seen & parts:
                    raise self.wrong(index, "done before")
                seen |= parts
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT):
            for stage in stages:
                for micro_batch in range(schedule.num_micro_batches):
                    if Action(kind, stage, micro_batch) not in seen:
                        missing = Action(kind, stage, micro_batch)
                        raise ScheduleError(f"{schedule.name}: rank {self.rank} never does {missing}")

    def keeps_order(self) -> None:
        """Checks that inputs of computations, and the results that messages send, stand before them."""
        done: set[Action] = set()
        for index, action in enumerate(self.actions):
            if action.kind in COMPUTE:
                for need in needs(self.schedule, action):
                    here = self.schedule.rank_of(need.stage) == self.rank
                    source = need if here else _receive_of(need, action)
                    if source not in done:
                        raise self.wrong(index, f"stands before {source}, which it needs")
            elif action.kind in SENDS:
                forward = action.kind is ActionKind.SEND_FORWARD
                kind = ActionKind.FORWARD if forward else ActionKind.BACKWARD_INPUT
                if Action(kind, action.stage, action.micro_batch) not in done:
                    raise self.wrong(index, f"stands before {Action(kind, action.stage, action.micro_batch)}")
            done.add(gives(action))

    def has_whole_weights(self, weight_gradients_need_weights: bool) -> None:
        whole: set[int] = set()
        gathers = dict.fromkeys(self.schedule.stages_of(self.rank), 0)
        for index, action in enumerate(self.actions):
            free = action.kind is ActionKind.BACKWARD_WEIGHT and not weight_gradients_need_weights
            match action.kind:
                case ActionKind.UNSHARD:
                    if action.stage in whole:
                        raise self.wrong(index, "the weights are whole already")
                    whole.add(action.stage)
                    gathers[action.stage] += 1
                    if gathers[action.stage] > GATHERS_PER_UNIT * self.schedule.num_units:
                        raise self.wrong(
                            index, f"more than {GATHERS_PER_UNIT} gathers for each of {self.schedule.num_units} units"
                        )
                case ActionKind.RESHARD:
                    if action.stage not in whole:
                        raise self.wrong(index, "the weights are not whole")
                    whole.remove(action.stage)
                case kind if kind in COMPUTE and not free and action.stage not in whole:
                    raise self.wrong(index, "the stage's weights are not whole")
        if whole:
            raise ScheduleError(f"{self.schedule.name}: rank {self.rank} never reshards stages {sorted(whole)}")

    def sums_once_per_unit(self) -> None:
        """Between the last weight gradient of a unit and the first of the next stands one REDUCE_GRAD."""
        schedule = self.schedule
        gradients: dict[int, set[int]] = {stage: set() for stage in schedule.stages_of(self.rank)}
        for index, action in enumerate(self.actions):
            mine = gradients[action.stage]
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                assert action.micro_batch is not None
                if mine and schedule.unit_of(min(mine)) != schedule.unit_of(action.micro_batch):
                    raise self.wrong(index, "gradients of another unit are not summed yet")
                mine.add(action.micro_batch)
            elif action.kind is ActionKind.REDUCE_GRAD:
                size = 0 if not mine else len(schedule.micro_batches_of(schedule.unit_of(min(mine))))
                if len(mine) != size or not mine:
                    raise self.wrong(
                        index, f"gradients of {len(mine)} of {size or schedule.unit} micro-batches are there"
                    )
                mine.clear()
        for stage, mine in gradients.items():
            if mine:
                raise ScheduleError(f"{schedule.name}: rank {self.rank} never sums the last gradients of stage {stage}")

    def stays_within_bounds(self) -> None:
        in_flight = 0
        for index, action in enumerate(self.actions):
            in_flight += action.kind is ActionKind.FORWARD
            if in_flight > self.schedule.most_in_flight:
                raise self.wrong(
                    index, f"{in_flight} micro-batches in flight, more than {self.schedule.most_in_flight}"
                )
            in_flight -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def _receive_of(need: Action, action: Action) -> Action:
    """The RECV by which an input of `action` comes from another rank."""
    forward = need.kind is ActionKind.FORWARD
    kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
    return Action(kind, action.stage, action.micro_batch)


def _messages_have_two_ends(rows: Sequence[_Row]) -> None:
    there = {(row.rank, action) for row in rows for action in row.actions if action.kind in MESSAGES}
    for row in rows:
        for index, action in enumerate(row.actions):
            if action.kind in MESSAGES:
                other = counterpart(action)
                if not 0 <= other.stage < row.schedule.num_stages or row.schedule.rank_of(other.stage) == row.rank:
                    raise row.wrong(index, "its other end is no stage of another rank")
                if (row.schedule.rank_of(other.stage), other) not in there:
                    raise row.wrong(index, f"rank {row.schedule.rank_of(other.stage)} has no {other}")


def _batches_pass(schedule: Schedule) -> None:
    """Simulates all messages between two computations as one batch, which ends when all its messages have passed."""
    batches = [_batches(row) for row in schedule.rows]
    indices = [0] * len(batches)
    gone: set[Action] = set()
    moved = True
    while moved:
        moved = False
        posted = {a for mine, index in zip(batches, indices, strict=True) if index < len(mine) for a in mine[index]}
        passed = {action for action in posted if counterpart(action) in posted} - gone
        gone |= passed
        for rank, mine in enumerate(batches):
            if indices[rank] < len(mine) and mine[indices[rank]] <= gone:
                indices[rank] += 1
                moved = True
        moved = moved or bool(passed)
    for rank, (mine, index) in enumerate(zip(batches, indices, strict=True)):
        if index < len(mine):
            waits = ", ".join(sorted(str(action) for action in mine[index] - gone))
            raise ScheduleError(f"{schedule.name}: deadlock with batched messages: rank {rank} waits for {waits}")


def _batches(row: Sequence[Action]) -> list[set[Action]]:
    batches: list[set[Action]] = [set()]
    for action in row:
        if action.kind in MESSAGES:
            batches[-1].add(action)
        elif batches[-1]:
            batches.append(set())
    return batches if batches[-1] else batches[:-1]

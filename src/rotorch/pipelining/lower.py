"""From plain rows of computations to all actions of ranks: messages, gathers of weights and sums of gradients.

[Note: order of messages]
    All messages get one order that every rank keeps: that in which an ideal pipeline (`_starts`) would have them ready.
    Of the messages that have not passed yet, the first in that order can always pass, because its two ranks have only
    computations to do before it. So nothing hangs, whether ranks wait for each message, or for all messages between two
    computations at once, or only for the inputs of computations. And messages from one rank to another arrive
    in the order in which they are sent.

[Note: spans]
    A stage's weights are whole during spans: from the first to the last of its forwards in a unit, and of its
    backwards. Spans that overlap are one: 1F1B with a unit of several micro-batches keeps the weights. So there are at
    most two gathers per chunk and unit, and exactly two where forwards and backwards do not mix. With `ahead` the
    gather of a span starts one computation before its first, if the stage's weights are not whole then and those of at
    most one other stage are: so it never makes more than two stages whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from rotorch.pipelining.actions import COMPUTE, Action, ActionKind, Schedule, ScheduleError, table

_SLOTS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}
_GIVES_INPUT_GRADIENT = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
_TAKES_WEIGHT_GRADIENT = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)

Span = tuple[int, int]
"""First and last index in a row."""


def lower(
    schedule: Schedule, *, keep_adjacent: bool = False, weight_gradients_need_weights: bool = True, ahead: bool = False
) -> Schedule:
    """Adds communication to plain rows: SEND and RECV, UNSHARD and RESHARD, REDUCE_GRAD.

    A SEND stands right after the computation that makes its tensor. The RECV stands in the receiver's row at the moment
    of the SEND, often long before its use: post it there and wait where it is used. UNSHARD and REDUCE_GRAD concern the
    ranks that share a stage, which all have the same row.

    Args:
        schedule: of plain rows.
        keep_adjacent: keep the weights also where one span ends and the next of the same stage begins, if no other
            stage computes in between: fewer gathers at the same peak.
        weight_gradients_need_weights: BACKWARD_WEIGHT needs the stage's weights whole.
        ahead: an UNSHARD stands one computation earlier than it must, so that the gather runs beside that.

    Raises:
        ScheduleError: if rows wait for each other, or are lowered already.
    """
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank}, action {index} ({action}): rows are lowered already"
                )
    with_shards = []
    for row in schedule.rows:
        spans = _spans(
            schedule, row, keep_adjacent=keep_adjacent, weight_gradients_need_weights=weight_gradients_need_weights
        )
        with_shards.append(list(_with_sharding(schedule, row, spans, ahead=ahead)))
    return replace(schedule, rows=_with_messages(schedule, with_shards))


def inputs_of(kind: ActionKind, stage: int, *, last: int) -> tuple[tuple[ActionKind, int], ...]:
    """Kinds and stages of the computations that one depends on, of the same micro-batch.

    They are FORWARD or BACKWARD_INPUT, which BACKWARD stands for, too.

    Args:
        kind: of the computation.
        stage: of it.
        last: number of the last stage.
    """
    if kind is ActionKind.FORWARD:
        return ((ActionKind.FORWARD, stage - 1),) if stage else ()
    if kind is ActionKind.BACKWARD_WEIGHT:
        return ((ActionKind.BACKWARD_INPUT, stage),)
    own = (ActionKind.FORWARD, stage)
    return (own, (ActionKind.BACKWARD_INPUT, stage + 1)) if stage < last else (own,)


def needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """Yields the computations that one depends on (see `inputs_of`)."""
    for kind, stage in inputs_of(action.kind, action.stage, last=schedule.num_stages - 1):
        yield Action(kind, stage, action.micro_batch)


def gives(action: Action) -> Action:
    """The name under which other computations depend on one: BACKWARD makes the result of BACKWARD_INPUT."""
    if action.kind is ActionKind.BACKWARD:
        return Action(ActionKind.BACKWARD_INPUT, action.stage, action.micro_batch)
    return action


# ---------------------------------------------------------------- messages


def _starts(schedule: Schedule) -> list[list[int]]:
    """Start slots of plain actions, if forward, input and weight gradient take a slot each and messages no time."""
    forward: dict[int, int] = {}
    inputs: dict[int, int] = {}
    """Ends of forwards and of input gradients, by stage and micro-batch in one number."""
    number, last = schedule.num_micro_batches, schedule.num_stages - 1
    starts: list[list[int]] = [[] for _ in schedule.rows]
    free = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(starts[rank]) < len(row):
                action = row[len(starts[rank])]
                assert action.micro_batch is not None
                place = action.stage * number + action.micro_batch
                found = [
                    (forward if kind is ActionKind.FORWARD else inputs).get(stage * number + action.micro_batch)
                    for kind, stage in inputs_of(action.kind, action.stage, last=last)
                ]
                needed = [end for end in found if end is not None]
                if len(needed) < len(found):
                    break
                start = max([free[rank], *needed])
                starts[rank].append(start)
                free[rank] = start + _SLOTS[action.kind]
                if action.kind is ActionKind.FORWARD:
                    forward[place] = free[rank]
                elif action.kind in _GIVES_INPUT_GRADIENT:
                    inputs[place] = free[rank]
                moved = True
    stuck = [f"rank {r} at action {len(starts[r])} ({row[len(starts[r])]})" for r, row in enumerate(schedule.rows)
             if len(starts[r]) < len(row)]  # fmt: skip
    if stuck:
        raise ScheduleError(f"{schedule.name}: rows wait for each other: {', '.join(stuck)}\n{table(schedule.rows)}")
    return starts


def _with_messages(schedule: Schedule, rows: list[list[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Rows with messages between computations, in one order for all (see [Note: order of messages])."""
    starts = _starts(schedule)
    messages: list[tuple[int, int, int, Action, Action]] = []
    for rank, row in enumerate(schedule.rows):
        for start, action in zip(starts[rank], row, strict=True):
            ready = start + _SLOTS[action.kind]
            for send, receive in _messages_after(schedule, action):
                messages.append((ready, rank, schedule.rank_of(receive.stage), send, receive))
    messages.sort(key=lambda m: (m[0], m[3].stage, m[3].kind))  # a stage has one message of a kind ready at a time
    mine: list[deque[tuple[int, Action]]] = [deque() for _ in rows]
    for ready, source, target, send, receive in messages:
        mine[source].append((ready, send))
        mine[target].append((ready, receive))
    return tuple(tuple(_merged(*of_rank)) for of_rank in zip(rows, starts, mine, strict=True))


def _merged(row: list[Action], starts: list[int], messages: deque[tuple[int, Action]]) -> Iterator[Action]:
    """A row with its messages: those ready by the end of a computation right after it, others right before the next.

    So a computation's result is sent before gradients are summed, and weights are gathered before an input is received.
    """
    times = iter(starts)
    for action in row:
        if action.kind not in COMPUTE:
            yield action
            continue
        start = next(times)
        yield from _until(start, messages)
        yield action
        yield from _until(start + _SLOTS[action.kind], messages)
    yield from (message for _, message in messages)


def _until(moment: int, messages: deque[tuple[int, Action]]) -> Iterator[Action]:
    while messages and messages[0][0] <= moment:
        yield messages.popleft()[1]


def _messages_after(schedule: Schedule, action: Action) -> Iterator[tuple[Action, Action]]:
    """The SEND and RECV of a computation's result, if the stage that takes it is on another rank."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is ActionKind.FORWARD and stage < schedule.num_stages - 1:
        send, receive = Action(ActionKind.SEND_FORWARD, stage, micro_batch), ActionKind.RECV_FORWARD
        taker = stage + 1
    elif action.kind in _GIVES_INPUT_GRADIENT and stage > 0:
        send, receive = Action(ActionKind.SEND_BACKWARD, stage, micro_batch), ActionKind.RECV_BACKWARD
        taker = stage - 1
    else:
        return
    if schedule.rank_of(taker) != schedule.rank_of(stage):
        yield send, Action(receive, taker, micro_batch)


# ---------------------------------------------------------------- weights and their gradients


def _spans(
    schedule: Schedule, row: tuple[Action, ...], *, keep_adjacent: bool, weight_gradients_need_weights: bool
) -> dict[int, list[Span]]:
    """The spans in which the weights of each of a rank's stages are whole, in order (see [Note: spans])."""
    uses: dict[int, dict[tuple[int, bool], Span]] = {}
    for index, action in enumerate(row):
        if action.kind is ActionKind.BACKWARD_WEIGHT and not weight_gradients_need_weights:
            continue
        assert action.micro_batch is not None
        use = (schedule.unit_of(action.micro_batch), action.kind is ActionKind.FORWARD)
        first, _ = uses.setdefault(action.stage, {}).get(use, (index, index))
        uses[action.stage][use] = (first, index)
    spans: dict[int, list[Span]] = {}
    for stage, mine in uses.items():
        joined: list[Span] = []
        for first, last in sorted(mine.values()):
            if joined and (first < joined[-1][1] or (keep_adjacent and _alone(row, stage, joined[-1][1], first))):
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        spans[stage] = joined
    return spans


def _alone(row: tuple[Action, ...], stage: int, first: int, last: int) -> bool:
    return all(action.stage == stage for action in row[first : last + 1])


def _sent_for(spans: dict[int, list[Span]], *, ahead: bool) -> dict[int, list[int]]:
    """By index in a row: the stages whose gathers start before it (see [Note: spans])."""
    indices: dict[int, list[int]] = {}
    for first, stage in sorted((first, stage) for stage, mine in spans.items() for first, _ in mine):
        earlier = first - 1
        whole = {other for other, mine in spans.items() for start, last in mine if start <= earlier <= last}
        possible = ahead and earlier >= 0 and stage not in whole and len(whole) < 2 and earlier not in indices
        indices.setdefault(earlier if possible else first, []).append(stage)
    return indices


def _with_sharding(
    schedule: Schedule, row: tuple[Action, ...], spans: dict[int, list[Span]], *, ahead: bool
) -> Iterator[Action]:
    """A plain row with UNSHARD and RESHARD around its spans, and REDUCE_GRAD after a unit's last weight gradient."""
    unshard = _sent_for(spans, ahead=ahead)
    reshard = {last: stage for stage, mine in spans.items() for _, last in mine}
    last_gradient: dict[tuple[int, int], int] = {}
    for index, action in enumerate(row):
        if action.kind in _TAKES_WEIGHT_GRADIENT:
            assert action.micro_batch is not None
            last_gradient[action.stage, schedule.unit_of(action.micro_batch)] = index
    reduce = {index: stage for (stage, _), index in last_gradient.items()}
    for index, action in enumerate(row):
        for stage in unshard.get(index, ()):
            yield Action(ActionKind.UNSHARD, stage)
        yield action
        if index in reshard:
            yield Action(ActionKind.RESHARD, reshard[index])
        if index in reduce:
            yield Action(ActionKind.REDUCE_GRAD, reduce[index])

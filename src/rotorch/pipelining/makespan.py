"""Makespan of a table for many costs: the same times as `simulate` gives, but the table is read only once.

[Note: one recurrence]
    An action's predecessors do not depend on costs: the computation before it on its rank, its inputs, and the action
    before it on its line or lane. So a table becomes a list of actions, each behind its predecessors, and a makespan
    takes one maximum and one sum per action (see simulate.py, [Note: concurrency]).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

from rotorch.pipelining.actions import COMPUTE, SENDS, ActionKind, Schedule
from rotorch.pipelining.lower import inputs_of
from rotorch.pipelining.simulate import Link, StageCosts, simulate

_NOTHING = 0
"""The node before all others, which ends at 0."""

_NUMBER = {kind: number for number, kind in enumerate(ActionKind)}
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    _NUMBER[kind]
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
)
_UNSHARD, _REDUCE = _NUMBER[ActionKind.UNSHARD], _NUMBER[ActionKind.REDUCE_GRAD]
_SEND_FORWARD, _RECV_FORWARD = _NUMBER[ActionKind.SEND_FORWARD], _NUMBER[ActionKind.RECV_FORWARD]
_SEND_BACKWARD, _RECV_BACKWARD = _NUMBER[ActionKind.SEND_BACKWARD], _NUMBER[ActionKind.RECV_BACKWARD]
_OTHER_END = {
    _SEND_FORWARD: _RECV_FORWARD,
    _RECV_FORWARD: _SEND_FORWARD,
    _SEND_BACKWARD: _RECV_BACKWARD,
    _RECV_BACKWARD: _SEND_BACKWARD,
}


class Makespan:
    """A lowered table, timed with one set of costs after another; messages do not block, sums are hidden."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def seconds(self, costs: Sequence[StageCosts], *, link: Link) -> float:
        """Time from the first action's start to the last one's end.

        Args:
            costs: of each stage.
            link: between any two ranks.
        """
        kinds = list(ActionKind)
        duration_s: dict[int, float] = {}
        for stage, cost in enumerate(costs):
            for number, kind in enumerate(kinds):
                if kind in SENDS:
                    to = stage + 1 if kind is ActionKind.SEND_FORWARD else stage
                    seconds = link.duration_s(costs[to].message_bytes) if to < len(costs) else 0.0
                else:
                    seconds = cost.duration_s(kind)
                duration_s[stage * len(kinds) + number] = seconds
        ends = [0.0]
        for code, first, others in self._nodes:
            start = ends[first]
            for node in others:
                if ends[node] > start:
                    start = ends[node]
            ends.append(start + duration_s[code])
        return max(ends)

    @cached_property
    def _nodes(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Per node the key of its duration, and the nodes that it waits for (see [Note: one recurrence]).

        Actions are numbers here: objects as keys of dictionaries would take most of a search for a layout.
        """
        schedule = self.schedule
        last, width, per_kind = schedule.num_stages - 1, len(_NUMBER), schedule.num_micro_batches + 1
        rank_of = [schedule.rank_of(stage) for stage in range(schedule.num_stages)]
        found: list[tuple[int, int, tuple[int, ...]]] = []
        node_of: dict[int, int] = {}
        clock = [_NOTHING] * schedule.num_ranks
        lane = [_NOTHING] * schedule.num_ranks
        sums = [_NOTHING] * schedule.num_ranks
        asked: dict[int, int] = {}
        queues: dict[tuple[int, int], deque[tuple[int, int, int]]] = {}
        """Messages that were sent and not received yet: keys of both ends, and of the duration."""
        line: dict[tuple[int, int], int] = {}

        def key(kind: int, stage: int, micro_batch: int) -> int:
            return (stage * width + kind) * per_kind + micro_batch

        def passes(kind: int, stage: int, micro_batch: int) -> None:
            """Notes one end of a message, and lets the messages pass whose both ends are there."""
            is_send = kind in (_SEND_FORWARD, _SEND_BACKWARD)
            step = 1 if kind in (_SEND_FORWARD, _RECV_BACKWARD) else -1
            here, there = key(kind, stage, micro_batch), key(_OTHER_END[kind], stage + step, micro_batch)
            asked[here] = clock[rank_of[stage]]
            way = (rank_of[stage], rank_of[stage + step]) if is_send else (rank_of[stage + step], rank_of[stage])
            queue = queues.setdefault(way, deque())
            if is_send:
                queue.append((here, there, stage * width + kind))
            while queue and queue[0][1] in asked:
                send, receive, code = queue.popleft()
                found.append((code, asked[send], (asked[receive], line.get(way, _NOTHING))))
                line[way] = node_of[receive] = len(found)

        def arrives(kind: ActionKind, source: int, stage: int) -> int:
            """Key, for micro-batch 0, of the action that brings a stage's input: made on its rank, or received."""
            if rank_of[source] == rank_of[stage]:
                return key(_NUMBER[kind], source, 0)
            return key(_RECV_FORWARD if kind is ActionKind.FORWARD else _RECV_BACKWARD, stage, 0)

        waits_for = {
            (_NUMBER[kind], stage): [arrives(*need, stage) for need in inputs_of(kind, stage, last=last)]
            for kind in COMPUTE
            for stage in range(schedule.num_stages)
        }

        def computes(rank: int, kind: int, stage: int, micro_batch: int) -> bool:
            others = []
            for arrival in waits_for[kind, stage]:
                node = node_of.get(arrival + micro_batch)
                if node is None:
                    return False
                others.append(node)
            unshard = node_of.get(key(_UNSHARD, stage, 0))
            if unshard is not None:
                others.append(unshard)
            if kind != _FORWARD:
                others.append(sums[rank])
            found.append((stage * width + kind, clock[rank], tuple(others)))
            clock[rank] = node_of[key(_INPUT if kind == _BACKWARD else kind, stage, micro_batch)] = len(found)
            return True

        def does(rank: int, kind: int, stage: int, micro_batch: int) -> bool:
            if kind in _OTHER_END:
                passes(kind, stage, micro_batch)
            elif kind <= _WEIGHT:
                return computes(rank, kind, stage, micro_batch)
            elif kind in (_UNSHARD, _REDUCE):
                found.append((stage * width + kind, clock[rank], (lane[rank],)))
                lane[rank] = len(found)
                if kind == _UNSHARD:
                    node_of[key(kind, stage, 0)] = len(found)
                else:
                    sums[rank] = len(found)
            return True

        rows = [[(_NUMBER[a.kind], a.stage, a.micro_batch or 0) for a in row] for row in schedule.rows]
        indices = [0] * schedule.num_ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while indices[rank] < len(row) and does(rank, *row[indices[rank]]):
                    indices[rank] += 1
                    moved = True
        if any(index < len(row) for index, row in zip(indices, rows, strict=True)):
            simulate(schedule)  # raises an error that names the ranks that wait for each other
            raise AssertionError(f"{schedule.name}: stuck")
        return found

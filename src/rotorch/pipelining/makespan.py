"""Makespan of a table for many costs: the same times as `simulate` gives, but the table is read only once.

[Note: one recurrence]
    An action's predecessors do not depend on costs: the computation before it on its rank, its inputs, and the action
    before it on its line or lane. So a table becomes a list of actions, each behind its predecessors, and a makespan
    takes one maximum and one sum per action (see simulate.py, [Note: concurrency]).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rotorch.pipelining.actions import COMPUTE, MESSAGES, SENDS, Action, ActionKind, Schedule, counterpart
from rotorch.pipelining.lower import gives, needs
from rotorch.pipelining.simulate import Link, StageCosts, simulate

_NOTHING = 0
"""The node before all others, which ends at 0."""


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
        """Per node the key of its duration, and the nodes that it waits for (see [Note: one recurrence])."""
        schedule, kinds = self.schedule, list(ActionKind)
        number_of = {kind: number for number, kind in enumerate(kinds)}
        found: list[tuple[int, int, tuple[int, ...]]] = []
        node_of: dict[Action, int] = {}
        clock = [_NOTHING] * schedule.num_ranks
        lane = [_NOTHING] * schedule.num_ranks
        sums = [_NOTHING] * schedule.num_ranks
        asked: dict[Action, int] = {}
        queues: dict[tuple[int, int], list[Action]] = {}
        line: dict[tuple[int, int], int] = {}
        indices = [0] * schedule.num_ranks

        def add(action: Action, first: int, others: tuple[int, ...]) -> int:
            found.append((action.stage * len(kinds) + number_of[action.kind], first, others))
            return len(found)

        def goes(send: Action, way: tuple[int, int]) -> None:
            queue = queues.setdefault(way, [])
            while queue and counterpart(queue[0]) in asked:
                message = queue.pop(0)
                receive = counterpart(message)
                node = add(message, asked[message], (asked[receive], line.get(way, _NOTHING)))
                line[way] = node_of[receive] = node

        def does(rank: int, action: Action) -> bool:
            kind = action.kind
            if kind in MESSAGES:
                asked[action] = clock[rank]
                send = action if kind in SENDS else counterpart(action)
                way = (schedule.rank_of(send.stage), schedule.rank_of(counterpart(send).stage))
                if action is send:
                    queues.setdefault(way, []).append(send)
                goes(send, way)
            elif kind in COMPUTE:
                inputs = [self._arrives(rank, need, action) for need in needs(schedule, action)]
                if not all(need in node_of for need in inputs):
                    return False
                others = [node_of[need] for need in inputs]
                unshard = Action(ActionKind.UNSHARD, action.stage)
                others += [node_of[unshard]] if unshard in node_of else []
                others += [sums[rank]] if kind is not ActionKind.FORWARD else []
                clock[rank] = node_of[gives(action)] = add(action, clock[rank], tuple(others))
            elif kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
                lane[rank] = add(action, clock[rank], (lane[rank],))
                if kind is ActionKind.UNSHARD:
                    node_of[Action(kind, action.stage)] = lane[rank]
                else:
                    sums[rank] = lane[rank]
            return True

        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(schedule.rows):
                while indices[rank] < len(row) and does(rank, row[indices[rank]]):
                    indices[rank] += 1
                    moved = True
        if any(index < len(row) for index, row in zip(indices, schedule.rows, strict=True)):
            simulate(schedule)  # raises an error that names the ranks that wait for each other
            raise AssertionError(f"{schedule.name}: stuck")
        return found

    def _arrives(self, rank: int, need: Action, action: Action) -> Action:
        """The action by which an input of a computation comes to its rank: made there, or received."""
        if self.schedule.rank_of(need.stage) == rank:
            return need
        forward = need.kind is ActionKind.FORWARD
        received = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
        return Action(received, action.stage, action.micro_batch)

"""List schedule over lanes: the concurrent work of one rank.

[Note: lanes]
    The host issues operators one after another and runs ahead of the device. The device computes in that order.
    Collectives, fetches of weights, hops of gradients, and their sums over replicas each have a lane of their own
    beside it: a task begins when its lane is free and all its predecessors are done. A computation ends no earlier than
    the host has issued its last operator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Lane(StrEnum):
    """Resource of a rank that works beside the others."""

    HOST = "host"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    FETCH = "fetch"
    HOP = "hop"
    SUM = "sum"


@dataclass
class Lanes:
    """Tasks as they are put on lanes, in the order in which the host issues them.

    Attributes:
        free_s: time at which each lane is done with its last task.
        busy_s: busy seconds of each lane.
    """

    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    busy_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))

    def put(self, lane: Lane, seconds: float, *, after: Iterable[float] = (), issue_s: float = 0.0) -> float:
        """Adds a task; returns when it ends.

        Args:
            lane: lane of the task.
            seconds: seconds that the task takes there.
            after: ends of what it waits for.
            issue_s: seconds that the host takes to issue it.
        """
        issued_from = self.free_s[Lane.HOST]
        self.free_s[Lane.HOST] += issue_s
        self.busy_s[Lane.HOST] += issue_s
        start = max(self.free_s[lane], issued_from, *after)
        end = max(start + seconds, self.free_s[Lane.HOST] if issue_s else start)
        self.free_s[lane] = end
        self.busy_s[lane] += seconds
        return end

    def wait(self, *ends: float) -> None:
        """Holds the host until all of these are done, as reading a number from the device does."""
        self.free_s[Lane.HOST] = max(self.free_s[Lane.HOST], *ends)

    @property
    def end_s(self) -> float:
        """Time at which all lanes are done."""
        return max(self.free_s.values())

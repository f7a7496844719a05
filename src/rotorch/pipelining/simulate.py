"""What a table costs: when every action runs, how long ranks stand idle, what they hold at each moment.

[Note: what runs at the same time]
    A rank computes one thing at a time. Beside that, messages to each other rank go one after another, and so do the
    rank's gathers and sums. A computation waits for the weights and the input that it needs; a message for both ends.
    With `blocking` a rank stands still from its SEND or RECV until the message is through. Memory is what computations
    keep; buffers of messages are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rotorch.pipelining.actions import (
    COMPUTE,
    MESSAGES,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    counterpart,
)
from rotorch.pipelining.lower import gives, lower, needs

ACTIVATIONS, WEIGHTS, GRADIENTS = CATEGORIES = ("activations", "whole weights", "whole gradients")


@dataclass(frozen=True)
class StageCosts:
    """One stage: seconds and bytes, or any other units. By default each computation takes 1 and nothing else counts.

    Attributes:
        forward_s: per micro-batch; so are the next two, which BACKWARD takes together.
        backward_input_s: the gradient of the stage's input.
        backward_weight_s: those of its weights.
        unshard_s: to gather its weights.
        reduce_s: to sum its gradients.
        activation_bytes: kept of a micro-batch from its forward on.
        pending_bytes: kept of it between its input and its weight gradient; None: as much as before.
        weight_bytes: of its whole weights, while they are gathered.
        gradient_bytes: of its whole gradients, from the first weight gradient of a unit to the end of REDUCE_GRAD.
        message_bytes: of its input, and of that input's gradient.
    """

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0
    activation_bytes: float = 1.0
    pending_bytes: float | None = None
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    message_bytes: float = 0.0

    def duration_s(self, kind: ActionKind) -> float:
        """Of what happens on one rank; messages take what their link needs."""
        return {
            ActionKind.FORWARD: self.forward_s,
            ActionKind.BACKWARD: self.backward_input_s + self.backward_weight_s,
            ActionKind.BACKWARD_INPUT: self.backward_input_s,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight_s,
            ActionKind.UNSHARD: self.unshard_s,
            ActionKind.REDUCE_GRAD: self.reduce_s,
        }.get(kind, 0.0)


@dataclass(frozen=True)
class Link:
    """Between two ranks, each way for itself.

    Attributes:
        bytes_per_s: its speed.
        latency_s: what every message takes besides.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def duration_s(self, message_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + message_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Entry:
    """One action in time. Of a message, the entry of its SEND says when it was under way."""

    rank: int
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True)
class Moment:
    """What a rank holds from `time_s` on, in bytes by category (`CATEGORIES`)."""

    time_s: float
    held: tuple[float, float, float]


@dataclass(frozen=True)
class Simulation:
    """What `simulate` found.

    Attributes:
        schedule: lowered.
        timeline: all actions, by rank and then in the order in which they start.
        memory: of each rank, whenever it changes.
    """

    schedule: Schedule
    timeline: tuple[Entry, ...]
    memory: tuple[tuple[Moment, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From the first action's start to the last one's end."""
        return max(entry.end_s for entry in self.timeline)

    def busy_s(self, rank: int) -> float:
        """What `rank` spends computing."""
        return sum(e.end_s - e.start_s for e in self.timeline if e.rank == rank and e.action.kind in COMPUTE)

    @property
    def bubble_s(self) -> float:
        """What a rank stands idle, in the mean."""
        ranks = range(self.schedule.num_ranks)
        return self.makespan_s - sum(map(self.busy_s, ranks)) / len(ranks)

    @property
    def bubble_ratio(self) -> float:
        """The idle part of the whole time, in the mean of ranks."""
        return self.bubble_s / self.makespan_s

    def peak_bytes(self, rank: int, *, category: str | None = None) -> float:
        """The most that `rank` holds at a moment, of one category or of all together."""
        place = None if category is None else CATEGORIES.index(category)
        return max((sum(m.held) if place is None else m.held[place] for m in self.memory[rank]), default=0.0)


def simulate(
    schedule: Schedule,
    *,
    costs: StageCosts | Sequence[StageCosts] = StageCosts(),
    link: Link = Link(),
    blocking: bool = False,
) -> Simulation:
    """Runs a table in thought (see [Note: what runs at the same time]).

    Args:
        schedule: lowered; plain rows are lowered first.
        costs: of every stage, or of each.
        link: between any two ranks.
        blocking: whether ranks wait where they send and receive.

    Raises:
        ScheduleError: if ranks wait for each other.
    """
    if all(action.kind in COMPUTE for row in schedule.rows for action in row):
        schedule = lower(schedule)
    by_stage = [costs] * schedule.num_stages if isinstance(costs, StageCosts) else list(costs)
    if len(by_stage) != schedule.num_stages:
        raise ValueError(f"costs of {len(by_stage)} stages, but there are {schedule.num_stages}")
    run = _Run(schedule, by_stage, link, blocking)
    run.to_the_end()
    for mine in run.entries:
        mine.sort(key=lambda entry: entry.start_s)
    timeline = tuple(entry for mine in run.entries for entry in mine)
    return Simulation(schedule, timeline, tuple(_memory(schedule, by_stage, mine) for mine in run.entries))


@dataclass
class _Run:
    """Rows as far as they are done. What is known of a time is final, so ranks may be taken in any order."""

    schedule: Schedule
    costs: list[StageCosts]
    link: Link
    blocking: bool
    entries: list[list[Entry]] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    """When each rank is through with what stands before its next action."""
    collectives: list[float] = field(default_factory=list)
    """When each rank's last gather or sum ends."""
    lines: dict[tuple[int, int], list[Action]] = field(default_factory=dict)
    """Messages that are asked to go from one rank to another, and have not gone."""
    line_free: dict[tuple[int, int], float] = field(default_factory=dict)
    asked: dict[Action, float] = field(default_factory=dict)
    """When ranks reached their SENDs and RECVs."""
    ends: dict[Action, float] = field(default_factory=dict)
    """Of computations as what they give, of messages as their RECVs, of gathers."""

    def to_the_end(self) -> None:
        ranks = range(self.schedule.num_ranks)
        self.entries = [[] for _ in ranks]
        self.clocks, self.collectives = [0.0] * len(ranks), [0.0] * len(ranks)
        places = [0] * len(ranks)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.schedule.rows):
                while places[rank] < len(row) and self._does(rank, row[places[rank]]):
                    places[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at action {place} ({row[place]})"
            for rank, (row, place) in enumerate(zip(self.schedule.rows, places, strict=True))
            if place < len(row)
        ]
        if stuck:
            how = "blocking messages" if self.blocking else "messages"
            raise ScheduleError(f"{self.schedule.name}: deadlock with {how}: {', '.join(stuck)}")

    def _does(self, rank: int, action: Action) -> bool:
        """Does a rank's next action, if its time is known."""
        if action.kind in MESSAGES:
            return self._asks(rank, action)
        start = self.clocks[rank]
        if action.kind in COMPUTE:
            waited = [*self._inputs_of(rank, action), Action(ActionKind.UNSHARD, action.stage)]
            if not all(what in self.ends for what in waited[:-1]):
                return False
            start = max([start, *(self.ends[what] for what in waited if what in self.ends)])
        elif action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
            start = max(start, self.collectives[rank])
        end = start + self.costs[action.stage].duration_s(action.kind)
        if action.kind in COMPUTE:
            self.clocks[rank] = end
        elif action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
            self.collectives[rank] = end
        self.ends[gives(action)] = end
        self.entries[rank].append(Entry(rank, start, end, action))
        return True

    def _inputs_of(self, rank: int, action: Action) -> list[Action]:
        """What `needs` says, but what comes from another rank as its RECV."""
        inputs = []
        for need in needs(self.schedule, action):
            if self.schedule.rank_of(need.stage) == rank:
                inputs.append(need)
            elif need.kind is ActionKind.FORWARD:
                inputs.append(Action(ActionKind.RECV_FORWARD, action.stage, action.micro_batch))
            else:
                inputs.append(Action(ActionKind.RECV_BACKWARD, action.stage, action.micro_batch))
        return inputs

    def _asks(self, rank: int, action: Action) -> bool:
        """A SEND or RECV is reached; its message goes when both are, and those before it on the line have gone."""
        if action not in self.asked:
            self.asked[action] = self.clocks[rank]
            send = action if action.kind in SENDS else counterpart(action)
            line = (self.schedule.rank_of(send.stage), self.schedule.rank_of(counterpart(send).stage))
            if action is send:
                self.lines.setdefault(line, []).append(send)
            self._moves(line)
        receive = action if action.kind in RECEIVES else counterpart(action)
        if not self.blocking:
            return True
        if receive not in self.ends:
            return False
        self.clocks[rank] = max(self.clocks[rank], self.ends[receive])
        return True

    def _moves(self, line: tuple[int, int]) -> None:
        queue = self.lines.setdefault(line, [])
        while queue and counterpart(queue[0]) in self.asked:
            send = queue.pop(0)
            receive = counterpart(send)
            start = max(self.asked[send], self.asked[receive], self.line_free.get(line, 0.0))
            to_stage = receive if send.kind is ActionKind.SEND_FORWARD else send
            end = start + self.link.duration_s(self.costs[to_stage.stage].message_bytes)
            self.line_free[line] = self.ends[receive] = end
            self.entries[line[0]].append(Entry(line[0], start, end, send))
            self.entries[line[1]].append(Entry(line[1], start, end, receive))


def _memory(schedule: Schedule, costs: Sequence[StageCosts], entries: Sequence[Entry]) -> tuple[Moment, ...]:
    """What one rank holds over time. What is freed at the moment at which something else is taken is not counted."""
    changes: list[tuple[float, int, float]] = []
    open_gradients: set[tuple[int, int]] = set()
    for entry in entries:
        action, cost = entry.action, costs[entry.action.stage]
        pending = cost.activation_bytes if cost.pending_bytes is None else cost.pending_bytes
        match action.kind:
            case ActionKind.FORWARD:
                changes.append((entry.start_s, 0, cost.activation_bytes))
            case ActionKind.BACKWARD:
                changes.append((entry.end_s, 0, -cost.activation_bytes))
            case ActionKind.BACKWARD_INPUT:
                changes.append((entry.end_s, 0, pending - cost.activation_bytes))
            case ActionKind.BACKWARD_WEIGHT:
                changes.append((entry.end_s, 0, -pending))
            case ActionKind.UNSHARD:
                changes.append((entry.start_s, 1, cost.weight_bytes))
            case ActionKind.RESHARD:
                changes.append((entry.start_s, 1, -cost.weight_bytes))
            case ActionKind.REDUCE_GRAD:
                changes.append((entry.end_s, 2, -cost.gradient_bytes))
        if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) and action.micro_batch is not None:
            unit = (action.stage, schedule.unit_of(action.micro_batch))
            if unit not in open_gradients:
                open_gradients.add(unit)
                changes.append((entry.start_s, 2, cost.gradient_bytes))
    changes.sort(key=lambda change: change[0])
    held, moments = [0.0, 0.0, 0.0], []
    for place, (time_s, category, more) in enumerate(changes):
        held[category] += more
        if place + 1 == len(changes) or changes[place + 1][0] > time_s:
            moments.append(Moment(time_s, (held[0], held[1], held[2])))
    return tuple(moments)

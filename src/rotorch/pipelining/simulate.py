"""Simulation of a table: the time of every action, the idle time of ranks, and their memory at each moment.

[Note: concurrency]
    A rank runs one computation at a time. Beside it, messages to each other rank go one after another, and so do the
    rank's gathers and sums. A computation waits for its weights and its input, a message for both of its ends. With
    `blocking` a rank stands still from its SEND or RECV until the message has arrived; without `hides_sums` it does so
    in REDUCE_GRAD.

[Note: memory]
    A rank's memory changes in the order of its row. Weights take memory from their UNSHARD on. A received tensor takes
    memory from its RECV on; its forward keeps it as an activation, its backward frees it. A gradient that is sent stays
    until two more are under way to the same rank. Whole gradients stay until their sum is complete, which is awaited
    before this rank makes new ones; the rank's part of the sum stays for the rest of the step. Extra bytes exist only
    while a computation runs.
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

ACTIVATIONS, WEIGHTS, GRADIENTS, BUFFERS = CATEGORIES = ("activations", "whole weights", "whole gradients", "buffers")

MOST_UNCLAIMED = 2
"""Gradients of inputs that may be under way to one rank."""


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
        pending_bytes: kept of it between its input and its weight gradient; None: as much as `activation_bytes`.
        weight_bytes: of its whole weights, while they are gathered.
        gradient_bytes: of its whole gradients, from the first weight gradient of a unit to the end of REDUCE_GRAD.
        message_bytes: of its input, and of that input's gradient.
        forward_extra_bytes: of a forward while it runs, beyond those that it keeps.
        backward_extra_bytes: likewise of BACKWARD and BACKWARD_INPUT, beyond those that were kept.
        weight_extra_bytes: likewise of BACKWARD_WEIGHT.
        early_gradient_bytes: of whole gradients that BACKWARD_INPUT makes already (embeddings, norms).
        gradient_part_bytes: of this rank's part of a sum of gradients.
        reduce_extra_bytes: that a sum takes besides, while it is under way.
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
    forward_extra_bytes: float = 0.0
    backward_extra_bytes: float = 0.0
    weight_extra_bytes: float = 0.0
    early_gradient_bytes: float = 0.0
    gradient_part_bytes: float = 0.0
    reduce_extra_bytes: float = 0.0

    def duration_s(self, kind: ActionKind) -> float:
        """Duration of an action on one rank; 0 for messages, whose `Link` has a duration of its own."""
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
    """The connection between two ranks, in each direction.

    Attributes:
        bytes_per_s: its speed.
        latency_s: additional time of every message.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def duration_s(self, message_bytes: float) -> float:
        """Duration of one message."""
        return self.latency_s + message_bytes / self.bytes_per_s


@dataclass(frozen=True)
class TimedAction:
    """One action in time. For a message, start and end are those of its time under way."""

    rank: int
    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True)
class Moment:
    """Memory of a rank from `time_s` on, in bytes by category (`CATEGORIES`)."""

    time_s: float
    held: tuple[float, float, float, float]


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`.

    Attributes:
        schedule: lowered.
        timeline: all actions, by rank and then in the order in which they start.
        memory: of each rank, whenever it changes, in the order of its row (see [Note: memory]).
    """

    schedule: Schedule
    timeline: tuple[TimedAction, ...]
    memory: tuple[tuple[Moment, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Time from the first action's start to the last one's end."""
        return max(entry.end_s for entry in self.timeline)

    def busy_s(self, rank: int) -> float:
        """Time that `rank` spends computing."""
        return sum(e.end_s - e.start_s for e in self.timeline if e.rank == rank and e.action.kind in COMPUTE)

    @property
    def bubble_s(self) -> float:
        """Idle time of a rank, averaged over ranks."""
        ranks = range(self.schedule.num_ranks)
        return self.makespan_s - sum(map(self.busy_s, ranks)) / len(ranks)

    @property
    def bubble_ratio(self) -> float:
        """Idle fraction of the makespan, averaged over ranks."""
        return self.bubble_s / self.makespan_s

    def peak_bytes(self, rank: int, *, category: str | None = None) -> float:
        """The most that `rank` holds at a moment, of one category or of all together."""
        number = None if category is None else CATEGORIES.index(category)
        return max((sum(m.held) if number is None else m.held[number] for m in self.memory[rank]), default=0.0)


def simulate(
    schedule: Schedule,
    *,
    costs: StageCosts | Sequence[StageCosts] = StageCosts(),
    link: Link = Link(),
    blocking: bool = False,
    hides_sums: bool = True,
) -> Simulation:
    """Simulates a table (see [Note: concurrency]).

    Args:
        schedule: lowered; plain rows are lowered first.
        costs: of every stage, or of each.
        link: between any two ranks.
        blocking: ranks wait where they send and receive.
        hides_sums: ranks compute while gradients are summed; on CPU they do not (`hold/gathered_stages.py`).

    Raises:
        ScheduleError: if ranks wait for each other.
    """
    if all(action.kind in COMPUTE for row in schedule.rows for action in row):
        schedule = lower(schedule)
    by_stage = [costs] * schedule.num_stages if isinstance(costs, StageCosts) else list(costs)
    if len(by_stage) != schedule.num_stages:
        raise ValueError(f"costs of {len(by_stage)} stages, but there are {schedule.num_stages}")
    run = _Run(schedule, by_stage, link, blocking, hides_sums)
    run.to_the_end()
    for mine in run.entries:
        mine.sort(key=lambda entry: entry.start_s)
    timeline = tuple(entry for mine in run.entries for entry in mine)
    return Simulation(schedule, timeline, tuple(run.memory(rank) for rank in range(schedule.num_ranks)))


@dataclass
class _Run:
    """Rows, as far as they are done. Known times are final, so ranks may be taken in any order."""

    schedule: Schedule
    costs: list[StageCosts]
    link: Link
    blocking: bool
    hides_sums: bool
    entries: list[list[TimedAction]] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    """Per rank: the time at which all before its next action is done."""
    collectives: list[float] = field(default_factory=list)
    """Per rank: the end of its last gather or sum."""
    lines: dict[tuple[int, int], list[Action]] = field(default_factory=dict)
    """By sender and receiver: messages whose SEND was reached and that have not gone yet."""
    line_free: dict[tuple[int, int], float] = field(default_factory=dict)
    asked: dict[Action, float] = field(default_factory=dict)
    """Times at which ranks reached their SENDs and RECVs."""
    sums: list[float] = field(default_factory=list)
    """Per rank: the end of its last sum of gradients."""
    done: list[list[tuple[Action, float, float]]] = field(default_factory=list)
    """Per rank: the actions that it has reached, in the order of its row, with start and end."""
    ends: dict[Action, float] = field(default_factory=dict)
    """Ends of computations (as `gives` names them), of messages (as their RECVs), and of gathers."""

    def to_the_end(self) -> None:
        ranks = range(self.schedule.num_ranks)
        self.entries = [[] for _ in ranks]
        self.clocks, self.collectives, self.sums = ([0.0] * len(ranks) for _ in range(3))
        self.done = [[] for _ in ranks]
        indices = [0] * len(ranks)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.schedule.rows):
                while indices[rank] < len(row) and self._does(rank, row[indices[rank]]):
                    indices[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at action {index} ({row[index]})"
            for rank, (row, index) in enumerate(zip(self.schedule.rows, indices, strict=True))
            if index < len(row)
        ]
        if stuck:
            how = "blocking messages" if self.blocking else "messages"
            raise ScheduleError(f"{self.schedule.name}: deadlock with {how}: {', '.join(stuck)}")

    def _does(self, rank: int, action: Action) -> bool:
        """Does a rank's next action, if its time is known."""
        if action.kind in MESSAGES:
            passes = self._asks(rank, action)
            if passes:
                self.done[rank].append((action, self.clocks[rank], self.clocks[rank]))
            return passes
        start = self.clocks[rank]
        if action.kind in COMPUTE:
            waited = [*self._inputs_of(rank, action), Action(ActionKind.UNSHARD, action.stage)]
            if not all(what in self.ends for what in waited[:-1]):
                return False
            start = max([start, *(self.ends[what] for what in waited if what in self.ends)])
            if action.kind is not ActionKind.FORWARD:
                start = max(start, self.sums[rank])
        elif action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
            start = max(start, self.collectives[rank])
        end = start + self.costs[action.stage].duration_s(action.kind)
        if action.kind in COMPUTE:
            self.clocks[rank] = end
        elif action.kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
            self.collectives[rank] = end
            if action.kind is ActionKind.REDUCE_GRAD:
                self.sums[rank] = end
                if not self.hides_sums:
                    self.clocks[rank] = end
        waits = action.kind in COMPUTE or (action.kind is ActionKind.REDUCE_GRAD and not self.hides_sums)
        self.done[rank].append((action, start if waits else self.clocks[rank], end))
        self.ends[gives(action)] = end
        self.entries[rank].append(TimedAction(rank, start, end, action))
        return True

    def _inputs_of(self, rank: int, action: Action) -> list[Action]:
        """The inputs by `needs`, with those from another rank replaced by their RECVs."""
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
        """Notes that a SEND or RECV is reached; its message goes when both are, in the order of the line."""
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
            self.entries[line[0]].append(TimedAction(line[0], start, end, send))
            self.entries[line[1]].append(TimedAction(line[1], start, end, receive))

    def memory(self, rank: int) -> tuple[Moment, ...]:
        """A rank's memory over time, after `to_the_end` (see [Note: memory])."""
        held = _Held(self.schedule, self.costs, rank, hides_sums=self.hides_sums)
        for action, start_s, end_s in self.done[rank]:
            held.begins(action, start_s)
            held.ends(action, end_s)
        held.is_through(max((end_s for _, _, end_s in self.done[rank]), default=0.0))
        return tuple(held.moments)


class _Held:
    """Memory of one rank, action by action."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCosts], rank: int, *, hides_sums: bool) -> None:
        self.moments: list[Moment] = []
        self._hides_sums = hides_sums
        self._schedule, self._costs, self._rank = schedule, costs, rank
        self._now = dict.fromkeys(CATEGORIES, 0.0)
        self._summing = 0.0
        """Bytes of whole gradients whose sum is under way."""
        self._added = 0.0
        """Bytes that this sum frees at its end: its extra memory, and a part that is added to an earlier one."""
        self._whole_gradients: dict[int, float] = {}
        """Bytes by stage, since its last sum."""
        self._kept_parts: set[int] = set()
        self._sent: dict[int, list[float]] = {}
        """Bytes of gradients that are under way, by receiver."""

    def begins(self, action: Action, time_s: float) -> None:
        """Counts memory that an action takes at its start."""
        cost, stage = self._costs[action.stage], action.stage
        more = dict.fromkeys(CATEGORIES, 0.0)
        match action.kind:
            case ActionKind.RECV_FORWARD:
                more[BUFFERS] += cost.message_bytes
            case ActionKind.RECV_BACKWARD:
                more[BUFFERS] += self._costs[stage + 1].message_bytes
            case ActionKind.SEND_BACKWARD:
                more[BUFFERS] -= self._sends(action, cost.message_bytes)
            case ActionKind.UNSHARD:
                more[WEIGHTS] += cost.weight_bytes
            case ActionKind.RESHARD:
                more[WEIGHTS] -= cost.weight_bytes
            case ActionKind.REDUCE_GRAD:
                self._await_sum(more)
                self._summing = cost.gradient_bytes
                self._whole_gradients.pop(stage, None)
                more[BUFFERS] += cost.gradient_part_bytes + cost.reduce_extra_bytes
            case ActionKind.FORWARD:
                more[ACTIVATIONS] += cost.activation_bytes
                more[BUFFERS] += cost.forward_extra_bytes
                if self._from_another(stage, stage - 1):
                    more[BUFFERS] -= cost.message_bytes  # among activations from here on
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT | ActionKind.BACKWARD_WEIGHT:
                self._await_sum(more)
                weight = action.kind is ActionKind.BACKWARD_WEIGHT
                more[BUFFERS] += cost.weight_extra_bytes if weight else cost.backward_extra_bytes
        if action.kind in COMPUTE and action.kind is not ActionKind.FORWARD:
            early = action.kind is ActionKind.BACKWARD_INPUT
            there, made = (
                self._whole_gradients.get(stage, 0.0),
                cost.early_gradient_bytes if early else cost.gradient_bytes,
            )
            more[GRADIENTS] += max(0.0, made - there)
            self._whole_gradients[stage] = max(there, made)
        self._change(more, time_s)

    def ends(self, action: Action, time_s: float) -> None:
        """Counts memory that an action frees at its end."""
        cost, stage = self._costs[action.stage], action.stage
        pending = cost.activation_bytes if cost.pending_bytes is None else cost.pending_bytes
        more = dict.fromkeys(CATEGORIES, 0.0)
        match action.kind:
            case ActionKind.FORWARD:
                more[BUFFERS] -= cost.forward_extra_bytes
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                more[ACTIVATIONS] -= cost.activation_bytes
                if action.kind is ActionKind.BACKWARD_INPUT:
                    more[ACTIVATIONS] += pending
                more[BUFFERS] -= cost.backward_extra_bytes
                if stage + 1 < self._schedule.num_stages:
                    more[BUFFERS] -= self._costs[stage + 1].message_bytes
                if stage > 0:
                    more[BUFFERS] += cost.message_bytes
            case ActionKind.BACKWARD_WEIGHT:
                more[ACTIVATIONS] -= pending
                more[BUFFERS] -= cost.weight_extra_bytes
            case ActionKind.REDUCE_GRAD:
                # The first part is the sum so far; later ones are added to it when their sum is through.
                self._added = cost.reduce_extra_bytes
                if stage in self._kept_parts:
                    self._added += cost.gradient_part_bytes
                self._kept_parts.add(stage)
                if not self._hides_sums:
                    self._await_sum(more)
        self._change(more, time_s)

    def is_through(self, time_s: float) -> None:
        """Counts the end of the row: all messages have left, and sums are complete."""
        sent = sum(sum(queue) for queue in self._sent.values())
        self._sent.clear()
        more = {**dict.fromkeys(CATEGORIES, 0.0), BUFFERS: -sent}
        self._await_sum(more)
        self._change(more, time_s)

    def _await_sum(self, more: dict[str, float]) -> None:
        more[GRADIENTS] -= self._summing
        more[BUFFERS] -= self._added
        self._summing = self._added = 0.0

    def _sends(self, action: Action, num_bytes: float) -> float:
        """Bytes of earlier gradients that are freed once this one is under way."""
        queue = self._sent.setdefault(self._schedule.rank_of(action.stage - 1), [])
        queue.append(num_bytes)
        return queue.pop(0) if len(queue) > MOST_UNCLAIMED else 0.0

    def _from_another(self, stage: int, other: int) -> bool:
        return other >= 0 and self._schedule.rank_of(other) != self._schedule.rank_of(stage)

    def _change(self, more: dict[str, float], time_s: float) -> None:
        if any(more.values()):
            self._now = {category: held + more[category] for category, held in self._now.items()}
            self.moments.append(Moment(time_s, tuple(self._now.values())))  # type: ignore[arg-type]

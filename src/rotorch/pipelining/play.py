"""Rows by playing: in every slot of time each rank does the ready action that its rule prefers.

Forward, input gradient and weight gradient take one slot each, messages none. Micro-batches of a stage are taken in
order, so that three counters describe a stage's progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rotorch.pipelining.actions import Action, ActionKind


@dataclass
class Progress:
    """Progress of the stages at the beginning of a slot: micro-batches done, by stage."""

    num_micro_batches: int
    forwards: list[int]
    inputs: list[int]
    weights: list[int]

    def next_of(self, kind: ActionKind, stage: int) -> int | None:
        """The micro-batch with which `stage` could do `kind` now; None if nothing is ready."""
        done, last = getattr(self, _COUNTER[kind])[stage], len(self.forwards) - 1
        match kind:
            case ActionKind.FORWARD:
                there = self.num_micro_batches if stage == 0 else self.forwards[stage - 1]
            case ActionKind.BACKWARD_INPUT:
                # The last stage makes its gradient from the loss; others get theirs from the stage behind them.
                there = min(self.forwards[stage], self.num_micro_batches if stage == last else self.inputs[stage + 1])
            case _:
                there = self.inputs[stage]
        return done if done < there else None


_COUNTER = {
    ActionKind.FORWARD: "forwards",
    ActionKind.BACKWARD_INPUT: "inputs",
    ActionKind.BACKWARD_WEIGHT: "weights",
}

Choice = tuple[ActionKind, int]
"""A kind of action, and the stage to do it with."""

Rule = Callable[[int, Progress], Iterable[Choice]]
"""A rank's preferred actions for this slot, best first. Some may not be ready."""


def play(rule: Rule, *, num_ranks: int, num_stages: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Plays until all is done; returns each rank's actions, without its idle slots.

    `rule` must name an action that is ready, on some rank, as long as any is left to do.
    """
    now = Progress(num_micro_batches, [0] * num_stages, [0] * num_stages, [0] * num_stages)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    while min(now.weights) < num_micro_batches:
        # All choose before any counter moves: within a slot no rank has what another one makes in it.
        chosen = [_first_ready(rule(rank, now), now) for rank in range(num_ranks)]
        assert any(chosen), f"nothing is ready that the rule names: {now}"
        for row, action in zip(rows, chosen, strict=True):
            if action is not None:
                row.append(action)
                getattr(now, _COUNTER[action.kind])[action.stage] += 1
    return tuple(tuple(row) for row in rows)


def _first_ready(choices: Iterable[Choice], now: Progress) -> Action | None:
    for kind, stage in choices:
        micro_batch = now.next_of(kind, stage)
        if micro_batch is not None:
            return Action(kind, stage, micro_batch)
    return None

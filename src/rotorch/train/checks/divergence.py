"""Reaction to a step whose loss or gradients went wrong: stop, skip its batch, or go back to a checkpoint.

[Note: going back]
    A step is a function of the checkpoint before it and of its data, so a repetition gives the same numbers
    again. A run that goes back from step F to step S therefore continues with the data behind step F: step S + 1 gets
    the data of step F + 1. Checkpoints keep the lead of the data over the steps beside the data position.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal

from rotorch.core.errors import FinalFailure
from rotorch.run_config import TrainSection
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.saving import load_newest
from rotorch.train.checkpoint.store import AnyPath
from rotorch.train.state import TrainState
from rotorch.train.step import StepResult

READ_AHEAD = "steps_read_ahead"
"""The entry of a checkpoint's data position that says how far reading is ahead of the steps."""
RECENT_LOSSES = "recent_losses"
"""The entry that has the last losses, so that a run that goes on judges the next one as it would have."""

_MEDIAN_OF = 32
_FEWEST = 8
_MOST_SKIPS = 10
_MOST_RETURNS = 3

Action = Literal["stop", "skip", "roll_back"]


class DivergenceGuard:
    """Remembers the last losses, and how often the run has skipped or gone back. The same on all ranks."""

    def __init__(self, train: TrainSection, *, losses: Sequence[float] = ()) -> None:
        self._train = train
        self._losses: deque[float] = deque(losses, maxlen=_MEDIAN_OF)
        self._skips = 0
        self._returns = 0

    @property
    def highest_loss(self) -> float:
        """A loss above this is a spike."""
        if not self._train.spike_factor or len(self._losses) < _FEWEST:
            return math.inf
        return self._train.spike_factor * statistics.median(self._losses)

    def done(self, loss: float) -> None:
        """A step went well."""
        self._losses.append(loss)
        self._skips = 0

    def saved(self) -> None:
        """A checkpoint was written: going back to it is a new beginning."""
        self._returns = 0

    def remember_in(self, state: TrainState) -> None:
        """Stores recent losses in a checkpoint's state. Stores nothing if no loss is ever a spike."""
        if self._train.spike_factor:
            state.data = {**state.data, RECENT_LOSSES: list(self._losses)}

    def describe(self, result: StepResult) -> str:
        """Describes the fault of a step, as a sentence without its end."""
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return f"the loss is {result.loss:.6g} and the gradient norm {result.grad_norm:.6g}"
        return (
            f"the loss is {result.loss:.6g}, more than train.spike_factor = {self._train.spike_factor:g} times "
            f"{statistics.median(self._losses):.6g}, the median of the last {len(self._losses)}"
        )

    def action(self, result: StepResult, *, what: str) -> Action:
        """Chooses the reaction to a step that was not updated.

        Raises:
            FinalFailure: if it was done too often already.
        """
        is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        action: Action = "roll_back" if is_finite else self._train.on_nonfinite
        if action == "skip":
            self._skips += 1
            if self._skips > _MOST_SKIPS:
                raise FinalFailure(f"{what}, after {_MOST_SKIPS} steps in a row that were skipped for the like")
        if action == "roll_back":
            self._returns += 1
            if self._returns > _MOST_RETURNS:
                raise FinalFailure(f"{what}, after going back {_MOST_RETURNS} times without coming to a new checkpoint")
        return action

    def go_back(self, state: TrainState, *, step: int, saves_in: AnyPath, what: str) -> AnyPath:
        """Loads the last checkpoint, to read on behind what `step` read (see [Note: going back]). All ranks.

        Raises:
            FinalFailure: if there is no checkpoint yet.
        """
        position = step + read_ahead(state)
        path = latest(saves_in)
        if path is None:
            raise FinalFailure(f"{what}, and there is no checkpoint yet to go back to")
        path = load_newest(path, state)
        state.data = {**state.data, READ_AHEAD: position - state.step}
        self._losses.clear()
        return path


def recent_losses(state: TrainState) -> list[float]:
    """The last losses before the checkpoint that the run goes on from; none if it begins."""
    found = state.data.get(RECENT_LOSSES, [])
    return (
        [loss for loss in found if isinstance(loss, float) and math.isfinite(loss)] if isinstance(found, list) else []
    )


def read_ahead(state: TrainState) -> int:
    """Number of steps whose data the run has skipped so far."""
    found = state.data.get(READ_AHEAD, 0)
    return found if isinstance(found, int) else 0

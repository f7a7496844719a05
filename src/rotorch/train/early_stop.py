"""Early stop: a run ends after `train.patience` evaluations without a lower loss. The same on all ranks.

Its numbers are kept in checkpoints beside the data position, so a run that goes on judges the next evaluation as it
would have without the stop between, and one that goes back to a checkpoint forgets what came after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.run_config import TrainSection
from rotorch.run_data import HELD_OUT
from rotorch.train.metrics import HeldOut
from rotorch.train.state import TrainState

EARLY_STOP = "early_stop"
"""The entry of a checkpoint's data position that has the lowest loss, its step, and evaluations since."""


class EarlyStop:
    """The lowest loss so far, and the evaluations since then."""

    def __init__(self, train: TrainSection, *, state: TrainState) -> None:
        self._train = train
        self.read_from(state)

    def read_from(self, state: TrainState) -> None:
        """Takes the numbers of a state that was just loaded; one without any, or of another text's, is a beginning."""
        found = _saved(state.data) or {}
        found = found if found.get("on") == self._train.patience_on else {}
        self._best, self._step, self._waited = (
            float(found.get("loss", math.inf)),
            int(found.get("step", 0)),
            int(found.get("waited", 0)),
        )

    def remember_in(self, state: TrainState) -> None:
        """Stores the numbers in a checkpoint's state, if the run may end early and has measured something; else none.

        Those of an earlier part of the run, which nothing has counted on since, would end a later part wrongly.
        """
        state.data = {key: value for key, value in state.data.items() if key != EARLY_STOP}
        if self._train.patience and math.isfinite(self._best):
            numbers = {"loss": self._best, "step": self._step, "waited": self._waited, "on": self._train.patience_on}
            state.data[EARLY_STOP] = numbers

    def measured(self, step: int, *, held_out: HeldOut | None, evals: Mapping[str, HeldOut]) -> str:
        """Counts an evaluation; returns the reason to end the run, "" for none. All ranks get the same.

        Args:
            step: the step before the evaluation.
            held_out: of the held-out text, if there is any.
            evals: of the texts of `train.eval`, by name.
        """
        on = self._train.patience_on
        found = held_out if on == HELD_OUT else evals.get(on)
        if not self._train.patience or found is None:
            return ""
        if found.loss < self._best - (self._train.min_improvement if math.isfinite(self._best) else 0.0):
            self._best, self._step, self._waited = found.loss, step, 0
            return ""
        self._waited += 1
        return self.reason_to_end()

    def reason_to_end(self) -> str:
        """The reason to end the run after what was measured so far, "" for none. All ranks get the same."""
        on = self._train.patience_on
        if not self._train.patience or self._waited < self._train.patience:
            return ""
        if not math.isfinite(self._best):
            return f"the loss on {on} text was not finite in {self._waited} evaluations (train.patience)"
        return (
            f"the loss on {on} text was {self._best:.4f} after step {self._step}, and not lower in {self._waited} "
            "evaluations since (train.patience)"
        )


def check_not_ended(data: Mapping[str, Any], *, train: TrainSection, checkpoint: object) -> None:
    """Checks that a run to go on with was not ended by its patience.

    Args:
        data: data position of its checkpoint.
        train: settings to go on with.
        checkpoint: its path, for the message.

    Raises:
        ConfigError: it was, and would end again at the next evaluation that is no better.
    """
    found = _saved(data)
    if found is None or not train.patience or found.get("on") != train.patience_on:
        return
    if int(found.get("waited", 0)) >= train.patience:
        raise ConfigError(
            f"--resume: {checkpoint} is where train.patience = {train.patience} ended the run: {found['waited']} "
            f"evaluations without a lower loss than that of step {found['step']}. Write train.patience=0 to go on to "
            f"the last step, or more than {found['waited']}"
        )


def _saved(data: Mapping[str, Any]) -> dict[str, Any] | None:
    found = data.get(EARLY_STOP)
    if not isinstance(found, dict):
        return None
    numbers = (found.get("loss"), found.get("step"), found.get("waited"))
    return found if all(isinstance(number, int | float) for number in numbers) else None

"""Errors as users meet them. Two kinds: the input was wrong, or a rank failed while running."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial


class RotorchError(Exception):
    """Base of every error that rotorch raises on purpose; its text is meant for the user."""


class ConfigError(RotorchError, ValueError):
    """The user's input cannot work. Raised before anything starts, identically on all ranks (exit code 2).

    The message says what is wrong, the offending value, and what to write instead, in one line.
    """


class RankFailure(RotorchError, RuntimeError):
    """A rank failed, or waited too long for another one, while running (exit code 3)."""


class FinalFailure(RankFailure):
    """A rank failed in a way that would come again, so a run that otherwise goes on after failures ends."""


class HeardFailure(RankFailure):
    """Another rank failed and told this one: that rank's own error says why."""


class StoppedEarly(RotorchError):
    """A run was asked to stop before its last step, and has saved a checkpoint.

    Attributes:
        exit_code: of the process that was asked.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[partial[StoppedEarly], tuple[str]]:
        return partial(StoppedEarly, exit_code=self.exit_code), (str(self),)


def nearest(word: str, *, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the closest of `known`, or "" when nothing is close."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def beginning_of(error: BaseException) -> str:
    """The beginning of an error's text, for one-line messages: without a full stop, which follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).removesuffix(".") or type(error).__name__

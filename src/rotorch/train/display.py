"""Display of a run for people: a live line on a terminal, now and then a plain line elsewhere. Rank 0 only."""

from __future__ import annotations

import math
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rotorch.core.quantities import format_bytes, format_count, format_duration
from rotorch.train.metrics import Listener, StepRecord

_PLAIN_LINES = 20
_RECENT = 0.9
"""How much of the pace shown is the pace before: the time left should not jump."""


class Display(Listener, Protocol):
    """A listener that also shows what goes on between two steps."""

    def phase(self, text: str) -> None:
        """Shows a phase, such as "saving", until the next step."""


def make_display(console: Console, *, first_step: int, steps: int) -> Display:
    """Returns the display that suits `console`, for a run from `first_step` to `steps`."""
    return (
        _Live(console, first_step=first_step, steps=steps)
        if console.is_terminal
        else _Plain(console, first_step, steps)
    )


class _Pace:
    """Seconds per step, smoothed; the first step, which warms everything up, counts only until there is another."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._step_s = math.nan

    def add(self, step_s: float) -> None:
        self._num_steps += 1
        fresh = self._num_steps <= 2
        self._step_s = step_s if fresh else _RECENT * self._step_s + (1 - _RECENT) * step_s

    def left(self, num_steps: int) -> str:
        return format_duration(self._step_s * num_steps)


def _describe(record: StepRecord, *, brief: bool = False) -> str:
    """One line about a step; the brief one fits, with its bar, on a terminal of 80 columns."""
    parts = [f"loss {record.loss:.4f}", f"{format_count(record.tokens_per_s)} tokens/s"]
    if record.rewards is not None:
        parts.insert(1, f"{record.rewards.accuracy:.0%} right")
    if not brief:
        parts += [f"grad norm {record.grad_norm:.2f}", f"lr {record.lr:.2e}"]
    if record.peak_bytes:
        parts.append(f"{format_bytes(record.peak_bytes)} per rank")
    return "  ".join(parts)


def _evaluated(record: StepRecord) -> str:
    """One line about the evaluations after a step; "" if there was none."""
    found = {"held-out": record.held_out, **record.evals}
    if any(value is not None and value.rewards is not None for value in found.values()):
        return "; ".join(f"{name} {value}" for name, value in found.items()) + f" after step {record.step}"
    parts = [f"{name} {value.bits_per_byte:.4f}" for name, value in found.items() if value is not None]
    return f"{', '.join(parts)} bits per byte after step {record.step}" if parts else ""


class _Plain:
    """About `_PLAIN_LINES` lines in a whole run."""

    def __init__(self, console: Console, first_step: int, steps: int) -> None:
        self._console, self._first, self._steps = console, first_step, steps
        self._every = max(1, math.ceil((steps - first_step + 1) / _PLAIN_LINES))
        self._pace = _Pace()

    def on_step(self, record: StepRecord) -> None:
        self._pace.add(record.step_s)
        if record.step in (self._first, self._steps) or record.step % self._every == 0:
            left = self._pace.left(self._steps - record.step)
            self._print(f"step {record.step}/{self._steps}  {_describe(record)}  {left} left")
        if text := _evaluated(record):
            self._print(text)

    def on_rolled_back(self, step: int) -> None:
        return None

    def on_note(self, text: str) -> None:
        self._print(text)

    def phase(self, text: str) -> None:
        return None

    def close(self) -> None:
        return None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Live:
    """A progress bar that stays in place; notes and evaluations scroll above it."""

    def __init__(self, console: Console, *, first_step: int, steps: int) -> None:
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=8), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=False, auto_refresh=False)
        self._steps = steps
        self._task = self._progress.add_task("starting", total=steps, completed=first_step - 1)
        self._pace = _Pace()
        self._shown_s = 0.0
        self._progress.start()

    def on_step(self, record: StepRecord) -> None:
        self._pace.add(record.step_s)
        left = self._pace.left(self._steps - record.step)
        text = f"{_describe(record, brief=True)}  {left} left"
        self._progress.update(self._task, completed=record.step, description=text)
        now = time.monotonic()
        if now - self._shown_s > 0.1 or record.step == self._steps:
            self._progress.refresh()
            self._shown_s = now
        if text := _evaluated(record):
            self.on_note(text)

    def on_rolled_back(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def on_note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=text)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.refresh()
        self._progress.stop()

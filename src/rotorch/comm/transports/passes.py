"""Prediction of a step's next pass from the step before, so that fetches can run ahead across units.

[Note: the step before]
    The units of a model are visited in an order that only the model's code knows, but it is the same in every step. So
    the passes of a step are written down, and the first fetch of the next unit can start during the last slice of this
    one. A wrong guess costs little: the slice that came too early is dropped, and the right one fetched on demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pass:
    """One call of `Ring.visits`."""

    item: int
    backward: bool
    fetch: bool


class Passes:
    """The passes of this step so far, and the expected ones; steps with and without gradients are kept apart.

    Args:
        size: ranks on the ring, or visits of a pass.
        all_come: every visit brings something; else a rank's own slice is used at home.
    """

    def __init__(self, *, size: int, all_come: bool = False) -> None:
        self._size, self._all_come = size, all_come
        self._now: list[Pass] = []
        self._before: dict[bool, list[Pass]] = {}
        self._as_before = True
        """True while this step has made the same passes as the one before it."""
        self._training = False

    def start(self) -> None:
        """Begins a step; the passes of the last one become the expected ones."""
        # A start without passes after it (nothing was asked of the ring) says nothing about the next step.
        if self._now:
            # By training or not: an evaluation between two steps must not replace what the training step has shown.
            self._before[self._training] = self._now
        self._now, self._as_before, self._training = [], True, torch.is_grad_enabled()

    def enter(self, this: Pass) -> None:
        """Notes that a pass begins."""
        number, expected = len(self._now), self._before.get(self._training, [])
        self._as_before = self._as_before and number < len(expected) and expected[number] == this
        self._now.append(this)

    def next_fetch(self, this: Pass, step: int) -> tuple[Pass, int] | None:
        """The fetch after visit `step` of the pass last entered: the next visit's, or the first of a pass to come."""
        return next(self.coming(this, step), None)

    def coming(self, this: Pass, step: int) -> Iterator[tuple[Pass, int]]:
        """All fetches after visit `step` of the pass last entered, as far as they can be known, in their order.

        A rank's own slice is the first in forward and the last in backward.
        """
        if self._size == 1 and not self._all_come:
            return
        if this.fetch:
            yield from ((this, later) for later in self._fetches(this) if later > step)
        # Once this step has gone another way, the rest of the last one is no guide: a wrong slice would take a slot.
        if self._as_before:
            for expected in self._before.get(self._training, [])[len(self._now) :]:
                if expected.fetch:
                    yield from ((expected, later) for later in self._fetches(expected))

    def _fetches(self, of: Pass) -> range:
        """The visits of a pass for which something is fetched."""
        if self._all_come:
            return range(self._size)
        # The own slice is used at home: it is the first in forward and the last in backward.
        return range(self._size - 1) if of.backward else range(1, self._size)

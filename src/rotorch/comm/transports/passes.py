"""Fetches that run ahead of their visits, also across units: the step before tells a step's next pass.

[Note: the step before]
    The units of a model are visited in an order that only the model's code knows, but it is the same in every step. So
    the passes of a step are written down, and the first fetch of the next unit can start during the last slice of this
    one. A wrong guess costs little: the slice that came too early is dropped, and the right one fetched on demand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from rotorch.comm.transports.messages import Exchange


@dataclass(frozen=True)
class Pass:
    """One call of `Ring.visits`."""

    item: int
    backward: bool
    fetch: bool


class Passes:
    """The passes of this step so far, and the expected ones; steps with and without gradients are kept apart.

    Args:
        size: ranks on the ring.
        num_visits: visits of a pass of those items of which every visit brings something. Of other ones slices come
            one by one, and a rank's own is used at home.
    """

    def __init__(self, *, size: int, num_visits: Mapping[int, int] | None = None) -> None:
        self._size, self._num_visits = size, num_visits or {}
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
        if self._size == 1 and not self._num_visits:
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
        if of.item in self._num_visits:
            return range(self._num_visits[of.item])
        # The own slice is used at home: it is the first in forward and the last in backward.
        return range(self._size - 1) if of.backward else range(1, self._size)


@dataclass
class Fetch:
    """A fetch under way.

    Attributes:
        target: the pass that it is for.
        step: the visit (or block of visits) within that pass.
        number: of the fetch, among those of this ring.
        exchange: its messages.
    """

    target: Pass
    step: int
    number: int
    exchange: Exchange


class FetchesAhead:
    """Fetches over messages, in the order of their visits. All ranks of a ring post and drop the same ones.

    Args:
        passes: of the ring's steps.
        most: largest number of fetches under way while a slice is computed with.
        post: starts the fetch of one visit.
        when_dropped: called after each dropped fetch, when its messages have come.
    """

    def __init__(
        self,
        passes: Passes,
        *,
        most: int,
        post: Callable[[Pass, int], Fetch],
        when_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self.passes, self._most, self._post, self._when_dropped = passes, most, post, when_dropped
        self.under_way: deque[Fetch] = deque()

    def next(self, this: Pass, step: int) -> Fetch:
        """Returns the fetch of a visit, which may still be under way; starts it if need be."""
        if self.under_way and (self.under_way[0].target, self.under_way[0].step) != (this, step):
            self.drop()  # this step makes other passes than the one before: these slices are not needed
        return self.under_way.popleft() if self.under_way else self._post(this, step)

    def top_up(self, this: Pass, step: int) -> None:
        """Starts fetches after visit `step` of a pass, until as many as may be are under way."""
        coming = islice(self.passes.coming(this, step), len(self.under_way), self._most)
        self.under_way.extend(self._post(*fetch) for fetch in coming)

    def drop(self) -> None:
        """Waits for the fetches under way and drops them."""
        while self.under_way:
            # Not cancelled: the other ends have posted them too, and the next messages of the group come behind them.
            self.under_way.popleft().exchange.wait()
            self._when_dropped()

"""Exact cuts of a long row of layers into stages: dynamic programmes over arrays.

[Note: windows]
    A part within a bound in time is short, so of each end only the nearest starts are looked at: about as many as a
    stage has layers. All ends of a stage are one array, with a row per end and its starts in ascending order; so S
    stages of N layers take S steps on arrays of N by N/S numbers, whatever N is.

[Note: ties]
    Operations are added as integers, so equal stages stay equal; sums of squares are rounded. Of equally good cuts
    the one is taken whose last stage begins first, then the one before it, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[Any]

_MOST = 1 << 62
"""Sums below it are 64-bit integers; larger ones are Python's own, which are slow."""


@dataclass(frozen=True)
class Row:
    """Costs of a row of layers, each the sums up to every layer: one number more than layers, the first 0.

    Attributes:
        flops: operations.
        state: bytes of what ranks of a stage share.
        activations: bytes of one micro-batch.
        gathered: bytes that are whole for a while.
    """

    flops: Sequence[int]
    state: Sequence[int]
    activations: Sequence[int]
    gathered: Sequence[int]


class Cuts:
    """Cuts of a row into as many stages as `kept` has entries, none empty.

    Args:
        row: the layers.
        kept: per stage, number of micro-batches whose activations it holds at a time.
        shared_by: number of ranks that share `state`.
        gathered: fraction of `gathered` that counts for a stage.
    """

    def __init__(self, row: Row, *, kept: Sequence[int], shared_by: int, gathered: float) -> None:
        self._kept = kept
        self._num_layers = len(row.flops) - 1
        self._flops = np.array(row.flops, dtype=np.int64 if row.flops[-1] < _MOST else object)
        rest = (np.array(each, dtype=np.float64) for each in (row.state, row.gathered, row.activations))
        self._state, self._gathered, self._activations = rest
        self._shared_by, self._gathered_share = shared_by, gathered

    def fastest(self, *, largest: float = inf) -> Window | None:
        """The parts of all cuts whose slowest stage is as fast as can be; None if `largest` bytes forbid every cut."""
        each = self._flops[1:] - self._flops[:-1]
        bound = self._flops[-1] // len(self._kept) + each.max()  # some cut keeps to it, unless memory forbids
        window = Window.of(self._flops, slowest=bound if isinf(largest) else self._flops[-1])
        slowest = self._bottleneck(window, [window.times] * len(self._kept), largest=largest)
        return None if slowest is None else Window.of(self._flops, slowest=slowest)

    def smallest(self, window: Window | None = None) -> float:
        """Bytes of the largest stage, of the cut in which they are fewest among those with parts in `window`."""
        window = window or Window.of(self._flops, slowest=self._flops[-1])
        found = self._bottleneck(window, self._memory(window), largest=inf)
        assert found is not None
        return float(found)

    def most_even(self, window: Window, *, largest: float) -> tuple[range, ...]:
        """The cut with the least sum of squares of times, of parts in `window` and within `largest` bytes."""
        squares = window.times.astype(np.float64) ** 2
        best = self._before(squares)
        chosen: list[_Numbers] = []
        for bytes_ in self._memory(window):
            joined = np.where(window.allowed & (bytes_ <= largest), best[window.starts] + squares, inf)
            first = joined.argmin(axis=1)[:, None]
            best[1:] = np.take_along_axis(joined, first, axis=1)[:, 0]
            best[0] = inf
            chosen.append(np.take_along_axis(window.starts, first, axis=1)[:, 0])
        parts: list[range] = []
        end = self._num_layers
        for starts in reversed(chosen):
            start = int(starts[end - 1])
            parts.append(range(start, end))
            end = start
        return tuple(reversed(parts))

    def _bottleneck(self, window: Window, costs: Sequence[_Numbers], *, largest: float) -> Any:
        """The least maximum of the stages' costs; None if there is no cut."""
        nothing = _nothing(costs[0])
        best = self._before(costs[0])
        sizes = [None] * len(costs) if isinf(largest) else self._memory(window)
        for cost, bytes_ in zip(costs, sizes, strict=True):
            allowed = window.allowed if bytes_ is None else window.allowed & (bytes_ <= largest)
            best[1:] = np.where(allowed, np.maximum(best[window.starts], cost), nothing).min(axis=1)
            best[0] = nothing
        return None if best[-1] == nothing else best[-1]

    def _before(self, costs: _Numbers) -> _Numbers:
        """The least cost up to every layer before the first stage: 0 at the beginning, elsewhere there is no cut."""
        best = np.full(self._num_layers + 1, _nothing(costs), dtype=costs.dtype)
        best[0] = 0
        return best

    def _memory(self, window: Window) -> list[_Numbers]:
        """Bytes of each part as each stage."""
        at_rest = window.between(self._state) / self._shared_by
        at_rest = at_rest + self._gathered_share * window.between(self._gathered)
        activations = window.between(self._activations)
        by_kept = {number: at_rest + number * activations for number in set(self._kept)}
        return [by_kept[number] for number in self._kept]


@dataclass(frozen=True)
class Window:
    """The parts that are looked at: of each end, starts in ascending order (see [Note: windows]).

    Attributes:
        starts: per end and place; below 0 there are none, and the first layer stands for them.
        ends: per end.
        times: of the parts.
        allowed: the part exists and is fast enough.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    times: _Numbers
    allowed: NDArray[np.bool_]

    @staticmethod
    def of(flops: _Numbers, *, slowest: Any) -> Window:
        """Returns the parts that take at most `slowest`."""
        ends = np.arange(1, len(flops))[:, None]
        first = np.searchsorted(flops, flops[1:] - slowest)[:, None]
        starts = ends + np.arange(-int((ends - first).max()), 0)
        there = np.maximum(starts, 0)
        times = flops[ends] - flops[there]
        return Window(there, ends, times, (starts >= 0) & (times <= slowest).astype(bool))

    def between(self, sums: _Numbers) -> _Numbers:
        """Returns the cost of each part, of sums up to every layer."""
        return sums[self.ends] - sums[self.starts]


def _nothing(costs: _Numbers) -> Any:
    """A cost that stands for no cut."""
    return np.iinfo(np.int64).max if costs.dtype == np.int64 else inf

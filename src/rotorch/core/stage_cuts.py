"""Exact cuts of a long row of layers into stages: dynamic programmes over arrays.

[Note: windows]
    A part within a bound in time is short, so of each end only the nearest starts are looked at: about as many as a
    stage has layers. All ends of a stage are one array, with a row per end and its starts in ascending order; so S
    stages of N layers take S steps on arrays of N by N/S numbers, whatever N is.

[Note: ties]
    Operations are added as integers, so equal stages stay equal; sums of squares are rounded. Of equally good cuts
    the one is taken whose last stage begins first, then the one before it, and so on.

[Note: computed again]
    Where layers may be computed again in backward, a part that does not fit computes its first layers again, as many as
    it takes and no more: what they keep then is less for each micro-batch, and their forward is added to the part's
    time. When one of them runs again all layers behind it are done, so what it then has takes the place of theirs; only
    where all layers run again, and the last one begins, does it come on top.
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
    """Costs of a row of layers; sums are up to every layer: one number more than layers, the first 0.

    Attributes:
        flops: sums of operations.
        again: sums of the operations of computing layers again.
        state: sums of bytes of what ranks of a stage share.
        activations: sums of bytes of one micro-batch.
        saved: sums of bytes of one micro-batch that are not kept if layers are computed again.
        gathered: sums of bytes that are whole for a while.
        passing: per layer, bytes beside all of these at its highest moment.
        redone: the same if it is computed again.
        output: bytes of one micro-batch that each stage but the last keeps of what it hands on.
    """

    flops: Sequence[int]
    again: Sequence[int]
    state: Sequence[int]
    activations: Sequence[int]
    saved: Sequence[int]
    gathered: Sequence[int]
    passing: Sequence[int]
    redone: Sequence[int]
    output: int = 0


@dataclass(frozen=True)
class _Stage:
    """All parts of a window as one stage: arrays of the window's shape.

    Attributes:
        times: operations.
        bytes_: of memory.
        again: number of layers that are computed again.
        allowed: the part exists and keeps to all limits.
    """

    times: _Numbers
    bytes_: _Numbers
    again: NDArray[np.int64]
    allowed: NDArray[np.bool_]


class Cuts:
    """Cuts of a row into as many stages as `kept` has entries, none empty.

    Args:
        row: the layers.
        kept: per stage, number of micro-batches whose activations it holds at a time.
        shared_by: number of ranks that share `state`.
        gathered: fraction of `gathered` that counts for a stage.
        largest: bytes that no stage may exceed.
        grain: entries of the row that are computed again together, to keep to that (see [Note: computed again]); what
            it takes and saves is in the first one's. 0: nothing is.
    """

    def __init__(
        self,
        row: Row,
        *,
        kept: Sequence[int],
        shared_by: int,
        gathered: float,
        largest: float = inf,
        grain: int = 0,
    ) -> None:
        self._kept, self._largest, self._grain = kept, largest, grain
        self._num_layers = len(row.flops) - 1
        dtype = np.int64 if row.flops[-1] + row.again[-1] < _MOST else object
        self._flops, self._again = (np.array(each, dtype=dtype) for each in (row.flops, row.again))
        rest = (row.state, row.gathered, row.activations, row.saved, row.passing, row.redone)
        arrays = [np.array(each, dtype=np.float64) for each in rest]
        self._state, self._gathered, self._activations, self._saved, self._passing, self._redone = arrays
        self._shared_by, self._gathered_share, self._output = shared_by, gathered, row.output

    def best(self) -> tuple[tuple[range, ...], tuple[int, ...]] | None:
        """The best cut, and numbers of layers that each stage computes again; None if `largest` forbids every cut.

        Its slowest stage is as fast as can be; of such cuts its largest stage in memory is smallest, and of those it
        is the most even one in time, by the sum of squares.
        """
        each = self._flops[1:] - self._flops[:-1]
        bound = self._flops[-1] // len(self._kept) + each.max()  # some cut keeps to it, unless memory forbids
        window = Window.of(self._flops, slowest=bound if isinf(self._largest) else self._flops[-1])
        stages = self._stages(window)
        slowest = self._bottleneck(window, stages, [stage.times for stage in stages])
        if slowest is None:
            return None
        window = Window.of(self._flops, slowest=slowest)
        stages = self._stages(window, slowest=slowest)
        largest = self._bottleneck(window, stages, [stage.bytes_ for stage in stages])
        return self._most_even(window, stages, largest=largest)

    def smallest(self) -> float:
        """Bytes of the largest stage, of the cut in which they are fewest, whatever time it takes."""
        window = Window.of(self._flops, slowest=self._flops[-1])
        sizes = [np.minimum.reduce(self._sizes(window, stage)) for stage in range(len(self._kept))]
        nothing = np.zeros(sizes[0].shape, dtype=np.int64)
        stages = [_Stage(bytes_, bytes_, nothing, window.allowed) for bytes_ in sizes]
        return float(self._bottleneck(window, stages, sizes))

    def _most_even(
        self, window: Window, stages: Sequence[_Stage], *, largest: float
    ) -> tuple[tuple[range, ...], tuple[int, ...]]:
        best = self._before(np.dtype(np.float64))
        chosen: list[_Numbers] = []
        for stage in stages:
            squares = stage.times.astype(np.float64) ** 2
            joined = np.where(stage.allowed & (stage.bytes_ <= largest), best[window.starts] + squares, inf)
            first = joined.argmin(axis=1)
            best[1:] = joined[np.arange(self._num_layers), first]
            best[0] = inf
            chosen.append(first)
        parts: list[range] = []
        again: list[int] = []
        end = self._num_layers
        for stage, first in zip(reversed(stages), reversed(chosen), strict=True):
            place = end - 1, first[end - 1]
            start = int(window.starts[place])
            parts.insert(0, range(start, end))
            again.insert(0, int(stage.again[place]))
            end = start
        return tuple(parts), tuple(again)

    def _bottleneck(self, window: Window, stages: Sequence[_Stage], costs: Sequence[_Numbers]) -> Any:
        """The least maximum of the stages' costs; None if there is no cut."""
        nothing = _nothing(costs[0].dtype)
        best = self._before(costs[0].dtype)
        for stage, cost in zip(stages, costs, strict=True):
            best[1:] = np.where(stage.allowed, np.maximum(best[window.starts], cost), nothing).min(axis=1)
            best[0] = nothing
        return None if best[-1] == nothing else best[-1]

    def _before(self, dtype: np.dtype[Any]) -> _Numbers:
        """The least cost up to every layer before the first stage: 0 at the beginning, elsewhere there is no cut."""
        best = np.full(self._num_layers + 1, _nothing(dtype), dtype=dtype)
        best[0] = 0
        return best

    def _stages(self, window: Window, *, slowest: Any = None) -> list[_Stage]:
        """The parts of a window as each stage, within the limits."""
        last = len(self._kept) - 1
        alike = {(number, place == last): place for place, number in enumerate(self._kept)}
        found = {key: self._stage(window, place, slowest=slowest) for key, place in alike.items()}
        return [found[number, place == last] for place, number in enumerate(self._kept)]

    def _stage(self, window: Window, stage: int, *, slowest: Any) -> _Stage:
        bytes_, _, all_again = self._sizes(window, stage)
        times, again = window.times, np.zeros(window.times.shape, dtype=np.int64)
        if self._grain and (kept := self._kept[stage]):
            first, last = self._together(window)
            too_large = window.allowed & (bytes_ > self._largest) & (first < last)
            excess = np.where(too_large, bytes_ - self._largest, 0.0)
            enough = np.searchsorted(self._saved, self._saved[first] + excess / kept)
            enough = np.clip(-(-enough // self._grain) * self._grain, np.minimum(first + self._grain, last), last)
            again = np.where(too_large, (enough - first) // self._grain, 0)
            times = times + np.where(too_large, self._again[enough] - self._again[first], 0)
            left = bytes_ - kept * (self._saved[enough] - self._saved[first])
            bytes_ = np.where(too_large, np.where(enough == last, all_again, left), bytes_)
        allowed = window.allowed & (bytes_ <= self._largest)
        if slowest is not None:
            allowed = allowed & (times <= slowest).astype(bool)
        return _Stage(times, bytes_, again, allowed)

    def _sizes(self, window: Window, stage: int) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Bytes of each part as a stage with nothing computed again, with all layers but one, and with all."""
        kept = self._kept[stage]
        held = window.between(self._state) / self._shared_by
        held = held + self._gathered_share * window.between(self._gathered)
        held = held + kept * window.between(self._activations)
        if stage < len(self._kept) - 1:
            held = held + kept * self._output
        plain = held + window.largest(self._passing)
        if not self._grain or not kept:
            return plain, plain, plain
        first, last = self._together(window)
        but_one = plain - kept * (self._saved[np.maximum(first, last - self._grain)] - self._saved[first])
        every = held - kept * (self._saved[last] - self._saved[first]) + window.largest(self._redone)
        return plain, but_one, np.where(first < last, every, plain)

    def _together(self, window: Window) -> tuple[_Numbers, _Numbers]:
        """First entry and end, of each part, of all that can be computed again."""
        last = window.ends - window.ends % self._grain
        return np.minimum(-(-window.starts // self._grain) * self._grain, last), last


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

    def largest(self, each: _Numbers) -> _Numbers:
        """Returns the largest of each part's layers."""
        return np.maximum.accumulate(each[self.starts][:, ::-1], axis=1)[:, ::-1]


def _nothing(dtype: np.dtype[Any]) -> Any:
    """A cost that stands for no cut."""
    return np.iinfo(np.int64).max if dtype == np.int64 else inf

"""Bars: limits that a bench must reach, in tokens per second or in bytes per rank.

`rtp=2 >= 1.05 * ddp=2` is of speed; `peak rtp=4 <= 0.75 * fsdp2` of the rank with the most memory, as is
`process rtp=4[recompute=slice] <= 170 * MiB`. "peak" is of tensors, at the highest moment of a step, "rest" of weights,
gradients and optimizer state, "process" what the kernel counts at the highest mark.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rotorch.bench.rounds import Times, ratio
from rotorch.core.errors import ConfigError, nearest

MIB = "MiB"
"""Stands in a bar for a row that takes 1 MiB."""

Memory = Mapping[str, Mapping[str, int]]
"""By row, bytes of the rank with the most: "peak", "rest", and "process" if processes were measured."""

_NUMBER_AND_ROW = r"(?P<factor>[0-9]*\.?[0-9]+)\s*\*\s*(?P<other>.+?)\s*$"
_SPEED = re.compile(r"^\s*(?P<row>.+?)\s*>=\s*" + _NUMBER_AND_ROW)
_MEMORY = re.compile(r"^\s*(?P<what>peak|rest|process)\s+(?P<row>.+?)\s*<=\s*" + _NUMBER_AND_ROW)


@dataclass(frozen=True)
class SpeedBar:
    """`row` must reach `factor` times the tokens per second of `other`, by the median of rounds."""

    row: str
    factor: float
    other: str

    def __str__(self) -> str:
        return f"{self.row} >= {self.factor:g} * {self.other}"

    def check(self, times: Mapping[str, Times], memory: Memory) -> tuple[bool, float | None]:
        """Returns whether the bar holds, and the ratio reached; (False, None) if one of the rows has no times."""
        if self.row not in times or self.other not in times:
            return False, None
        reached = ratio(times[self.row], to=times[self.other]).median
        return reached >= self.factor, reached


@dataclass(frozen=True)
class MemoryBar:
    """The heaviest rank of `row` must take at most `factor` times what that of `other` does."""

    what: str
    row: str
    factor: float
    other: str

    def __str__(self) -> str:
        return f"{self.what} {self.row} <= {self.factor:g} * {self.other}"

    def check(self, times: Mapping[str, Times], memory: Memory) -> tuple[bool, float | None]:
        """Returns whether the bar holds, and the ratio reached; (False, None) if one of the rows was not measured."""
        ours = memory.get(self.row, {}).get(self.what)
        theirs = 2**20 if self.other == MIB else memory.get(self.other, {}).get(self.what)
        if ours is None or theirs is None:
            return False, None
        return ours <= self.factor * theirs, ours / theirs


Bar = SpeedBar | MemoryBar


def parse_bar(text: str, *, rows: Collection[str], processes: bool = True) -> Bar:
    """Reads a bar.

    Args:
        text: text of the bar.
        rows: names that it may have.
        processes: True if processes are measured.

    Raises:
        ConfigError: if it cannot be read, names a row that is not there, or asks for what is not measured.
    """
    of_memory, of_speed = _MEMORY.match(text), _SPEED.match(text)
    match = of_memory or of_speed
    if match is None:
        raise ConfigError(
            f"bench: cannot read the bar {text!r}. Write for example 'rtp=2 >= 1.05 * ddp=2', of tokens per second, or "
            "'peak rtp=2 <= 0.75 * fsdp2' or 'process rtp=2 <= 170 * MiB', of memory"
        )
    for row in (match["row"], *(() if of_memory and match["other"] == MIB else (match["other"],))):
        if row not in rows:
            known = ", ".join(repr(r) for r in rows)
            raise ConfigError(f"bench: bar {text!r}: no row {row!r}{nearest(row, known=rows)}. Rows: {known}")
    if of_memory is None:
        return SpeedBar(match["row"], float(match["factor"]), match["other"])
    if match["what"] == "process" and not processes:
        raise ConfigError(
            f"bench: bar {text!r}: processes are not measured. Leave --no-process-memory out, or write peak"
        )
    return MemoryBar(match["what"], match["row"], float(match["factor"]), match["other"])

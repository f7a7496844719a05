"""Bars: what a bench must reach, written as `rtp=2 >= 1.05 * ddp=2` in tokens per second."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rotorch.bench.rounds import Times, ratio
from rotorch.core.errors import ConfigError, nearest

_BAR = re.compile(r"^\s*(?P<row>.+?)\s*>=\s*(?P<factor>[0-9]*\.?[0-9]+)\s*\*\s*(?P<other>.+?)\s*$")


@dataclass(frozen=True)
class Bar:
    """`row` must reach `factor` times the tokens per second of `other`, by the median of rounds."""

    row: str
    factor: float
    other: str

    def __str__(self) -> str:
        return f"{self.row} >= {self.factor:g} * {self.other}"

    def check(self, times: Mapping[str, Times]) -> tuple[bool, float | None]:
        """Whether it holds, and the ratio that was reached; (False, None) if one of the rows has no times."""
        if self.row not in times or self.other not in times:
            return False, None
        reached = ratio(times[self.row], to=times[self.other]).median
        return reached >= self.factor, reached


def parse_bar(text: str, *, rows: Collection[str]) -> Bar:
    """Reads a bar.

    Raises:
        ConfigError: if it cannot be read or names a row that is not there.
    """
    match = _BAR.match(text)
    if match is None:
        raise ConfigError(f"bench: cannot read the bar {text!r}. Write for example 'rtp=2 >= 1.05 * ddp=2'")
    for row in (match["row"], match["other"]):
        if row not in rows:
            known = ", ".join(repr(r) for r in rows)
            raise ConfigError(f"bench: bar {text!r}: no row {row!r}{nearest(row, known=rows)}. Rows: {known}")
    return Bar(match["row"], float(match["factor"]), match["other"])

"""Windows of several sources, mixed by weights: which source a sample is of follows from its number alone.

[Note: shares] Samples come in blocks of `BLOCK`. In each block every source has a whole number of places, as near to
its share as whole numbers allow, in an order that the seed and the block decide; the places of a source read its own
windows one after another, epoch by epoch, in the order that it would have alone. So source and window of a sample are
computed from its number, whatever the ranks, and a run that goes on needs nothing but the step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rotorch.core.errors import ConfigError
from rotorch.train.data.shuffle import Permutation
from rotorch.train.data.windows import Batch, TokenWindows

BLOCK = 1000
"""Samples within which shares are exact: a source has at least a thousandth of them."""


@dataclass(frozen=True)
class Share:
    """Part of a source in the samples that a run has read.

    Attributes:
        name: of the source.
        asked: its weight over the sum of weights.
        samples: samples read of it.
        epochs: times that its text was read.
    """

    name: str
    asked: float
    samples: int
    epochs: float


def places(weights: Sequence[float]) -> list[int]:
    """Places of each source in a block of `BLOCK` samples: largest remainders, in the order of the sources.

    Raises:
        ConfigError: a source has no place.
    """
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (found[part] - exact[part], part))
    for part in by_remainder[: BLOCK - sum(found)]:
        found[part] += 1
    least = min(range(len(found)), key=found.__getitem__)
    if not found[least]:
        raise ConfigError(
            f"data.sources: weight {weights[least]:g} of a sum of {sum(weights):g} is less than one sample in {BLOCK}. "
            "Write a larger weight, or leave the source out"
        )
    return found


class MixedWindows(TokenWindows):
    """Windows of several sources, one after another in the order of the file, mixed in the order of samples.

    Attributes:
        parts: windows of each source.
    """

    def __init__(self, parts: Sequence[TokenWindows], *, weights: Sequence[float]) -> None:
        """Mixes windows that are alike but for their text.

        Args:
            parts: windows of each source: of one length, tokenizer and seed.
            weights: of each source; shares of samples are these over their sum.
        """
        first = parts[0]
        self.sequence_length, self.seed = first.sequence_length, first.seed
        self._tokens, self._documents = first._tokens, first._documents
        self.num_rows = first.num_rows
        self.parts = tuple(parts)
        self._starts = [0, *itertools.accumulate(len(part) for part in parts)]
        self._places = places(weights)
        self._ends = list(itertools.accumulate(self._places))

    def stored(self, index: int) -> npt.NDArray[np.int64]:
        """The ids of window `index`, counted through all sources, shape [sequence_length + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = bisect.bisect_right(self._starts, index) - 1
        return self.parts[part].stored(index - self._starts[part])

    def source_of(self, sample: int) -> tuple[int, int]:
        """Returns the source of a sample of the run, and the number of the sample among those of this source."""
        block, index = divmod(sample, BLOCK)
        place = Permutation(BLOCK, seed=self.seed, epoch=block)(index)
        part = bisect.bisect_right(self._ends, place)
        return part, block * self._places[part] + place - (self._ends[part] - self._places[part])

    def index_of(self, sample: int) -> int:
        part, number = self.source_of(sample)
        return self._starts[part] + self.parts[part].index_of(number)

    def shares(self, num_samples: int, *, names: Sequence[str]) -> list[Share]:
        """Shares of the sources in the first `num_samples` samples of a run."""
        blocks, rest = divmod(num_samples, BLOCK)
        counts = [blocks * number for number in self._places]
        for sample in range(num_samples - rest, num_samples):
            counts[self.source_of(sample)[0]] += 1
        return [
            Share(name, number / BLOCK, count, count / max(1, len(part)))
            for name, number, count, part in zip(names, self._places, counts, self.parts, strict=True)
        ]

    def to_batch(self, windows: Sequence[npt.NDArray[np.int64]], *, num_rows: int | None = None) -> Batch:
        return self.parts[0].to_batch(windows, num_rows=num_rows)

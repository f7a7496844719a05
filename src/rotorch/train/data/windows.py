"""Order in which tokens are read: a pure function of (seed, step, position in the batch).

[Note: windows] A token file is cut into windows of `sequence_length + 1` ids that do not overlap: a window's first
`sequence_length` ids are the input, its last `sequence_length` the targets. No id is in two windows, so no held-out
token is ever trained on, at the price of one target in `sequence_length + 1`. Documents follow each other within a
window, separated by the end-of-document id. The ids left over at the end of the file are not read.

[Note: documents] Documents of a window are joined (tokens see all that is before them in the window) or apart:
positions begin again at each document, which is how models of transformers are told that attention stays inside of
it, and its first token is no target, since nothing before it may predict it. The window's loss is then the sum of its
documents' losses. A document begins where the file is marked (`BEGINS_DOCUMENT`), or behind an end-of-document id.

[Note: order] Sample number `n` of a run is training window `order(n mod W)` of epoch `n // W`: W windows, and every
epoch an order of its own. The order is computed, not stored (`shuffle.py`), so a step needs no memory of earlier
steps: step `s` of a run with global batch G reads samples `s G ... s G + G - 1`, whatever the number of ranks, and a
resumed run needs only the seed and the step.

[Note: held-out] The held-out windows are the tails of up to 16 equal sections of the file, not its one tail: files are
sorted by name, and the last names of a tree are rarely like the rest of it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rotorch.core.errors import ConfigError
from rotorch.train.data.shuffle import Permutation
from rotorch.train.data.token_file import TokenFile
from rotorch.train.data.tokens import Tokens

IGNORED_LABEL = -100  # what torch's and Hugging Face's losses leave out by default
NOT_A_TARGET = 1 << 31
"""Marks an id in a token file that is read but not learnt: a prompt's, or filling. Text has none."""
BEGINS_DOCUMENT = 1 << 30
"""Marks an id in a token file that is a document's first. Text has none: its documents end by an id of their own."""
DEFAULT_HELD_OUT_FRACTION = 0.02

_MAX_SECTIONS = 16

Batch = dict[str, torch.Tensor]
Documents = Literal["joined", "apart", "marked"]
"""Documents of a window: joined; apart, each behind an end-of-document id; apart, each with its first id marked."""


@dataclass(frozen=True, eq=False)
class HeldOutBatch:
    """One micro-batch of held-out windows.

    Attributes:
        batch: As in `TokenWindows.micro_batches`; rows without a window have only labels of -100.
        num_targets: Targets in it.
        num_bytes: Bytes of text that these targets stand for; end-of-document is a target of 0 bytes.
    """

    batch: Batch
    num_targets: int
    num_bytes: int


class TokenWindows:
    """Windows of a token file: those to train on, or those held out. See [Note: windows] and [Note: order].

    `len(windows)` is the number of windows.

    Attributes:
        num_rows: sequences of `sequence_length` in a window.
    """

    num_rows = 1

    def __init__(
        self,
        ids: npt.NDArray[Any],
        *,
        sequence_length: int,
        ranges: Sequence[range],
        seed: int,
        tokens: Tokens,
        documents: Documents = "joined",
    ) -> None:
        """Prefer `train_and_held_out`, which chooses the ranges.

        Args:
            ids: All ids of the file, shape [num_tokens].
            sequence_length: Targets in a window.
            ranges: Which windows of the file these are, in rising order.
            seed: Decides the order of `window`.
            tokens: The tokenizer, for `num_bytes` and the id that ends a document.
            documents: See [Note: documents].
        """
        self.sequence_length = sequence_length
        self.seed = seed
        self._ids = ids
        self._tokens = tokens
        self._documents = documents
        self._ranges = tuple(ranges)
        self._starts = [0, *itertools.accumulate(len(part) for part in self._ranges)]

    @classmethod
    def check_length(cls, num_tokens: int, *, sequence_length: int, held_out_fraction: float, source: str) -> None:
        """Raises ConfigError unless so many tokens give a window to train on and, if some is held out, one to hold out.

        Args:
            num_tokens: Of a token file.
            sequence_length: Targets in a row of a window.
            held_out_fraction: Share of the windows that are held out.
            source: The corpus, for the message.
        """
        check_length(num_tokens, sequence_length=sequence_length, held_out_fraction=held_out_fraction, source=source)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def tokens_per_window(self) -> int:
        """Tokens that the model reads of a window."""
        return self.num_rows * self.sequence_length

    def stored(self, index: int) -> npt.NDArray[np.int64]:
        """The ids of window `index` in file order, shape [num_rows * (sequence_length + 1)]."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        part = bisect.bisect_right(self._starts, index) - 1
        length = self.num_rows * (self.sequence_length + 1)
        start = self._ranges[part][index - self._starts[part]] * length
        return np.asarray(self._ids[start : start + length], np.int64)

    def window(self, sample: int) -> npt.NDArray[np.int64]:
        """The ids of sample number `sample` of the run (0, 1, 2, ... without end), shaped as in `stored`."""
        return self.stored(self.index_of(sample))

    def index_of(self, sample: int) -> int:
        """The window that sample number `sample` of the run is, as `stored` counts them."""
        epoch, index = divmod(sample, len(self))
        return Permutation(len(self), seed=self.seed, epoch=epoch)(index)

    def position(self, sample: int) -> dict[str, Any] | None:
        """Entry of a checkpoint, plain JSON, that beside the step says where `sample` lies; None if the step does."""
        return None

    def global_batch(self, step: int, *, global_batch: int) -> Batch:
        """Returns all samples of a step, in order of position, as one batch: the batch that all ranks together read."""
        first = step * global_batch
        return self.to_batch([self.window(sample) for sample in range(first, first + global_batch)])

    def micro_batches(
        self, step: int, *, global_batch: int, micro_batch: int, batch_rank: int = 0, num_batch_ranks: int = 1
    ) -> Iterator[Batch]:
        """Returns the micro-batches that one rank reads in a step. Communicates nothing.

        Args:
            step: The step, from 0.
            global_batch: Windows that all ranks together read in a step.
            micro_batch: Windows in one forward pass on one rank.
            batch_rank: Position of this rank among those that read different windows. Ranks that share one batch
                (the ring of rtp, the stages of a pipeline) pass the same value.
            num_batch_ranks: How many different values `batch_rank` takes.

        Returns:
            An iterator over `global_batch / num_batch_ranks / micro_batch` micro-batches, each
            `{"input_ids": int64 [micro_batch, sequence_length], "shift_labels": int64 [micro_batch, sequence_length]}`;
            `shift_labels[b, t]` is the id that follows `input_ids[b, t]`. Where documents are apart, also
            `"position_ids"`, of the same shape: positions within each document.

        Raises:
            ConfigError: If the sizes do not divide.
        """
        accumulation = num_accumulated(global_batch, micro_batch=micro_batch, num_batch_ranks=num_batch_ranks)
        assert 0 <= batch_rank < num_batch_ranks
        first = step * global_batch + batch_rank * micro_batch * accumulation
        starts = range(first, first + micro_batch * accumulation, micro_batch)
        return (self.to_batch([self.window(start + row) for row in range(micro_batch)]) for start in starts)

    def evaluation_batches(
        self, *, micro_batch: int, batch_rank: int = 0, num_batch_ranks: int = 1, max_windows: int | None = None
    ) -> Iterator[HeldOutBatch]:
        """Deals out all windows over the ranks, each once, in file order. Communicates nothing.

        Every rank gets the same number of batches, as collectives in the forward pass need; where windows run out,
        rows are filled with labels of -100 and may even fill a whole batch, so divide sums by the sum of
        `num_targets` or `num_bytes` over all ranks, never per batch.

        Args:
            micro_batch: Rows of a batch.
            batch_rank: As in `micro_batches`.
            num_batch_ranks: As in `micro_batches`.
            max_windows: Read only this many, evenly spread over all; which ones does not depend on the ranks.
        """
        assert 0 <= batch_rank < num_batch_ranks and micro_batch >= 1
        chosen = self.measured(max_windows)
        num_windows = len(chosen)
        per_round = micro_batch * num_batch_ranks
        for round_start in range(0, num_windows, per_round):
            start = round_start + batch_rank * micro_batch
            windows = [self.stored(index) for index in chosen[start : start + micro_batch]]
            num_bytes = sum(self.num_bytes(window) for window in windows)
            yield HeldOutBatch(
                batch=self.to_batch(windows, num_rows=micro_batch),
                num_targets=sum(int(np.count_nonzero(self._targets(window) != IGNORED_LABEL)) for window in windows),
                num_bytes=num_bytes,
            )

    def measured(self, max_windows: int | None = None) -> list[int]:
        """Windows that an evaluation reads, in file order: all, or `max_windows` evenly spread over all."""
        num_windows = len(self) if max_windows is None else min(len(self), max_windows)
        return [number * len(self) // num_windows for number in range(num_windows)]

    def num_bytes(self, window: npt.NDArray[Any]) -> int:
        """Bytes of text that a window's targets stand for; end-of-document is 0 bytes."""
        targets = self._targets(window)
        return self._tokens.num_bytes(targets[targets != IGNORED_LABEL])

    def _begins(self, window: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """True for each id of a window that a document begins with; the window's first counts as one."""
        begins = np.zeros(len(window), bool)
        if self._documents == "marked":
            begins = window % NOT_A_TARGET >= BEGINS_DOCUMENT
        elif self._documents == "apart":
            begins[1:] = window[:-1] == self._tokens.end_id
        begins[0] = True
        return begins

    def _targets(self, window: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Labels of a window's inputs, all ids but its first; -100 where an id is not learnt."""
        learnt = (window < NOT_A_TARGET) & ~self._begins(window)
        return np.where(learnt, window % BEGINS_DOCUMENT, IGNORED_LABEL)[1:]

    def to_batch(self, windows: Sequence[npt.NDArray[np.int64]], *, num_rows: int | None = None) -> Batch:
        """Stacks windows; rows beyond the last window are input 0 with labels of -100."""
        shape = (len(windows) if num_rows is None else num_rows, self.sequence_length)
        places = np.arange(self.sequence_length + 1)
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "shift_labels": torch.full(shape, IGNORED_LABEL, dtype=torch.int64),
        }
        if self._documents != "joined":
            batch["position_ids"] = torch.from_numpy(places[:-1]).repeat(shape[0], 1)
        for row, window in enumerate(windows):
            batch["input_ids"][row] = torch.from_numpy(window[:-1] % BEGINS_DOCUMENT)
            batch["shift_labels"][row] = torch.from_numpy(self._targets(window))
            if self._documents != "joined":
                first = np.maximum.accumulate(np.where(self._begins(window), places, 0))
                batch["position_ids"][row] = torch.from_numpy((places - first)[:-1])
        return batch


def train_and_held_out(
    file: TokenFile,
    *,
    tokens: Tokens,
    sequence_length: int,
    seed: int,
    held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    documents: Documents = "joined",
    kind: type[TokenWindows] = TokenWindows,
) -> tuple[TokenWindows, TokenWindows]:
    """Cuts a token file into windows to train on and windows held out.

    The cut depends on nothing but the arguments, not on the seed and not on the ranks; every rank calls it alone.

    Args:
        file: The tokenised corpus.
        tokens: The tokenizer that made it.
        sequence_length: Targets in a window.
        seed: Decides the order in which training windows are read.
        held_out_fraction: Share of the windows that are held out, at least one; 0 holds out none (the second result
            is then empty).
        documents: Of a window, joined or apart; see [Note: documents].
        kind: The class of the windows.

    Returns:
        (train, held_out), with no token in common.

    Raises:
        ConfigError: If the file is too short, the fraction out of range, or `tokens` did not make the file.
    """
    if tokens.digest != file.header.tokens_digest:
        raise ConfigError(
            f"token file '{file.path}': made with tokens '{file.header.tokens}', opened with "
            f"'{tokens.name}'. Open it with the same tokenizer, or prepare the corpus again"
        )
    kind.check_length(
        len(file.ids), sequence_length=sequence_length, held_out_fraction=held_out_fraction, source=file.header.source
    )
    num_windows = len(file.ids) // (kind.num_rows * (sequence_length + 1))
    train, held_out = (
        kind(
            file.ids,
            sequence_length=sequence_length,
            ranges=ranges,
            seed=seed,
            tokens=tokens,
            documents=documents,
        )
        for ranges in split_windows(num_windows, held_out_fraction=held_out_fraction)
    )
    return train, held_out


def split_windows(num_windows: int, *, held_out_fraction: float) -> tuple[list[range], list[range]]:
    """Splits windows into training and held-out ones; see [Note: held-out].

    Returns:
        (train, held_out): ranges in rising order that together are `range(num_windows)`.
    """
    if held_out_fraction == 0:
        return [range(num_windows)], []
    num_held_out = max(1, math.floor(num_windows * held_out_fraction))
    num_sections = min(_MAX_SECTIONS, num_held_out)
    train, held_out = [], []
    for section in range(num_sections):
        start, end = section * num_windows // num_sections, (section + 1) * num_windows // num_sections
        count = (section + 1) * num_held_out // num_sections - section * num_held_out // num_sections
        train.append(range(start, end - count))
        held_out.append(range(end - count, end))
    return train, held_out


def min_tokens(sequence_length: int, *, held_out_fraction: float) -> int:
    """Returns the least number of tokens that a corpus needs; checks both arguments.

    Raises:
        ConfigError: If one is out of range.
    """
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length}: write 1 or more")
    if not 0 <= held_out_fraction <= 0.5:
        raise ConfigError(f"held_out_fraction {held_out_fraction}: write a number from 0 to 0.5")
    return (sequence_length + 1) * (2 if held_out_fraction else 1)


def check_length(num_tokens: int, *, sequence_length: int, held_out_fraction: float, source: str) -> None:
    """Checks that a corpus of `num_tokens` gives a window to train on and, if some is held out, one to hold out.

    Raises:
        ConfigError: If it does not.
    """
    needed = min_tokens(sequence_length, held_out_fraction=held_out_fraction)
    if num_tokens >= needed:
        return
    num_windows = 2 if held_out_fraction else 1
    what = "a training and a held-out window" if held_out_fraction else "one window"
    fits = num_tokens // num_windows - 1
    raise ConfigError(
        f"corpus '{source}': {num_tokens} tokens, but {what} of sequence_length {sequence_length} need "
        f"{needed}. Write " + (f"sequence_length = {fits} or less, or " if fits >= 1 else "") + "a longer corpus"
    )


def num_accumulated(global_batch: int, *, micro_batch: int, num_batch_ranks: int) -> int:
    """Micro-batches per rank and step, from global batch = micro batch x accumulation x batch ranks.

    Raises:
        ConfigError: If a size is below 1 or they do not divide.
    """
    if min(global_batch, micro_batch, num_batch_ranks) < 1:
        raise ConfigError(
            f"batch: global_batch {global_batch}, micro_batch {micro_batch}, batch ranks "
            f"{num_batch_ranks}: write 1 or more for each"
        )
    per_pass = micro_batch * num_batch_ranks
    if global_batch % per_pass:
        near = max(1, round(global_batch / per_pass)) * per_pass
        raise ConfigError(
            f"batch: global_batch {global_batch} is not micro_batch {micro_batch} x accumulation x "
            f"{num_batch_ranks} batch ranks. Write global_batch = {near}"
        )
    return global_batch // per_pass


def bits_per_byte(sum_nats: float, *, num_bytes: int) -> float:
    """Bits per byte of text from a loss summed over targets in nats and the bytes that these targets stand for.

    The loss of end-of-document targets is in the sum while their bytes are 0: a model pays for knowing where
    documents end.
    """
    return sum_nats / math.log(2) / num_bytes if num_bytes else math.nan

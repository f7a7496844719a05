"""Windows of a stream: records of JSONL and Parquet that are read, tokenised and packed as a run needs them.

Nothing is kept on disk, and memory does not grow with the files. What is given up for that: a text that was not read to
its end has no held-out part, and no shuffle over all of it.

[Note: order of a stream] Files come one after another, documents are packed into windows as in a token file, and what
is left at the end of the last file is not read. Windows are taken in blocks of `buffer`, each in an order of its own
that the seed decides; with a buffer above 1 the files of each epoch, too, have such an order. So sample `n` is the same
whatever the ranks: every rank reads and tokenises all of the stream, and takes its own samples.

[Note: going on] A window begins some tokens behind a record's position (file, line, byte). The position of a block's
first window is all that a run needs to go on in it; a checkpoint has one per source.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.train.data.corpus import Corpus, RowPosition
from rotorch.train.data.mixture import BLOCK, MixedWindows, Share, places
from rotorch.train.data.shuffle import Permutation
from rotorch.train.data.tokens import Tokens
from rotorch.train.data.windows import Documents, TokenWindows

_END_BYTES = 1 << 16
STREAM = "stream"
"""The entry of a checkpoint's data position that says where a stream goes on."""


@dataclass(frozen=True)
class StreamPosition:
    """Position in a stream: the first token of a window.

    Attributes:
        epoch: times that all files were read before.
        file: files of this epoch that were read before.
        row: records of the file before the one that reading begins with.
        byte: of the file, at which that record begins; 0 in Parquet.
        skip: tokens from there that are in earlier windows.
    """

    epoch: int = 0
    file: int = 0
    row: int = 0
    byte: int = 0
    skip: int = 0


class StreamedFiles:
    """The files of a corpus as an endless stream of windows, from any position on."""

    def __init__(self, corpus: Corpus, *, tokens: Tokens, length: int, seed: int, shuffles: bool) -> None:
        """Reads nothing yet.

        Args:
            corpus: JSONL and Parquet files.
            tokens: The tokenizer.
            length: Ids in a window.
            seed: Decides the order of files in each epoch.
            shuffles: Whether there is such an order; else it is that of their paths.
        """
        self.corpus, self.tokens, self._length, self._seed, self._shuffles = corpus, tokens, length, seed, shuffles

    def windows(self, position: StreamPosition) -> Iterator[tuple[npt.NDArray[Any], StreamPosition]]:
        """Yields windows, shape [length], and the position of each, without end.

        Raises:
            ConfigError: If a record is broken, a file has changed, or all files together have no window.
        """
        while True:
            num_windows = 0
            for found in self._rest_of_epoch(position):
                num_windows += 1
                yield found
            if not num_windows and position == StreamPosition(epoch=position.epoch):
                raise ConfigError(
                    f"corpus '{self.corpus.source}': fewer than {self._length} tokens, and one sample has as many. "
                    "Write a smaller data.sequence_length, or a longer corpus"
                )
            position = StreamPosition(epoch=position.epoch + 1)

    def _rest_of_epoch(self, start: StreamPosition) -> Iterator[tuple[npt.NDArray[Any], StreamPosition]]:
        now = _Reading(self, start)
        marks = deque([(0, replace(start, skip=0))])  # tokens before an array, and its position
        held: npt.NDArray[Any] = np.empty(0, self.tokens.dtype)
        num_read, num_used, before = 0, start.skip, marks[0][1]
        for ids in self.tokens.encode_pieces(now.documents()):
            marks.append((num_read, before))
            held, num_read, before = np.concatenate([held, ids]), num_read + len(ids), now.position
            first = num_read - len(held)  # number of the first id that is held
            while num_read - num_used >= self._length:
                while len(marks) > 1 and marks[1][0] <= num_used:
                    marks.popleft()
                window = held[num_used - first : num_used - first + self._length]
                yield window, replace(marks[0][1], skip=num_used - marks[0][0])
                num_used += self._length
            held = held[max(0, num_used - first) :].copy()

    def order(self, epoch: int) -> list[int]:
        """Numbers of the files in the order of an epoch."""
        number = len(self.corpus.files)
        if not self._shuffles:
            return list(range(number))
        permuted = Permutation(number, seed=self._seed, epoch=epoch)
        return [permuted(index) for index in range(number)]


class _Reading:
    """One epoch: `position` is that of the next document. Tokenizers read whole batches ahead of ids."""

    def __init__(self, files: StreamedFiles, start: StreamPosition) -> None:
        self._files, self._start = files, start
        self._file, self._row = start.file, RowPosition(start.row, start.byte)

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(self._start.epoch, self._file, self._row.row, self._row.byte)

    def documents(self) -> Iterator[tuple[bytes, bool]]:
        order = self._files.order(self._start.epoch)
        for file in range(self._start.file, len(order)):
            if file > self._start.file:
                self._file, self._row = file, RowPosition()
            for data, ends_document in self._files.corpus.pieces_of(order[file], position=self._row):
                if data:
                    yield data, ends_document


class StreamWindows(TokenWindows):
    """Windows of a stream in the order of samples: they are read forwards only, and their number is not known.

    Attributes:
        files: The files.
    """

    def __init__(
        self, files: StreamedFiles, *, sequence_length: int, seed: int, buffer: int, documents: Documents
    ) -> None:
        """Reads nothing yet.

        Args:
            files: The files.
            sequence_length: Targets in a window.
            seed: Decides the order within blocks.
            buffer: Windows of a block.
            documents: Of a window, joined or apart.
        """
        super().__init__(
            np.empty(0, files.tokens.dtype),
            sequence_length=sequence_length,
            ranges=(),
            seed=seed,
            tokens=files.tokens,
            documents=documents,
        )
        self.files, self._buffer = files, buffer
        self.seek({"block": 0, **asdict(StreamPosition())})

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes to a block, by what `position` has said of it."""
        fields = dict(position)
        self._number = int(fields.pop("block"))
        self._reader = self.files.windows(StreamPosition(**fields))
        self._block: list[tuple[npt.NDArray[Any], StreamPosition]] = []
        self._next: list[tuple[npt.NDArray[Any], StreamPosition]] = []

    def window(self, sample: int) -> npt.NDArray[np.int64]:
        """The ids of sample number `sample` of the run; samples before those of the last call's block are gone.

        Raises:
            FinalFailure: If a record is broken, or a file has changed.
        """
        number, index = divmod(sample, self._buffer)
        self._go_to(number)
        self._read_ahead(index + 1)  # one window for each that is taken, so that no step waits for a whole block
        ids = self._block[Permutation(self._buffer, seed=self.seed, epoch=number)(index)][0]
        return np.asarray(ids, np.int64)

    def position(self, sample: int) -> dict[str, Any]:
        number = sample // self._buffer
        if number == self._number + 1 and self._block:  # the next one need not be read to its end for this
            self._read_ahead(1)
            return {"block": number, **asdict(self._next[0][1])}
        self._go_to(number)
        return {"block": number, **asdict(self._block[0][1])}

    @property
    def epochs(self) -> float:
        """Times that the files were read, to a file."""
        if not self._block:
            return 0.0
        position = self._block[-1][1]
        return position.epoch + position.file / len(self.files.corpus.files)

    def _go_to(self, number: int) -> None:
        assert number >= self._number, "a stream is read forwards"
        while not self._block or self._number < number:
            self._number += bool(self._block)
            self._read_ahead(self._buffer)
            self._block, self._next = self._next, []

    def _read_ahead(self, count: int) -> None:
        """Reads windows of the next block until it has `count`."""
        try:
            while len(self._next) < count:
                window, position = next(self._reader)
                self._next.append((window.copy(), position))
        except ConfigError as error:
            raise FinalFailure(f"data.stream: {error}") from error


class MixedStreams(MixedWindows):
    """Windows of several streams, mixed in the shares of `mixture.py`; each stream is read forwards."""

    parts: tuple[StreamWindows, ...]

    def __init__(self, parts: Sequence[StreamWindows], *, weights: Sequence[float]) -> None:
        first = parts[0]
        self.sequence_length, self.seed = first.sequence_length, first.seed
        self._tokens, self._documents = first._tokens, first._documents
        self.parts = tuple(parts)
        self._places = places(weights)
        self._ends = list(np.cumsum(self._places))
        self._of_block = lru_cache(maxsize=2)(self._block_of)

    def _block_of(self, block: int) -> list[tuple[int, int]]:
        """Source of each sample of a block, and the number of the sample among those of this source."""
        found, counts = [], [block * number for number in self._places]
        for index in range(BLOCK):
            part = super().source_of(block * BLOCK + index)[0]
            found.append((part, counts[part]))
            counts[part] += 1
        return found

    def source_of(self, sample: int) -> tuple[int, int]:
        block, index = divmod(sample, BLOCK)
        return self._of_block(block)[index]

    def window(self, sample: int) -> npt.NDArray[np.int64]:
        part, number = self.source_of(sample)
        return self.parts[part].window(number)

    def _counts(self, sample: int) -> list[int]:
        """Samples of each source before `sample`."""
        block, index = divmod(sample, BLOCK)
        before = [part for part, _ in self._of_block(block)[:index]]
        return [block * number + before.count(part) for part, number in enumerate(self._places)]

    def position(self, sample: int) -> dict[str, Any]:
        counts = self._counts(sample)
        return {"parts": [part.position(count) for part, count in zip(self.parts, counts, strict=True)]}

    def seek(self, position: Mapping[str, Any]) -> None:
        for part, of_part in zip(self.parts, position["parts"], strict=True):
            part.seek(of_part)

    def shares(self, num_samples: int, *, names: Sequence[str]) -> list[Share]:
        """Shares of the sources in the first `num_samples` samples of a run."""
        counts = self._counts(num_samples)
        return [
            Share(name, number / BLOCK, count, part.epochs)
            for name, number, count, part in zip(names, self._places, counts, self.parts, strict=True)
        ]


def stream_fingerprint(corpus: Corpus, *, tokens: Tokens) -> str:
    """A digest of names, sizes and ends of files, their field and the tokenizer: a stream is not read to its end."""
    files = [[file.path.name, file.size_bytes, _ends(file.path)] for file in corpus.files]
    return hashlib.sha256(json.dumps([files, corpus.text_field, tokens.digest]).encode()).hexdigest()[:16]


def _ends(path: Path) -> str:
    """A digest of a file's first and last bytes."""
    with path.open("rb") as stream:
        digest = hashlib.sha256(stream.read(_END_BYTES))
        stream.seek(max(0, path.stat().st_size - _END_BYTES))
        digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()

"""Batches of a corpus on disk: the steps in order, and the names that the rest of the trainer imports.

checked = check_source("stdlib", tokens="bytes", sequence_length=256)    # before any rank starts; writes nothing
file    = prepare_corpus(checked, progress=bar)                          # tokenises once, into the cache
------- every rank, alone ----------------------------------------------------------------------------------
tokens  = open_tokens("bytes")
file    = TokenFile.open(path)
train, held_out = train_and_held_out(file, tokens=tokens, sequence_length=256, seed=0)
for batch in train.micro_batches(step, global_batch=32, micro_batch=4, batch_rank=0, num_batch_ranks=2): ...
for part in held_out.evaluation_batches(micro_batch=4, batch_rank=0, num_batch_ranks=2): ...
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotorch.core.cache_dir import default_cache_dir
from rotorch.core.errors import ConfigError
from rotorch.core.quantities import format_bytes
from rotorch.train.data.corpus import STDLIB, Corpus, find_corpus
from rotorch.train.data.instructions import Instructions, find_records, open_chat
from rotorch.train.data.mixture import MixedWindows
from rotorch.train.data.preferences import PairWindows, Preferences
from rotorch.train.data.stream import MixedStreams, StreamedFiles, StreamPosition, StreamWindows, stream_fingerprint
from rotorch.train.data.token_file import (
    FORMAT_VERSION,
    HEADER_BYTES,
    DamagedTokenFile,
    TokenFile,
    TokenHeader,
    building,
    write_token_file,
)
from rotorch.train.data.tokens import BYTES, ByteTokens, Tokens, check_vocabulary, open_tokens
from rotorch.train.data.windows import (
    DEFAULT_HELD_OUT_FRACTION,
    Batch,
    Documents,
    HeldOutBatch,
    TokenWindows,
    bits_per_byte,
    min_tokens,
    num_accumulated,
    train_and_held_out,
)

__all__ = [
    "BYTES",
    "DEFAULT_HELD_OUT_FRACTION",
    "STDLIB",
    "Batch",
    "CheckedSource",
    "DamagedTokenFile",
    "Documents",
    "HeldOutBatch",
    "MixedPart",
    "TokenFile",
    "TokenWindows",
    "Tokens",
    "all_windows",
    "bits_per_byte",
    "check_source",
    "check_vocabulary",
    "default_cache_dir",
    "num_accumulated",
    "open_tokens",
    "open_windows",
    "prepare_corpus",
    "prepare_sources",
    "train_and_held_out",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class MixedPart:
    """One source of a mixture: its name, its weight, and its text."""

    name: str
    weight: float
    checked: CheckedSource


@dataclass(frozen=True, eq=False)
class CheckedSource:
    """A corpus and a tokenizer that were found and checked, and where their token file is or will be.

    Attributes:
        corpus: The files.
        tokens: The tokenizer.
        sequence_length: Targets in a window, or None if any length will do.
        held_out_fraction: Share of the windows that are held out.
        path: The token file in the cache; its name follows from the files' names, sizes and times, the tokenizer's
            content and the text field.
        instructions: How records of prompts and responses become windows; None for text.
        documents: Of a window, for `train_and_held_out`.
        parts: All sources of a mixture, of which this is the first; empty if it is the only one.
        stream: Windows of a block of a stream, which has no token file; None if there is one.
    """

    corpus: Corpus
    tokens: Tokens
    sequence_length: int | None
    held_out_fraction: float
    path: Path
    instructions: Instructions | None = None
    documents: Documents = "joined"
    parts: tuple[MixedPart, ...] = ()
    stream: int | None = None

    @property
    def each(self) -> tuple[CheckedSource, ...]:
        """The sources: those of the mixture, or this one."""
        return tuple(part.checked for part in self.parts) or (self,)

    @property
    def kind(self) -> type[TokenWindows]:
        """The class of its windows."""
        return PairWindows if isinstance(self.instructions, Preferences) else TokenWindows

    def streamed(self, *, seed: int) -> StreamWindows:
        """Windows of the stream, from its beginning."""
        assert self.stream is not None and self.sequence_length is not None
        files = StreamedFiles(
            self.corpus, tokens=self.tokens, length=self.sequence_length + 1, seed=seed, shuffles=self.stream > 1
        )
        return StreamWindows(
            files,
            sequence_length=self.sequence_length,
            seed=seed,
            buffer=self.stream,
            documents=self.documents,
        )

    def check_length(self, num_tokens: int) -> None:
        """Raises ConfigError if `num_tokens` are too few for the windows asked for."""
        self.kind.check_length(
            num_tokens,
            sequence_length=self.sequence_length or 1,
            held_out_fraction=self.held_out_fraction if self.sequence_length else 0.0,
            source=self.corpus.source,
        )


def check_source(
    source: str | os.PathLike[str],
    *,
    tokens: str | os.PathLike[str] = BYTES,
    eos_token: str | None = None,
    text_field: str = "text",
    suffixes: Sequence[str] | None = None,
    sequence_length: int | None = None,
    held_out_fraction: float = DEFAULT_HELD_OUT_FRACTION,
    model_vocab: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    instructions: tuple[str, str] | None = None,
    preferences: tuple[str, str, str] | None = None,
    pack: bool = False,
    apart: bool = False,
    stream: int | None = None,
) -> CheckedSource:
    """Checks all that can be checked without tokenising. Writes nothing; call it before any rank starts.

    Args:
        source: A file, a directory, or `"stdlib"`; see `corpus.find_corpus`.
        tokens: `"bytes"`, or a `tokenizer.json` or the directory that holds it; see `tokens.open_tokens`.
        eos_token: The token that ends a document, if the tokenizer's files do not tell.
        text_field: The field that holds the text of JSONL and Parquet records.
        suffixes: Which files of a directory to read; see `corpus.find_corpus`.
        sequence_length: Targets in a window; checked against the corpus' length.
        held_out_fraction: Share of the windows held out, 0 to 0.5.
        model_vocab: The model's vocabulary size; checked against the tokens'.
        cache_dir: Where token files are kept; `default_cache_dir()` if left out.
        instructions: The fields of prompt and response, for records of which only responses are learnt.
        preferences: The fields of prompt, chosen and rejected response, for records of pairs.
        pack: Whether several such records may share a window.
        apart: Whether documents of a window, such records or texts, are kept apart (`windows.py`, [Note: documents]).
        stream: Windows of a block, for a text that is read as it is needed, in place of a token file.

    Raises:
        ConfigError: If anything is missing, empty, unreadable, too short, too large for the model or for the disk.
    """
    if sequence_length is not None:
        min_tokens(sequence_length, held_out_fraction=held_out_fraction)
    opened = open_tokens(tokens, eos_token=eos_token)
    if model_vocab is not None:
        check_vocabulary(opened.vocab_size, model_vocab=model_vocab)
    directory = Path(cache_dir).expanduser().absolute() if cache_dir is not None else default_cache_dir()
    if (fields := preferences or instructions) is not None:
        of_pairs = {"rejected_field": fields[2]} if preferences is not None else {}
        kind = "instructions" if preferences is None else "preferences"
        found = (Instructions if preferences is None else Preferences)(
            corpus=find_records(os.fspath(source), fields=fields, kind=kind),
            tokens=opened,
            prompt_field=fields[0],
            response_field=fields[1],
            sequence_length=sequence_length or 1,
            pack=pack,
            apart=pack and apart,
            chat=None if isinstance(opened, ByteTokens) else open_chat(opened.name),
            **of_pairs,
        )
        found.check_first()
        path = directory / f"{_key(found.corpus, tokens=opened, instructions=found)}.tokens"
        documents: Documents = "marked" if found.apart else "joined"
        return CheckedSource(found.corpus, opened, sequence_length, held_out_fraction, path, found, documents)
    if apart and opened.end_id is None:
        raise ConfigError(
            f"tokenizer '{opened.name}': names no token that ends a document, so documents cannot be told apart. Write "
            "data.eos_token=... with one of its tokens, or data.documents = 'joined'"
        )
    corpus = find_corpus(source, text_field=text_field, suffixes=suffixes)
    checked = CheckedSource(
        corpus=corpus,
        tokens=opened,
        sequence_length=sequence_length,
        held_out_fraction=held_out_fraction,
        path=directory / f"{_key(corpus, tokens=opened)}.tokens",
        documents="apart" if apart else "joined",
        stream=stream,
    )
    if stream is not None:
        _check_stream(checked)
        return checked
    if isinstance(opened, ByteTokens) and corpus.is_exact:
        checked.check_length(corpus.text_bytes + sum(file.num_documents for file in corpus.files))
    if not checked.path.exists():
        _check_room(corpus, tokens=opened, directory=directory)
    return checked


def prepare_corpus(checked: CheckedSource, *, progress: Callable[[int, int], None] | None = None) -> TokenFile:
    """Tokenises the corpus into the cache, unless a whole and undamaged token file is there already.

    Call it once per machine, before the other ranks open the file (several processes may call it at once: one builds,
    the others wait and find it built). The corpus is streamed: memory does not grow with its size.

    Args:
        checked: From `check_source`.
        progress: Called now and then with (bytes of text read so far, bytes in all); the total is an estimate for
            JSONL and Parquet, and the last call has both equal.

    Returns:
        The opened token file; hand its `path` to the ranks.

    Raises:
        ConfigError: If a record is broken, a file changes meanwhile, the corpus is too short or the disk full.
            Nothing is left behind then.
    """
    path = checked.path
    with building(path):
        if path.exists():
            try:
                file = TokenFile.open(path, verify=True)
            except DamagedTokenFile as error:
                _log.warning("%s; rebuilding it now", error)
            else:
                checked.check_length(file.header.num_tokens)
                return file
        _build(checked, progress=progress or (lambda done, total: None))
    return TokenFile.open(path)


def prepare_sources(checked: CheckedSource) -> str:
    """Tokenises all sources of a run (`prepare_corpus`); returns the fingerprint of their tokens together.

    Streams are left as they are.
    """
    return " ".join(
        stream_fingerprint(part.corpus, tokens=part.tokens)
        if part.stream is not None
        else prepare_corpus(part).fingerprint
        for part in checked.each
    )


def open_windows(checked: CheckedSource, *, seed: int) -> tuple[TokenWindows, TokenWindows, dict[str, TokenWindows]]:
    """Opens the windows of prepared sources. Every rank alone.

    Args:
        checked: From `check_source`, with a length of windows.
        seed: Decides the order in which training windows are read, and are mixed.

    Returns:
        (train, held_out, by_name): of a mixture all windows that its sources hold out, and those of each by its name.
    """
    weights = [part.weight for part in checked.parts]
    if checked.stream is not None:
        streams = [part.streamed(seed=seed) for part in checked.each]
        length, no_ids = streams[0].sequence_length, np.empty(0, checked.tokens.dtype)
        nothing = TokenWindows(no_ids, sequence_length=length, ranges=(), seed=seed, tokens=checked.tokens)
        return MixedStreams(streams, weights=weights) if weights else streams[0], nothing, {}
    pairs = [_windows(part, seed=seed) for part in checked.each]
    if not checked.parts:
        return *pairs[0], {}
    train, held_out = (MixedWindows(windows, weights=weights) for windows in zip(*pairs, strict=True))
    names = [part.name for part in checked.parts]
    return train, held_out, {name: pair[1] for name, pair in zip(names, pairs, strict=True) if len(pair[1])}


def _windows(checked: CheckedSource, *, seed: int) -> tuple[TokenWindows, TokenWindows]:
    assert checked.sequence_length is not None
    return train_and_held_out(
        TokenFile.open(checked.path),
        tokens=checked.tokens,
        sequence_length=checked.sequence_length,
        seed=seed,
        held_out_fraction=checked.held_out_fraction,
        documents=checked.documents,
        kind=checked.kind,
    )


def all_windows(checked: CheckedSource, *, seed: int) -> TokenWindows:
    """Opens all windows of a prepared corpus of which nothing is held out. Every rank alone."""
    assert not checked.held_out_fraction
    return _windows(checked, seed=seed)[0]


def _check_stream(checked: CheckedSource) -> None:
    """Checks that a stream has records, and a first window."""
    if (text := next((file for file in checked.corpus.files if file.kind == "text"), None)) is not None:
        raise ConfigError(
            f"data.stream: {text.path} is no JSONL and no Parquet: a text file is one document, and would be read from "
            "its beginning to go on in it. Write data.stream = false, or records"
        )
    next(checked.streamed(seed=0).files.windows(StreamPosition()))


def _build(checked: CheckedSource, *, progress: Callable[[int, int], None]) -> None:
    corpus, tokens, instructions = checked.corpus, checked.tokens, checked.instructions
    text_bytes = num_documents = 0

    def counted() -> Iterator[tuple[bytes, bool]]:
        nonlocal text_bytes, num_documents
        for data, ends_document in corpus.pieces():
            yield data, ends_document
            text_bytes += len(data)
            num_documents += ends_document
            progress(min(text_bytes, corpus.text_bytes), corpus.text_bytes)

    def examples(instructions: Instructions) -> Iterator[npt.NDArray[Any]]:
        nonlocal text_bytes, num_documents
        for ids, num_examples, num_bytes in instructions.windows():
            yield ids
            text_bytes += num_bytes
            num_documents += num_examples
            progress(min(text_bytes, corpus.text_bytes), corpus.text_bytes)

    def header(num_tokens: int, crc32: int) -> TokenHeader:
        # Last, so that what is wrong with the corpus as a whole leaves no token file behind either.
        if not text_bytes and instructions is not None:
            raise ConfigError(
                f"corpus '{corpus.source}': no record has a response within {instructions.sequence_length} tokens. "
                "Write a longer data.sequence_length, or shorter prompts"
            )
        if not text_bytes:
            raise ConfigError(f"corpus '{corpus.source}': empty: {len(corpus.files)} files without a byte of text")
        checked.check_length(num_tokens)
        if f"{_key(corpus, tokens=tokens, instructions=instructions)}.tokens" != checked.path.name:
            raise ConfigError(f"corpus '{corpus.source}': a file changed while it was read. Run again")
        return TokenHeader(
            source=corpus.source,
            tokens=tokens.name,
            tokens_digest=tokens.digest,
            vocab_size=tokens.vocab_size,
            end_id=tokens.end_id,
            dtype=tokens.dtype.name if instructions is None else "uint32",
            num_tokens=num_tokens,
            num_documents=num_documents,
            text_bytes=text_bytes,
            crc32=crc32,
        )

    arrays = tokens.encode_pieces(counted()) if instructions is None else examples(instructions)
    write_token_file(checked.path, arrays=arrays, header=header)
    progress(corpus.text_bytes, corpus.text_bytes)


def _key(corpus: Corpus, *, tokens: Tokens, instructions: Instructions | None = None) -> str:
    parts = [FORMAT_VERSION, tokens.digest, corpus.digest()]
    parts += [] if instructions is None else [instructions.digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _check_room(corpus: Corpus, *, tokens: Tokens, directory: Path) -> None:
    """Checks that the token file can be written and has room: exact for bytes, for other tokens at two bytes each."""
    bytes_per_token = 1 if isinstance(tokens, ByteTokens) else 2
    num_tokens = corpus.text_bytes // bytes_per_token + sum(file.num_documents for file in corpus.files)
    needed_bytes = HEADER_BYTES + num_tokens * tokens.dtype.itemsize
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"token cache '{directory}': '{existing}' is a file. Write cache_dir=... with a directory")
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"token cache '{directory}': no permission to write to '{existing}'. "
            "Write cache_dir=... with a directory that can be written"
        )
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"token cache '{directory}': needs about {format_bytes(needed_bytes)}, "
            f"{format_bytes(free_bytes)} are free. Free some, or write cache_dir=... on another disk"
        )

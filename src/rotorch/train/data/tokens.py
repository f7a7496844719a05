"""Text to token ids and back: bytes as they are, or any `tokenizer.json`.

Both kinds also know how many bytes of text each token stands for, which turns a loss in nats per token into bits per
byte: a number that may be compared between models whatever their tokens are.

[Note: where a long document is cut] A document of more than `PIECE_BYTES` is tokenised in pieces. A piece ends between
a letter or digit and the line break after it: the pre-tokenisers of GPT-2, Llama 3, Qwen and their kin always cut
there, so the tokens are those of the whole document. A tokenizer that puts a space before every text also puts one
before every piece.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import tokenizers

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.small_files import read_small
from rotorch.train.data.corpus import PIECE_BYTES

BYTES = "bytes"

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]")

_MOST_BYTES = 1 << 29  # of a tokenizer.json; the largest that are published have some 40 MB
_MOST_CONFIG_BYTES = 1 << 24
_MOST_IDS = 1 << 30  # the two bits above say of an id in a window that it is no target, or a document's first
_SHOWN_CHARS = 40
_NOT_OF_A_LIBRARY = (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit)

_log = logging.getLogger(__name__)


class Tokens(abc.ABC):
    """A way to write text as token ids.

    Attributes:
        name: What the user wrote: `"bytes"` or a path.
        vocab_size: One more than the largest id.
        end_id: The id that follows every document, or None if documents are joined without one.
        digest: Hex digest of all that decides which ids a text becomes.
    """

    name: str
    vocab_size: int
    end_id: int | None
    digest: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no start or end token added."""

    @property
    def start_ids(self) -> list[int]:
        """Ids that the tokenizer itself puts before a text (a beginning-of-sequence token); training does without."""
        return []

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; end-of-document, other special tokens and ids outside the vocabulary become nothing."""

    @abc.abstractmethod
    def encode_pieces(self, pieces: Iterable[tuple[bytes, bool]]) -> Iterator[npt.NDArray[Any]]:
        """Tokenises a stream of `(data, ends_document)`.

        Yields:
            Arrays of `dtype`, shape [any length], whose concatenation is the documents' ids, each document followed
            by `end_id`.
        """

    @abc.abstractmethod
    def num_bytes(self, ids: npt.NDArray[Any]) -> int:
        """Bytes of text that these ids (shape [any length]) stand for; special tokens, the end too, are 0."""


@final
class ByteTokens(Tokens):
    """Ids 0 to 255 are the bytes themselves; 256 follows every document. Nothing is lost in any encoding."""

    def __init__(self) -> None:
        self.name = BYTES
        self.vocab_size = 257
        self.end_id: int = 256
        self.digest = BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(token) for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")

    def encode_pieces(self, pieces: Iterable[tuple[bytes, bool]]) -> Iterator[npt.NDArray[Any]]:
        for data, ends_document in pieces:
            ids = np.full(len(data) + ends_document, self.end_id, self.dtype)
            ids[: len(data)] = np.frombuffer(data, np.uint8)
            yield ids

    def num_bytes(self, ids: npt.NDArray[Any]) -> int:
        return int(np.count_nonzero(ids < 256))


@final
class VocabularyTokens(Tokens):
    """The tokens of a `tokenizer.json`, read by the `tokenizers` library.

    Text that spells out a special token is tokenised as the plain text it is, and the truncation, padding and start
    or end tokens that the file may ask for are not applied: they are meant for prompts, not for a corpus.
    """

    def __init__(self, path: Path, *, eos_token: str | None = None) -> None:
        """Reads the tokenizer.

        Args:
            path: A `tokenizer.json` or the directory that holds it.
            eos_token: The token that ends a document. By default the one named by `tokenizer_config.json` or
                `special_tokens_map.json` beside it, else a token with one of the usual names.

        Raises:
            ConfigError: If there is no such file, it is not a tokenizer, or `eos_token` is not one of its tokens.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = read_small(file, most_bytes=_MOST_BYTES, what="a tokenizer.json")
        except FileNotFoundError as error:
            raise ConfigError(
                f"tokenizer '{path}': no such file: '{file}'. Write a tokenizer.json, "
                "a directory that holds one, or 'bytes'"
            ) from error
        except OSError as error:
            raise ConfigError(f"tokenizer '{file}': cannot read: {error.strerror}") from error
        with library_errors(f"tokenizer '{file}': not a tokenizer.json, or a damaged one"), _panics_unheard():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._vocabulary:
            raise ConfigError(f"tokenizer '{file}': its vocabulary is empty")
        self.name = str(path)
        self.vocab_size = max(self._vocabulary.values()) + 1  # not the number of tokens: ids may have holes
        if self.vocab_size > _MOST_IDS:
            raise ConfigError(
                f"tokenizer '{file}': its largest id is {self.vocab_size - 1}, and the most is {_MOST_IDS - 1}. "
                "Write another tokenizer"
            )
        self.end_id = self._find_end(file, eos_token=eos_token)
        self.digest = hashlib.sha256(content + f"|{self.end_id}".encode()).hexdigest()

    def _find_end(self, file: Path, *, eos_token: str | None) -> int | None:
        if eos_token is None:
            eos_token = _declared_end(file.parent)
            if eos_token not in self._vocabulary:
                eos_token = next((token for token in _END_TOKENS if token in self._vocabulary), None)
        if eos_token is None:
            _log.warning(
                "tokenizer %s: no end-of-text token found: documents are joined without one. "
                "Write eos_token=... to name it",
                file,
            )
            return None
        if eos_token not in self._vocabulary:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise ConfigError(
                f"tokenizer '{file}': eos_token '{eos_token}' is not one of its tokens"
                f"{nearest(eos_token, known=self._vocabulary)}; its special tokens are "
                f"{', '.join(special[:8]) or 'none'}. Write one that it has"
            )
        return self._vocabulary[eos_token]

    def encode(self, text: str) -> list[int]:
        with library_errors(
            f"tokenizer '{self.name}': cannot tokenise {text[:_SHOWN_CHARS]!r}",
            instead="Write another tokenizer, or this one with its unknown token in its vocabulary",
        ):
            return list(self._tokenizer.encode(without_surrogates(text), add_special_tokens=False).ids)

    @property
    def start_ids(self) -> list[int]:
        with library_errors("the tokenizer"):
            whole, bare = (list(self._tokenizer.encode("a", add_special_tokens=add).ids) for add in (True, False))
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(token) for token in ids if 0 <= token < self.vocab_size and token != self.end_id]
        with library_errors(f"tokenizer '{self.name}': cannot write ids as text", instead="Write another tokenizer"):
            return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def encode_pieces(self, pieces: Iterable[tuple[bytes, bool]]) -> Iterator[npt.NDArray[Any]]:
        batch: list[tuple[str, bool]] = []
        num_chars = 0
        for text, ends_document in _texts(pieces):
            batch.append((text, ends_document))
            num_chars += len(text)
            if num_chars >= PIECE_BYTES:  # many short documents at once keep all of the library's threads busy
                yield self._encode_batch(batch)
                batch, num_chars = [], 0
        if batch:
            yield self._encode_batch(batch)

    def _encode_batch(self, batch: Sequence[tuple[str, bool]]) -> npt.NDArray[Any]:
        try:
            encodings = self._tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        except _NOT_OF_A_LIBRARY:  # Ctrl-C is not answered by encoding all of it again
            raise
        except BaseException:
            for text, _ in batch:
                self.encode(text)  # says which of them it is
            raise
        end = np.array([] if self.end_id is None else [self.end_id], self.dtype)
        arrays: list[npt.NDArray[Any]] = []
        for encoding, (_, ends_document) in zip(encodings, batch, strict=True):
            arrays.append(np.array(encoding.ids, self.dtype))
            if ends_document:
                arrays.append(end)
        return np.concatenate(arrays)

    def num_bytes(self, ids: npt.NDArray[Any]) -> int:
        if self._bytes_of_token is None:
            return len(self.decode(ids.tolist()).encode("utf-8", errors="replace"))
        return int(self._bytes_of_token[ids].sum())

    @cached_property
    def _bytes_of_token(self) -> npt.NDArray[np.int64] | None:
        """Bytes of text of every token, shape [vocab_size]; None where that depends on the tokens beside it."""
        parts = _decoder_parts(json.loads(self._tokenizer.to_str()))
        is_byte_level = "ByteLevel" in parts
        if not is_byte_level and not parts & {"Metaspace", "ByteFallback"}:
            return None
        alphabet = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        added = self._tokenizer.get_added_tokens_decoder()
        table = np.zeros(self.vocab_size, np.int64)
        for token, index in self._vocabulary.items():
            if index in added:  # stands for itself, or for nothing if it is special
                table[index] = 0 if added[index].special else len(token.encode())
            elif is_byte_level and alphabet.issuperset(token):
                table[index] = len(token)  # one character of GPT-2's byte alphabet for each byte
            elif not is_byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[index] = 1
            else:
                table[index] = len(token.replace("▁", " ").encode())
        if self.end_id is not None:
            table[self.end_id] = 0
        return table


def open_tokens(tokens: str | os.PathLike[str] = BYTES, *, eos_token: str | None = None) -> Tokens:
    """Opens a tokenizer.

    Args:
        tokens: `"bytes"`, or the path of a `tokenizer.json` or of the directory that holds it (write `"./bytes"` for
            a directory of that name).
        eos_token: The token that ends a document; see `VocabularyTokens`.

    Raises:
        ConfigError: If it cannot be read, or `eos_token` is given for bytes or is not one of its tokens.
    """
    name = os.fspath(tokens)
    if name == BYTES:
        if eos_token is not None:
            raise ConfigError(
                f"tokens 'bytes' with eos_token '{eos_token}': bytes end a document with id 256. Leave eos_token out"
            )
        return ByteTokens()
    if not name:
        raise ConfigError("tokens '': no path given. Write 'bytes' or the path of a tokenizer.json")
    return VocabularyTokens(Path(name).expanduser().absolute(), eos_token=eos_token)


def check_vocabulary(tokens_vocab: int, *, model_vocab: int) -> None:
    """Checks that a model has an embedding for every token.

    Args:
        tokens_vocab: `Tokens.vocab_size`.
        model_vocab: The model's vocabulary size; it may be larger.

    Raises:
        ConfigError: If the model's is smaller.
    """
    if tokens_vocab > model_vocab:
        raise ConfigError(
            f"vocabulary: the tokens need {tokens_vocab} ids, the model has {model_vocab}. "
            f"Write vocab_size = {tokens_vocab} or more in the model's config, or use other tokens"
        )


@contextlib.contextmanager
def library_errors(what: str, *, instead: str = "Write another tokenizer, or 'bytes'") -> Iterator[None]:
    """Turns any error of a tokenizer library within the block into a ConfigError in one line.

    Libraries raise bare Exception, and a panic in their Rust is a BaseException whose class nobody can import.

    Args:
        what: begins the message.
        instead: ends it: what to write.
    """
    try:
        yield
    except _NOT_OF_A_LIBRARY:
        raise
    except BaseException as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split()).rstrip('.')}. {instead}") from error


def without_surrogates(text: str) -> str:
    """The text with "?" for halves of characters, which JSON may hold and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


@contextlib.contextmanager
def _panics_unheard() -> Iterator[None]:
    """Hides output to stderr from the user if the block raises: Rust writes its panics there itself."""
    with tempfile.TemporaryFile() as heard:
        stderr = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield
        except BaseException:
            heard.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            heard.seek(0)
            while data := heard.read(1 << 16):
                os.write(2, data)


def _texts(pieces: Iterable[tuple[bytes, bool]]) -> Iterator[tuple[str, bool]]:
    """Decodes pieces and cuts them anew where a tokenizer would: see [Note: where a long document is cut]."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pending = ""
    for data, ends_document in pieces:
        pending += decoder.decode(data, final=ends_document)
        if ends_document:
            yield pending, True
            pending = ""
            decoder.reset()
        else:
            cut = _last_cut(pending)
            yield pending[:cut], False
            pending = pending[cut:]


def _last_cut(text: str) -> int:
    at = len(text)
    while (at := text.rfind("\n", 0, at)) > 0:
        if text[at - 1].isalnum():
            return at
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def _decoder_parts(description: dict[str, Any]) -> frozenset[str]:
    """The kinds of decoder of a tokenizer, a Replace of the metaspace sign counted as Metaspace."""
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type", "") for part in parts}
    if any(part.get("type") == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts):
        kinds.add("Metaspace")
    return frozenset(kinds)


def _declared_end(directory: Path) -> str | None:
    """The end-of-text token that the files beside a tokenizer name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            content = read_small(directory / name, most_bytes=_MOST_CONFIG_BYTES, what="a tokenizer's configuration")
            declared = json.loads(content).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # these files are optional, and only a hint
        token = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(token, str):
            return token
    return None

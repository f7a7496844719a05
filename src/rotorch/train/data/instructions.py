"""Prompts and responses: records of JSONL or Parquet as windows of tokens in which only responses are targets.

A record is `{"prompt": "...", "response": "..."}`, or, where the tokenizer has a chat template, also
`{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}`. With a template the
conversation is formatted by the template, and the text of an assistant's turn is the target; without a template
the prompt and the response follow each other unchanged, and the end-of-text token ends the response.

[Note: windows of examples] An example begins a window, and what is left of the window is filled up; with `pack` further
whole examples follow while they fit, as documents do in windows of text. An example longer than a window loses its
end. Ids that are no targets, filling included, carry `NOT_A_TARGET` in the token file; with `apart` the first id of
each example carries `BEGINS_DOCUMENT`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotorch.core.errors import ConfigError
from rotorch.core.small_files import read_small
from rotorch.train.data.corpus import Corpus, CorpusFile, Kind, read_json_lines, read_parquet_rows
from rotorch.train.data.tokens import Tokens, library_errors, without_surrogates
from rotorch.train.data.windows import BEGINS_DOCUMENT, NOT_A_TARGET

_MOST_CONFIG_BYTES = 1 << 24
_READ_BY_TRANSFORMERS = (
    *("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
)
_MOST_FIELDS_SHOWN = 12
_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

_log = logging.getLogger(__name__)

Segment = tuple[Sequence[int], bool]
"""Some ids, and whether they are targets."""


@dataclass(frozen=True, eq=False)
class Instructions:
    """Records of prompts and responses, and how they become windows.

    Attributes:
        corpus: the JSONL files.
        tokens: the tokenizer.
        prompt_field: the field of the prompt.
        response_field: the field of the response.
        sequence_length: targets in a window, at most.
        pack: True if several examples may share a window.
        apart: True if those that do are to be kept apart.
        chat: transformers' tokenizer of the same vocabulary, with its chat template; None without one.
    """

    corpus: Corpus
    tokens: Tokens
    prompt_field: str
    response_field: str
    sequence_length: int
    pack: bool
    apart: bool
    chat: Any

    def digest(self) -> str:
        """A digest of all that decides which windows the files become, but the files and the tokenizer."""
        template = None if self.chat is None else self.chat.chat_template
        parts = [self.prompt_field, self.response_field, self.sequence_length, self.pack, template]
        parts += ["apart"] if self.apart else []  # else as before there was a choice: token files of then are found
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_first(self) -> None:
        """Raises ConfigError if the first record is broken, or there is none."""
        for where, record in self.records():
            self._segments(self._messages(record, where=where), where=where)
            return
        raise ConfigError(f"corpus '{self.corpus.source}': empty: no record in {len(self.corpus.files)} files")

    def windows(self) -> Iterator[tuple[npt.NDArray[np.uint32], int, int]]:
        """Streams windows.

        Yields:
            (ids, num_examples, text_bytes): ids of shape [sequence_length + 1], examples in it and bytes of their text.

        Raises:
            ConfigError: if a record is broken; names file and line.
        """
        length = self.sequence_length + 1
        window: list[int] = []
        examples = text_bytes = num_cut = num_lost = 0
        first_lost = ""
        for where, record in self.records():
            ids: list[int] = []
            messages = self._messages(record, where=where)
            for part, is_target in self._segments(messages, where=where):
                ids += part if is_target else [token | NOT_A_TARGET for token in part]
            if len(ids) > length:
                num_cut += 1
                ids = ids[:length]
            if all(token >= NOT_A_TARGET for token in ids[1:]):
                num_lost += 1
                first_lost = first_lost or where
                continue
            ids[0] |= NOT_A_TARGET  # nothing before it predicts it, and the end of another example should not
            ids[0] |= BEGINS_DOCUMENT if self.apart else 0
            if window and (not self.pack or len(window) + len(ids) > length):
                yield self.filled(window, length), examples, text_bytes
                window, examples, text_bytes = [], 0, 0
            window += ids
            examples += 1
            text_bytes += sum(len(message["content"].encode("utf-8", errors="replace")) for message in messages)
        if window:
            yield self.filled(window, length), examples, text_bytes
        if num_cut:
            _log.warning("%s: %d examples are longer than a window and lose their end", self.corpus.source, num_cut)
        if num_lost:
            _log.warning(
                "%s: %d examples left out, whose prompts alone fill a window (the first: %s). Write a longer "
                "data.sequence_length to keep them",
                self.corpus.source,
                num_lost,
                first_lost,
            )

    def filled(self, ids: list[int], length: int) -> npt.NDArray[np.uint32]:
        """The ids, with some that are no targets behind them, as an array of `length`."""
        filling = (self.tokens.end_id or 0) | NOT_A_TARGET
        return np.array(ids + [filling] * (length - len(ids)), np.uint32)

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Streams (place, record) over all files; places are for messages."""
        for file in self.corpus.files:
            if file.kind == "parquet":
                yield from read_parquet_rows(file.path)
            else:
                yield from read_json_lines(file.path, example=f"{{{self._example}}}")

    @property
    def _example(self) -> str:
        return f'"{self.prompt_field}": "...", "{self.response_field}": "..."'

    def _segments(self, messages: list[dict[str, str]], *, where: str) -> list[Segment]:
        """The ids of a record's conversation, in order."""
        if self.chat is not None:
            return self._templated(messages, where=where)
        return self.without_template([message["content"] for message in messages], where=where)

    def without_template(self, texts: Sequence[str], *, where: str) -> list[Segment]:
        """The ids of a prompt and a response that follow each other unchanged."""
        end = [] if self.tokens.end_id is None else [self.tokens.end_id]
        try:
            prompt, response = (self.tokens.encode(text) for text in texts)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return [(prompt, False), ([*response, *end], True)]

    def _templated(self, messages: list[dict[str, str]], *, where: str) -> list[Segment]:
        segments: list[Segment] = []
        written = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:number], where=where, add_generation_prompt=True)
            after = self.render(messages[: number + 1], where=where)
            if not (before.startswith(written) and after.startswith(before)):
                raise ConfigError(
                    f"{where}: the tokenizer's chat template writes earlier turns otherwise once later ones follow, so "
                    "responses cannot be told from it. Write conversations of one turn"
                )
            prompt, response = before[len(written) :], after[len(before) :]
            segments += [(self.encode(prompt, where=where), False), (self.encode(response, where=where), True)]
            written = after
        return segments

    def render(self, messages: list[dict[str, str]], *, where: str, **options: Any) -> str:
        """A conversation as the chat template writes it; there is one."""
        with library_errors(f"{where}: the tokenizer's chat template refuses it", instead="Write what it takes"):
            return str(self.chat.apply_chat_template(messages, tokenize=False, **options))

    def encode(self, text: str, *, where: str) -> list[int]:
        """Ids of a piece of a conversation; here text that spells a special token is that token."""
        with library_errors(f"{where}: the tokenizer cannot tokenise it", instead="Write another data.tokenizer"):
            ids = [int(token) for token in self.chat(without_surrogates(text), add_special_tokens=False).input_ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.tokens.vocab_size:
            raise ConfigError(
                f"{where}: tokenizer '{self.tokens.name}': its tokenizer_config.json adds tokens with ids up to "
                f"{max(ids)}, and its tokenizer.json ends at {self.tokens.vocab_size - 1}. Write them into that, too"
            )
        return ids

    def _messages(self, record: dict[str, Any], *, where: str) -> list[dict[str, str]]:
        """A record as a conversation, checked."""
        if "messages" in record and self.prompt_field not in record:
            if self.chat is None:
                raise ConfigError(
                    f"{where}: 'messages' need a tokenizer with a chat template. Write '{self.prompt_field}' and "
                    f"'{self.response_field}', or another data.tokenizer"
                )
            return _conversation(record["messages"], where=where)
        for field in (self.prompt_field, self.response_field):
            if field not in record:
                raise ConfigError(
                    f"{where}: no field '{field}'; the fields are {fields_of(record)}. Write "
                    "data.prompt_field=... and data.response_field=... with those that hold the text"
                )
            if not isinstance(record[field], str):
                raise ConfigError(f"{where}: field '{field}' is of type {type(record[field]).__name__}, not a string")
        if not record[self.response_field]:
            raise ConfigError(f"{where}: field '{self.response_field}' is empty: there is nothing to learn from it")
        return [
            {"role": "user", "content": record[self.prompt_field]},
            {"role": "assistant", "content": record[self.response_field]},
        ]


def fields_of(record: dict[str, Any]) -> str:
    """The names of a record's fields, for messages."""
    shown = [" ".join(field.split()) for field in list(record)[:_MOST_FIELDS_SHOWN]]
    return ", ".join(shown) or "none"


def check_messages(messages: Sequence[Any], *, where: str, field: str = "") -> None:
    """Raises ConfigError unless each message of a conversation has a role and a content."""
    of_field = f" of '{field}'" if field else ""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ConfigError(
                f'{where}: message {number}{of_field} is no {{"role": "...", "content": "..."}} with both of them '
                "strings"
            )


def _conversation(messages: Any, *, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        raise ConfigError(f"{where}: 'messages' is of type {type(messages).__name__}, not a list")
    check_messages(messages, where=where)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: no message has the role 'assistant': there is nothing to learn from it")
    return messages


def find_records(source: str, *, fields: Sequence[str], kind: str = "instructions") -> Corpus:
    """Finds the JSONL and Parquet files of records: one, or those of a directory.

    Args:
        source: the file or the directory.
        fields: names of the fields that are read.
        kind: the run's `data.kind`, for messages.

    Raises:
        ConfigError: nothing there, or neither JSONL nor Parquet.
    """
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"corpus '{source}': no such file or directory")
    paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES) if path.is_dir() else [path]
    if not paths or any(p.suffix.lower() not in _SUFFIXES for p in paths):
        raise ConfigError(
            f"corpus '{source}': data.kind = '{kind}' reads .jsonl files, one record a line, and .parquet files. Write "
            "one, or a directory of them"
        )
    files = []
    for file in paths:
        status = file.stat()
        file_kind = _SUFFIXES[file.suffix.lower()]
        files.append(CorpusFile(file, file_kind, status.st_size, status.st_mtime_ns, status.st_size, 0))
    return Corpus(source=source, files=tuple(files), text_field=" ".join(fields))


def open_chat(tokenizer: str) -> Any:
    """Returns transformers' tokenizer of a directory if it has a chat template, else None."""
    directory = Path(tokenizer)
    directory = directory if directory.is_dir() else directory.parent
    if not (directory / "tokenizer.json").is_file() or not (directory / "tokenizer_config.json").is_file():
        return None
    for name in _READ_BY_TRANSFORMERS:
        with contextlib.suppress(FileNotFoundError):
            read_small(directory / name, most_bytes=_MOST_CONFIG_BYTES, what="a tokenizer's configuration")
    from transformers import AutoTokenizer

    with library_errors(f"tokenizer '{directory}': transformers cannot open it"):
        # Asked for nothing, it would ask whoever sits there whether to run code that the directory brings.
        chat = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    return chat if chat.chat_template else None

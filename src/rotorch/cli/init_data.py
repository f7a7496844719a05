"""Text of a run file that `rotorch init` writes: the kind of its records, found in the first of them, and its size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rotorch.core.errors import ConfigError
from rotorch.train.data.corpus import (
    STDLIB,
    Corpus,
    CorpusFile,
    RowPosition,
    find_corpus,
    read_json_lines,
    read_parquet_rows,
)
from rotorch.train.data.instructions import fields_of, find_records

Kind = Literal["text", "instructions", "preferences"]

_LOOKED_AT = 100  # records
_TEXT_FIELDS = ("text", "content", "document", "body")
_ANSWER_FIELDS = (("prompt", "response"), ("instruction", "output"), ("question", "answer"), ("prompt", "completion"))
_PAIR_FIELDS = ("chosen", "rejected")
_PROMPT_FIELDS = ("prompt", "instruction", "question")


@dataclass(frozen=True)
class _Records:
    """The first records of a text, and the bytes that one has in its file; of Parquet 0."""

    first: Sequence[Mapping[str, Any]] = ()
    mean_bytes: float = 0.0


@dataclass(frozen=True)
class InitData:
    """A text as a run file has it.

    Attributes:
        corpus: its files.
        lines: the lines of [data] that depend on it.
        prompt: for the sample at the end of a run.
        kind: the run's `data.kind`.
        num_pairs: preference pairs, about; 0 of other kinds.
        longest_bytes: the longest prompt with its response in the first records; 0 of text.
        least_prompt_bytes: the shortest prompt of them.
    """

    corpus: Corpus
    lines: tuple[str, ...]
    prompt: str
    kind: Kind = "text"
    num_pairs: int = 0
    longest_bytes: int = 0
    least_prompt_bytes: int = 0


def init_data(source: str, *, written: str) -> InitData:
    """Looks at the first records of a text.

    Args:
        source: a text, JSONL or Parquet file, a directory of them, or "stdlib".
        written: the source as the run file has it.

    Raises:
        ConfigError: nothing is there, a record is broken, or records have no text.
    """
    if source == STDLIB:
        return InitData(find_corpus(source), (f'source = "{STDLIB}"{" " * 15}# the sources of this Python',), "def ")
    if Path(source).suffix.lower() == ".json" and Path(source).expanduser().is_file():
        raise ConfigError(
            f"init: {source} is one JSON document, and would be learnt as it is written. Write its records as JSONL, "
            "one a line, or name it .txt"
        )
    line = f"source = {toml_string(written)}"
    records = _first_records(source)
    if not records.first:
        corpus = find_corpus(source)
        return InitData(corpus, (line,), _beginning(corpus))
    return _pairs(source, line, records) or _answers(source, line, records.first) or _texts(source, line, records.first)


def toml_string(text: str) -> str:
    """A text as a basic string of TOML, which has JSON's escapes but no surrogates, and escapes DEL."""
    return json.dumps(text.encode("utf-8", errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def _first_records(source: str) -> _Records:
    """The first records of a JSONL or Parquet file, or of the first one in a directory; none of text."""
    path = Path(source).expanduser()
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    for file in files:
        position = RowPosition()
        if file.suffix.lower() in (".jsonl", ".ndjson"):
            found = read_json_lines(file, example='{"text": "..."}', position=position)
        elif file.suffix.lower() == ".parquet":
            found = read_parquet_rows(file)
        else:
            continue
        records = [record for _, record in itertools.islice(found, _LOOKED_AT)]
        return _Records(records, position.byte / max(1, len(records)))
    return _Records()


def _pairs(source: str, line: str, records: _Records) -> InitData | None:
    first = records.first[0]
    if not all(isinstance(first.get(name), str | list) for name in _PAIR_FIELDS):
        return None
    prompt = next((name for name in _PROMPT_FIELDS if isinstance(first.get(name), str | list)), "")
    lines = [line, 'kind = "preferences"    # pairs, learnt by DPO: a chosen response beside a rejected one']
    lines += [f"prompt_field = {toml_string(prompt)}"] if prompt not in ("", "prompt") else []
    corpus = find_records(source, fields=(prompt or "prompt", *_PAIR_FIELDS), kind="preferences")
    sizes = [[_num_bytes(record.get(name)) for name in (prompt, *_PAIR_FIELDS)] for record in records.first]
    return InitData(
        corpus,
        tuple(lines),
        _said(first[prompt] if prompt else first["chosen"]),
        kind="preferences",
        num_pairs=sum(_num_records(file, mean_bytes=records.mean_bytes) for file in corpus.files),
        longest_bytes=max(before + max(responses) for before, *responses in sizes),
        least_prompt_bytes=min(before for before, *_ in sizes),
    )


def _num_records(file: CorpusFile, *, mean_bytes: float) -> int:
    """Records of a file: those of Parquet as it says, those of JSONL by the mean length of a few."""
    if file.kind == "parquet":
        import pyarrow.parquet  # type: ignore[import-untyped]  # here: slow to import

        with pyarrow.parquet.ParquetFile(file.path) as opened:
            return int(opened.metadata.num_rows)
    return max(1, round(file.size_bytes / mean_bytes)) if mean_bytes else 1


def _answers(source: str, line: str, records: Sequence[Mapping[str, Any]]) -> InitData | None:
    first, lines = records[0], (line, 'kind = "instructions"    # only responses are learnt')
    for prompt, response in _ANSWER_FIELDS:
        if isinstance(first.get(prompt), str) and isinstance(first.get(response), str):
            fields = (prompt, response)
            lines += (f"prompt_field = {toml_string(prompt)}", f"response_field = {toml_string(response)}")
            sizes = [(_num_bytes(record.get(prompt)), _num_bytes(record.get(response))) for record in records]
            said = first[prompt]
            break
    else:
        if not isinstance(first.get("messages"), list):
            return None
        fields, said = ("prompt", "response"), _said(first["messages"])
        talks = [record.get("messages") or [] for record in records]
        sizes = [(_num_bytes(talk[:1]), _num_bytes(talk[1:])) for talk in talks]
    return InitData(
        find_records(source, fields=fields),
        lines,
        said,
        kind="instructions",
        longest_bytes=max(map(sum, sizes)),
        least_prompt_bytes=min(before for before, _ in sizes),
    )


def _texts(source: str, line: str, records: Sequence[Mapping[str, Any]]) -> InitData:
    names = [name for name in records[0] if isinstance(records[0][name], str)]
    if not names:
        raise ConfigError(
            f"init: records of {source} have no field of text; the fields are {fields_of(dict(records[0]))}. Write "
            "records with a text, with a prompt and a response, or with a chosen and a rejected response"
        )
    lengths = {name: sum(_num_bytes(record.get(name)) for record in records) for name in names}
    field = next((name for name in _TEXT_FIELDS if name in names), max(lengths, key=lambda name: lengths[name]))
    known = (
        "" if field in _TEXT_FIELDS or len(names) == 1 else f"    # the longest of: {fields_of(dict.fromkeys(names))}"
    )
    corpus = find_corpus(source, text_field=field)
    return InitData(corpus, (line, f"text_field = {toml_string(field)}{known}"), _beginning(corpus))


def _num_bytes(text: Any) -> int:
    """Bytes of a text, or of the messages of a conversation."""
    if isinstance(text, list):
        return sum(_num_bytes(message.get("content")) for message in text if isinstance(message, dict))
    return len(text.encode("utf-8", errors="replace")) if isinstance(text, str) else 0


def _said(text: Any) -> str:
    """A prompt, or what its first user says, to begin a sample with."""
    if isinstance(text, list):
        said = [m.get("content") for m in text if isinstance(m, dict) and m.get("role") == "user"]
        text = said[0] if said else ""
    return text if isinstance(text, str) and text.strip() else "Hello"


def _beginning(corpus: Corpus) -> str:
    """The first words of a text, for the sample at the end of a run."""
    first, _ = next(iter(corpus.pieces()), (b"", False))
    return " ".join(first[:200].decode("utf-8", errors="ignore").split()[:3]) or "The"

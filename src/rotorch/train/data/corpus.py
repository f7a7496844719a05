"""Source of text: files on disk, found, checked and read as a stream of documents.

A corpus is a sorted list of files and the way to read each. Reading yields *pieces*: at most `PIECE_BYTES` of one
document's bytes and whether the document ends there, so that a 100 GB file takes no more memory than a small one.

[Note: JSONL is read line by line] Readers of libraries parse blocks of many lines at once and, for a broken line, name
neither the file nor the line. One `json.loads` a line names both, accepts records whose other fields differ in type,
and costs far less than the tokenising that follows. Parquet is read by `pyarrow`, row group by row group and without
threads: they would be there when ranks are forked, and when a process ends that has not read to the end (with a stream
of `datasets` it then hangs).
"""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rotorch.core.errors import ConfigError, beginning_of, nearest
from rotorch.core.quantities import format_bytes

Kind = Literal["text", "jsonl", "parquet"]
"""How a file is read."""

STDLIB = "stdlib"
PIECE_BYTES = 1 << 20

_SNIFF_BYTES = 8192
_MOST_LINE_BYTES = 1 << 28
_BATCH_ROWS = 64
_KIND_OF_SUFFIX: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Tests are left out because many distributions package them separately: with them, the same interpreter version
# would be a different corpus from one machine to the next.
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus.

    Attributes:
        path: Where it is.
        kind: How it is read.
        size_bytes: Its size on disk when it was found.
        mtime_ns: When it was last changed, in nanoseconds since the epoch.
        text_bytes: Bytes of text it holds: exact for text, an upper bound for JSONL, close for Parquet.
        num_documents: Documents it holds if that is known without reading it, else 0.
    """

    path: Path
    kind: Kind
    size_bytes: int
    mtime_ns: int
    text_bytes: int
    num_documents: int


@dataclass
class RowPosition:
    """Position in a file of records; reading moves it behind each record.

    Attributes:
        row: records before it; in JSONL lines, also blank ones.
        byte: the byte of a JSONL file that the next line begins with.
    """

    row: int = 0
    byte: int = 0


@dataclass(frozen=True)
class Corpus:
    """Files that together are the text to train on, in the order in which they are read.

    Attributes:
        source: What the user wrote.
        files: The files, sorted by path.
        text_field: The field of JSONL and Parquet records that holds the text.
    """

    source: str
    files: tuple[CorpusFile, ...]
    text_field: str

    @property
    def text_bytes(self) -> int:
        """Bytes of text: exact if all files are text files, else an estimate."""
        return sum(file.text_bytes for file in self.files)

    @property
    def is_exact(self) -> bool:
        """True if `text_bytes` is exact, that is, if all files are text files."""
        return all(file.kind == "text" for file in self.files)

    def digest(self) -> str:
        """A digest of which files these are and of their sizes and times on disk *now*.

        Raises:
            ConfigError: If a file has gone.
        """
        digest = hashlib.sha256(self.text_field.encode())
        for file in self.files:
            status = _stat(file.path)
            # The time of change, too: tools that copy give a file any other time, and so another text of the same size
            # would have the old one's tokens. A copy on each host has its own, and in a cache that hosts share its own
            # tokens: that is space and a first run's time, and ranks compare the tokens themselves.
            times = status.st_mtime_ns, status.st_ctime_ns
            digest.update(json.dumps([str(file.path), file.kind, status.st_size, *times]).encode())
        return digest.hexdigest()

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Streams the documents, in order.

        Yields:
            (data, ends_document): at most about `PIECE_BYTES` of a text file, or the whole text of one record, as
            raw bytes (UTF-8 for records). Documents without a byte are left out; a log line says how many.

        Raises:
            ConfigError: If a file cannot be read or a record is broken.
        """
        num_empty = 0
        for number in range(len(self.files)):
            for data, ends_document in self.pieces_of(number):
                if data:
                    yield data, ends_document
                else:
                    num_empty += 1
        if num_empty:
            _log.info("corpus %s: %d empty documents left out", self.source, num_empty)

    def pieces_of(self, number: int, *, position: RowPosition | None = None) -> Iterator[tuple[bytes, bool]]:
        """Streams the documents of one file, also empty ones.

        Args:
            number: Of the file.
            position: Where to begin, in JSONL and Parquet; it moves along.

        Raises:
            ConfigError: If the file cannot be read, a record is broken, or with `position` if the file has changed.
        """
        file = self.files[number]
        if file.kind == "text":
            yield from _read_text(file.path)
            return
        if position is not None:
            status = _stat(file.path)
            if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise ConfigError(f"corpus file '{file.path}': changed while it was read. Run again")
        read = _read_jsonl if file.kind == "jsonl" else _read_parquet
        yield from read(file.path, text_field=self.text_field, position=position)


def find_corpus(
    source: str | os.PathLike[str], *, text_field: str = "text", suffixes: Sequence[str] | None = None
) -> Corpus:
    """Finds the files of a corpus and checks what can be checked without reading them through.

    Args:
        source: A text, `.jsonl`/`.ndjson` or `.parquet` file; a directory of them, read recursively; or `"stdlib"`,
            the sources of the running interpreter's standard library (write `"./stdlib"` for a directory of that name).
        text_field: The field that holds the text of JSONL and Parquet records.
        suffixes: File name endings (`".txt"`) or patterns (`"*.txt"`) that say which files of a directory to read.
            Without them: its JSONL and Parquet files if it has any, else every file that reads as UTF-8 text. Hidden
            files and directories are never read.

    Returns:
        The corpus, files sorted by path.

    Raises:
        ConfigError: If nothing is there, nothing matches, all is empty, a file cannot be read, the first record of a
            JSONL file is broken, or the text field is missing.
    """
    name = os.fspath(source)
    if not name:
        raise ConfigError("corpus '': no path given. Write a file, a directory, or 'stdlib'")
    if name == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, left_out=_STDLIB_LEFT_OUT) if path.suffix == ".py"]
        if not paths:
            raise ConfigError(
                f"corpus 'stdlib': no *.py in {root}: this interpreter comes without its sources. "
                "Write the path of a text file or directory instead"
            )
        files = [_text_file(path) for path in paths]
    else:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise ConfigError(f"corpus '{name}': no such file or directory{_nearest_sibling(path)}")
        paths = _choose(path, name=name, suffixes=suffixes) if path.is_dir() else [path]
        files = [_check_file(path, text_field=text_field) for path in paths]
    if not any(file.text_bytes for file in files):
        raise ConfigError(f"corpus '{name}': empty: {len(files)} files without a byte of text")
    return Corpus(source=name, files=tuple(files), text_field=text_field)


def _walk(root: Path, *, left_out: frozenset[str] = frozenset()) -> list[Path]:
    """All regular files under `root` that are not hidden, sorted by path."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"corpus '{root}': cannot list '{error.filename}': {error.strerror}")

    found = []
    for directory, subdirectories, names in os.walk(root, onerror=refuse):
        subdirectories[:] = [name for name in subdirectories if name not in left_out and not name.startswith(".")]
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _choose(root: Path, *, name: str, suffixes: Sequence[str] | None) -> list[Path]:
    """The files of a directory that make up the corpus."""
    found = _walk(root)
    if not found:
        raise ConfigError(f"corpus '{name}': the directory holds no files")
    if suffixes is not None:
        patterns = [suffix if any(mark in suffix for mark in "*?[") else f"*{suffix}" for suffix in suffixes]
        chosen = [path for path in found if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)]
        if not chosen:
            there = Counter(path.suffix or "no suffix" for path in found).most_common(4)
            held = ", ".join(f"{suffix} ({count})" for suffix, count in there)
            raise ConfigError(f"corpus '{name}': no file matches suffixes {patterns}; the directory holds {held}")
        return chosen
    chosen = [path for path in found if _kind(path) != "text"] or [path for path in found if _is_text(path)]
    if not chosen:
        raise ConfigError(
            f"corpus '{name}': none of its {len(found)} files is UTF-8 text, JSONL or Parquet. "
            "Write suffixes=[...] to read them all the same"
        )
    if len(chosen) < len(found):
        left_out = next(path for path in found if path not in set(chosen))
        _log.info(
            "corpus %s: %d of %d files read; left out, as %s: %s",
            name,
            len(chosen),
            len(found),
            "not UTF-8 text" if _kind(chosen[0]) == "text" else "neither JSONL nor Parquet",
            left_out.name,
        )
    return chosen


def _kind(path: Path) -> Kind:
    return _KIND_OF_SUFFIX.get(path.suffix.lower(), "text")


def _is_text(path: Path) -> bool:
    """True if the file starts like UTF-8 text."""
    try:
        with path.open("rb") as stream:
            start = stream.read(_SNIFF_BYTES)
        codecs.getincrementaldecoder("utf-8")().decode(start)  # not final: the last character may be cut in two
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise ConfigError(f"corpus file '{path}': cannot read: {error.strerror}") from error
    return b"\0" not in start


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"corpus file '{path}': cannot read: {error.strerror}") from error


def _text_file(path: Path) -> CorpusFile:
    status = _stat(path)
    return CorpusFile(path, "text", status.st_size, status.st_mtime_ns, status.st_size, int(status.st_size > 0))


def _check_file(path: Path, *, text_field: str) -> CorpusFile:
    """Checks one file as far as its first record, and measures it."""
    kind, status = _kind(path), _stat(path)
    if not os.access(path, os.R_OK) or not path.is_file():
        raise ConfigError(f"corpus file '{path}': cannot read: not a regular file, or no permission")
    if kind == "text":
        return _text_file(path)
    if kind == "jsonl":
        next(_read_jsonl(path, text_field=text_field), None)
        return CorpusFile(path, kind, status.st_size, status.st_mtime_ns, status.st_size, 0)
    text_bytes, num_rows = _measure_parquet(path, text_field=text_field)
    return CorpusFile(path, kind, status.st_size, status.st_mtime_ns, text_bytes, num_rows)


def _read_text(path: Path) -> Iterator[tuple[bytes, bool]]:
    try:
        with path.open("rb") as stream:
            data = stream.read(PIECE_BYTES)
            while True:
                following = stream.read(PIECE_BYTES)
                yield data, not following
                if not following:
                    return
                data = following
    except OSError as error:
        raise ConfigError(f"corpus file '{path}': cannot read: {error.strerror}") from error


def _read_jsonl(path: Path, *, text_field: str, position: RowPosition | None = None) -> Iterator[tuple[bytes, bool]]:
    for where, record in read_json_lines(path, example=f'{{"{text_field}": "..."}}', position=position):
        if text_field not in record:
            raise ConfigError(f"{where}: {_no_field(text_field, fields=record)}")
        yield _text_of(record[text_field], text_field=text_field, where=where), True


def read_json_lines(
    path: Path, *, example: str, position: RowPosition | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Streams the records of a JSONL file, blank lines left out.

    Args:
        path: the file.
        example: example of a record, for messages.
        position: where to begin; it moves along.

    Yields:
        (where, record): the file and line for messages, and the object.

    Raises:
        ConfigError: if the file cannot be read, or a line is no JSON object; names file and line.
    """
    try:
        position = RowPosition() if position is None else position
        with path.open("rb") as stream:
            stream.seek(position.byte)
            for line in iter(lambda: stream.readline(_MOST_LINE_BYTES + 1), b""):
                position.row, position.byte = position.row + 1, position.byte + len(line)
                number = position.row
                if len(line) > _MOST_LINE_BYTES:
                    raise ConfigError(
                        f"corpus file '{path}', line {number}: longer than {format_bytes(_MOST_LINE_BYTES)}. "
                        "Write one record a line"
                    )
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                where = f"corpus file '{path}', line {number}"
                try:
                    record = json.loads(line.decode("utf-8", errors="replace").rstrip())
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
                except (ValueError, RecursionError) as error:  # a number too long, or nested too deep
                    raise ConfigError(f"{where}: not valid JSON: {beginning_of(error)}") from error
                if not isinstance(record, dict):
                    raise ConfigError(
                        f"{where}: of type {type(record).__name__}; every line must be an object such as {example}"
                    )
                yield where, record
    except OSError as error:
        raise ConfigError(f"corpus file '{path}': cannot read: {error.strerror}") from error


def _measure_parquet(path: Path, *, text_field: str) -> tuple[int, int]:
    """Checks the schema; returns the uncompressed bytes of the text column and the number of rows."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # here: slow to import

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (ValueError, OSError) as error:
        raise ConfigError(f"corpus file '{path}': not a readable Parquet file: {beginning_of(error)}") from error
    if text_field not in schema.names:
        raise ConfigError(f"corpus file '{path}': {_no_field(text_field, fields=schema.names)}")
    if str(schema.field(text_field).type) not in {"string", "large_string", "string_view"}:
        raise ConfigError(
            f"corpus file '{path}': field '{text_field}' is of type {schema.field(text_field).type}, not a string"
        )
    text_bytes = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        columns = (row_group.column(column) for column in range(row_group.num_columns))
        text_bytes += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
    return text_bytes if metadata.num_rows else 0, metadata.num_rows


def _read_parquet(path: Path, *, text_field: str, position: RowPosition | None = None) -> Iterator[tuple[bytes, bool]]:
    for where, row in read_parquet_rows(path, columns=[text_field], position=position):
        yield _text_of(row.get(text_field), text_field=text_field, where=where), True


def read_parquet_rows(
    path: Path, *, columns: list[str] | None = None, position: RowPosition | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Streams the rows of a Parquet file, without fields that are null.

    Args:
        path: the file.
        columns: fields to read; by default all.
        position: where to begin; it moves along.

    Yields:
        (where, row): the file and row for messages, and the row's fields.

    Raises:
        ConfigError: if it is no Parquet file.
    """
    import pyarrow.parquet  # type: ignore[import-untyped]  # here: slow to import

    position = RowPosition() if position is None else position
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            first = 0
            for group in range(file.metadata.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                first += num_rows
                if first <= position.row:
                    continue
                batches = file.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
                )
                skip = position.row - (first - num_rows)
                for batch in batches:
                    skipped = min(skip, len(batch))
                    skip -= skipped
                    for row in batch.slice(skipped).to_pylist():
                        position.row += 1
                        found = {name: value for name, value in row.items() if value is not None}
                        yield f"corpus file '{path}', row {position.row}", found
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"corpus file '{path}': not a readable Parquet file: {beginning_of(error)}") from error


def _text_of(value: object, *, text_field: str, where: str) -> bytes:
    if value is None:
        return b""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: field '{text_field}' is of type {type(value).__name__}, not a string")
    return value.encode("utf-8", errors="replace")  # JSON may hold lone surrogates, which UTF-8 cannot


def _no_field(text_field: str, *, fields: Iterable[str]) -> str:
    names = [str(name) for name in fields]
    return (
        f"no field '{text_field}'{nearest(text_field, known=names)}; the fields are "
        f"{', '.join(names[:12]) or 'none'}. Write text_field=... with the one that holds the text"
    )


def _nearest_sibling(path: Path) -> str:
    try:
        return nearest(path.name, known=[sibling.name for sibling in path.parent.iterdir()])
    except OSError:
        return ""

"""The cache: a corpus tokenised once, in one memory-mapped file that every rank opens.

    0                 4096
    | header          | ids: num_tokens of uint16 or uint32, little-endian
    | line 1: JSON    |
    | line 2: its crc |

The ids are written first and the header last, to a `.partial` file that is renamed when all of it is on disk: a file
under its final name is whole. Should it be damaged later, its length and its checksums tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rotorch.core.errors import ConfigError
from rotorch.train.checkpoint.directories import fsync

FORMAT_VERSION = 1
HEADER_BYTES = 4096

_READ_BYTES = 1 << 24

_log = logging.getLogger(__name__)


class DamagedTokenFile(ConfigError):
    """A token file that is not there, or not what was once written."""


@dataclass(frozen=True)
class TokenHeader:
    """Header of a token file.

    Attributes:
        source: The corpus, as the user wrote it.
        tokens: The tokenizer, as the user wrote it.
        tokens_digest: `Tokens.digest`.
        vocab_size: One more than the largest id that may occur.
        end_id: The id after every document, or None.
        dtype: `"uint16"` or `"uint32"`.
        num_tokens: How many ids follow.
        num_documents: Documents in the corpus, empty ones not counted.
        text_bytes: Bytes of text that were tokenised.
        crc32: Checksum of the ids.
        version: `FORMAT_VERSION`.
    """

    source: str
    tokens: str
    tokens_digest: str
    vocab_size: int
    end_id: int | None
    dtype: str
    num_tokens: int
    num_documents: int
    text_bytes: int
    crc32: int
    version: int = FORMAT_VERSION

    def to_bytes(self) -> bytes:
        """The first `HEADER_BYTES` of the file."""
        body = dataclasses.asdict(self)
        # The names are for people who look into the file; cut, they cannot outgrow the header.
        body["source"], body["tokens"] = self.source[-250:], self.tokens[-250:]
        line = json.dumps(body, ensure_ascii=False).encode("utf-8", errors="replace")
        return (line + b"\n%08x\n" % zlib.crc32(line)).ljust(HEADER_BYTES, b" ")

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenHeader:
        """Reads what `to_bytes` wrote; raises ValueError if it is anything else."""
        line, crc, _ = data.split(b"\n", 2)
        if int(crc, 16) != zlib.crc32(line):
            raise ValueError("header checksum differs")
        body = json.loads(line)
        if body["version"] != FORMAT_VERSION:
            raise ValueError(f"format version {body['version']}, expected {FORMAT_VERSION}")
        header = cls(**body)
        if header.dtype not in ("uint16", "uint32"):
            raise ValueError(f"ids of type {header.dtype!r}")
        for name in ("vocab_size", "num_tokens", "num_documents", "text_bytes", "crc32"):
            if type(body[name]) is not int or body[name] < 0:
                raise ValueError(f"{name} is {body[name]!r}")
        return header


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A tokenised corpus, mapped into memory and read-only.

    Attributes:
        path: Where it is.
        header: What it says about itself.
        ids: All token ids, shape [num_tokens], uint16 or uint32; pages are read when they are touched.
    """

    path: Path
    header: TokenHeader
    ids: npt.NDArray[Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = False) -> TokenFile:
        """Opens a token file. Any rank may call it, alone.

        Args:
            path: The file that `prepare_corpus` made.
            verify: Also read all of it and check the ids' checksum (about a second per gigabyte).

        Raises:
            DamagedTokenFile: If it is missing, truncated, changed, or no token file.
        """
        path = Path(path)
        try:
            with path.open("rb") as stream:
                header = TokenHeader.from_bytes(stream.read(HEADER_BYTES))
                dtype = np.dtype(header.dtype).newbyteorder("<")
                size_bytes = os.fstat(stream.fileno()).st_size
                expected_bytes = HEADER_BYTES + header.num_tokens * dtype.itemsize
                if size_bytes != expected_bytes:
                    raise ValueError(f"{size_bytes} bytes, expected {expected_bytes}")
                if verify and _checksum(iter(lambda: stream.read(_READ_BYTES), b"")) != header.crc32:
                    raise ValueError("the ids' checksum differs")
        except FileNotFoundError as error:
            raise DamagedTokenFile(f"token file '{path}': no such file. Prepare the corpus first") from error
        except OSError as error:
            raise DamagedTokenFile(f"token file '{path}': cannot read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedTokenFile(
                f"token file '{path}': damaged ({error}). Prepare the corpus again to rebuild it"
            ) from error
        ids = np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(header.num_tokens,))
        return cls(path=path, header=header, ids=ids)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the ids, independent of the file's path: checkpoints keep it to recognise their corpus."""
        return f"{self.header.num_tokens}-{self.header.crc32:08x}"


def write_token_file(
    path: Path, *, arrays: Iterable[npt.NDArray[Any]], header: Callable[[int, int], TokenHeader]
) -> None:
    """Writes a token file so that at every moment `path` is either absent, the old file, or the whole new one.

    The caller holds `building(path)`. If anything is raised, by `arrays` and `header` too, nothing is left behind.

    Args:
        path: The file to make.
        arrays: The ids, in order, all of the dtype that the header will name.
        header: Called with (num_tokens, crc32) when all ids are written.

    Raises:
        ConfigError: If there is no room left, or the directory cannot be written.
    """
    partial = path.with_suffix(".partial")
    num_tokens = crc = 0
    try:
        with partial.open("wb") as stream:
            stream.seek(HEADER_BYTES)
            for array in arrays:
                data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
                crc = zlib.crc32(data, crc)
                num_tokens += len(array)
                stream.write(data)
            stream.seek(0)
            stream.write(header(num_tokens, crc).to_bytes())
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        fsync(path.parent)  # the new name lasts through a power cut
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"token cache '{path.parent}': no room left on the disk after {num_tokens} tokens. "
                "Free some, or write cache_dir=... on another disk"
            ) from error
        if isinstance(error, OSError):
            raise ConfigError(f"token cache '{path.parent}': cannot write: {error.strerror}") from error
        raise


@contextlib.contextmanager
def building(path: Path) -> Iterator[None]:
    """Holds the right to build `path`: one process of this machine at a time, the others wait.

    The lock is the kernel's, so a process that is killed gives it up. The empty lock file stays: removing it would let
    two processes hold locks on two files of the same name.

    Raises:
        ConfigError: If the directory cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise ConfigError(
            f"token cache '{path.parent}': cannot write: {error.strerror}. "
            "Write cache_dir=... with a directory that can be written"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("token cache %s: another process is building it; waiting", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _checksum(blocks: Iterable[bytes]) -> int:
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc

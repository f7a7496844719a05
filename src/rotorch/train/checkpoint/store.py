"""AnyPath of checkpoints: a directory, or a URL of a store that fsspec knows, such as `s3://bucket/my_run`. No torch.

[Note: a store]
    A `StorePath` has the part of pathlib's interface that reading a checkpoint needs, so readers need not know which of
    both they have. Writers must (`commit.py`): a store has no renaming of directories and no fsync, and a file appears
    in it when it is closed. The store's own library finds endpoint and credentials as usual: from the environment, its
    configuration files, or fsspec's (`~/.config/fsspec`).

[Note: made anew]
    Stores keep connections and threads, which forked ranks must not share, and cache listings, which other processes
    change. So a `StorePath` holds its URL only; fsspec keeps one file system per process, and its cache of listings is
    cleared before each use.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from rotorch.core.errors import ConfigError, RotorchError, nearest

_SCHEME = re.compile(r"([^/]+)://")
_LOCAL = ("file", "local")


@dataclass(frozen=True)
class Size:
    """Part of `os.stat_result` that stores know."""

    st_size: int


@dataclass(frozen=True, order=True)
class StorePath:
    """A file or directory of a store, by its URL (see [Note: a store])."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        raise TypeError(f"{self.url} lies in a store, not on a disk")

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """Directory of this path."""
        return StorePath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """True if there is a file of this name, or files below it."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """True if there are files below this path."""
        found = self._info()
        return found is not None and found["type"] == "directory"

    def _info(self) -> dict[str, Any] | None:
        """Returns the store's entry for this path, or None if it is not there.

        Not `store.exists` or `store.isdir`, which take any failure for absence (a timeout, a refusal): what is thought
        to have no manifest is removed.
        """
        with self._asked() as (store, path), suppress(FileNotFoundError):
            return dict(store.info(path))
        return None

    def stat(self) -> Size:
        """Its size. Raises `FileNotFoundError` if it is missing."""
        with self._asked() as (store, path):
            return Size(int(store.info(path)["size"]))

    def read_bytes(self) -> bytes:
        """Its contents."""
        with self._asked() as (store, path):
            return bytes(store.cat_file(path))

    def open(self, mode: str) -> BufferedReader:
        """Opens it to be read (`"rb"`); `creating` writes."""
        assert mode == "rb", "stores are written by creating()"
        with self._asked() as (store, path):
            opened: BufferedReader = store.open(path, "rb")
            return opened

    def iterdir(self) -> Iterator[StorePath]:
        """Yields the entries of the directory; nothing if there is no such directory."""
        with self._asked() as (store, path), suppress(FileNotFoundError):
            for found in store.ls(path, detail=False):
                if found.rstrip("/") != path.rstrip("/"):  # some list the directory itself
                    yield self / found.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> list[StorePath]:
        """Returns the entries of the directory whose names match `pattern`."""
        return [path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]

    def unlink(self) -> None:
        """Removes the file, if it is there."""
        with self._asked() as (store, path), suppress(FileNotFoundError):
            store.rm_file(path)

    def remove_below(self) -> None:
        """Removes all files below it."""
        with self._asked() as (store, path), suppress(FileNotFoundError):
            store.rm(path, recursive=True)

    @contextmanager
    def _asked(self) -> Iterator[tuple[Any, str]]:
        """The store and the path in it; any error of a store's library becomes an `OSError` that names the URL."""
        from fsspec.core import url_to_fs

        with _as_os_error(self.url):
            store, path = url_to_fs(self.url)
            store.invalidate_cache()
            yield store, path


AnyPath: TypeAlias = Path | StorePath


def as_path(where: Path | StorePath | str) -> AnyPath:
    """A directory or URL to be read and written; `file://` is a directory like any other.

    Raises:
        ConfigError: for a URL of a store that is not known, or whose package is not installed, or with a password; for
            a `file://` without a whole path.
    """
    if isinstance(where, StorePath | Path):
        return where
    match = _SCHEME.match(where)
    if match is None:
        return Path(where)
    if match[1].lower() in _LOCAL:
        return _local_path(where, rest=where[match.end() :])
    check_no_password(where)
    _check_scheme(where, scheme=match[1].lower())
    return StorePath(where.rstrip("/"))


def _local_path(url: str, *, rest: str) -> Path:
    """Returns the path of a file URL. Text before the first slash is a host: `file://runs/x` names no local path."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or not path:
        raise ConfigError(
            f"{url}: a file URL has three slashes and a path from the root. Write the directory itself, or "
            "file:///path/from/the/root"
        )
    return Path(f"/{path}")


def is_url(text: str) -> bool:
    """True if a text names a place by a URL."""
    return _SCHEME.match(text) is not None


def check_no_password(url: str) -> None:
    """Refuses a URL with a password: the place of checkpoints is shown, and written into each of them.

    Raises:
        ConfigError: if there is a password in it, which is not repeated.
    """
    match = _SCHEME.match(url)
    who, at, host = url[match.end() :].partition("/")[0].rpartition("@") if match else ("", "", "")
    user, colon, _ = who.partition(":")
    if match and colon:
        raise ConfigError(
            f"{match[0]}{user}:...{at}{host}: a password in a URL would be written into checkpoints and messages. "
            "Leave it out: give it by the environment, the store's own configuration, or fsspec's (~/.config/fsspec)"
        )


def _check_scheme(url: str, *, scheme: str) -> None:
    from fsspec import available_protocols, get_filesystem_class

    if "::" in url:
        raise ConfigError(f"{url}: URLs in URLs cannot be written to. Write one, like s3://bucket/my_run")
    try:
        get_filesystem_class(scheme)
    except ValueError:
        raise ConfigError(
            f"{url}: no store is called {scheme!r}{nearest(scheme, known=available_protocols())}. "
            "Write a directory, or a URL like s3://bucket/my_run"
        ) from None
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        how = f"Write: pip install {package}" if package else f"fsspec says: {error}"
        raise ConfigError(f"{url}: the package for {scheme}:// is not installed. {how}") from None


_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    **dict.fromkeys(("oci",), "ocifs"),
    **dict.fromkeys(("hf",), "huggingface_hub"),
}
"""What to install for the usual stores; fsspec itself knows more."""


def check_writable(place: StorePath) -> None:
    """Writes a small file into a store and removes it.

    Raises:
        ConfigError: if that cannot be done, with what the store says.
    """
    probe = place / f".written-to-see-whether-one-can-{secrets.token_hex(4)}"
    try:
        with creating(probe) as stream:
            stream.write(b"rotorch")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{place}: cannot be written: {error.strerror or error}. Write a place that can be, or see to the store's "
            "credentials"
        ) from error  # it may pass: see who starts runs again


@contextmanager
def creating(place: AnyPath) -> Iterator[BinaryIO]:
    """A new file to write to; when the block ends it is on the disk, or in the store, whole.

    Raises:
        OSError: if it cannot be made or written. In a store nothing has appeared then.
    """
    if isinstance(place, Path):
        with place.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        return
    with place._asked() as (store, path):
        try:
            stream = store.open(path, "wb")
        except FileNotFoundError:  # a store that has directories; where there are none, nothing is missing yet
            store.makedirs(path.rpartition("/")[0], exist_ok=True)
            stream = store.open(path, "wb")
    try:
        yield cast("BinaryIO", _Written(stream, place.url))
    except BaseException:  # the writer's own errors stay what they are: one may be that memory has run out
        _give_up(stream)
        raise
    with _as_os_error(place.url):
        stream.close()


class _Written:
    """A file of a store as its writer sees it."""

    def __init__(self, stream: Any, url: str) -> None:
        self._stream = stream
        self._url = url

    def write(self, data: bytes | memoryview) -> None:
        with _as_os_error(self._url):
            self._stream.write(data)


def _give_up(stream: Any) -> None:
    """Lets go of a file that is half written; closing it would make it appear."""
    with suppress(Exception):  # the error that led here is told
        stream.discard()
    try:
        stream.closed = True
    except AttributeError:  # writes as it goes: what is there is in no manifest
        with suppress(Exception):
            stream.close()


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # many are raised with a text alone
            kind = type(error)
            raise kind(_NUMBERS.get(kind, errno.EIO), str(error), url) from error
        raise
    except (RotorchError, MemoryError):
        raise
    except NotImplementedError as error:
        raise OSError(errno.EROFS, "the store is read-only", url) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


_NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}

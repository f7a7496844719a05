"""Reading of files that are small by their nature: whole, but never more than a limit. Refusal of what is no file."""

from __future__ import annotations

import stat
from typing import IO, Any, Protocol

from rotorch.core.errors import ConfigError
from rotorch.core.quantities import format_bytes


class Readable(Protocol):
    """A path, on a disk or in a store."""

    def open(self, mode: str, /) -> IO[bytes]:
        """Opens it to be read (`"rb"`)."""

    def stat(self) -> Any:
        """Has `st_size`, its bytes."""


def read_small(path: Readable, *, most_bytes: int, what: str) -> bytes:
    """Reads a file that should be a few kilobytes long.

    Takes no more memory than `most_bytes`, even if the file has gigabytes, or grows. Does not open a pipe, which would
    wait for its writer, nor a device, which may have no end.

    Args:
        path: the file.
        most_bytes: a longer file is refused.
        what: the kind of file, for the message: "a run's TOML file".

    Raises:
        ConfigError: if it is longer, or no file. OSError: if it cannot be read.
    """
    num_bytes = int(check_is_file(path, what=what).st_size)
    data = b""
    if num_bytes <= most_bytes:
        with path.open("rb") as stream:
            data = stream.read(most_bytes + 1)
        num_bytes = max(num_bytes, len(data))
    if num_bytes > most_bytes:
        raise ConfigError(
            f"{path}: {format_bytes(num_bytes)} or more, and {what} has at most {format_bytes(most_bytes)}. "
            "Write another path"
        )
    return data


def check_is_file(path: Readable, *, what: str) -> Any:
    """Returns the status of a file that is about to be opened; refuses what `read_small` does not open.

    Raises:
        ConfigError: a pipe, socket or device. OSError: it is not there, or its directory cannot be searched.
    """
    status = path.stat()
    if (kind := _kind_of(status)) is not None:
        raise ConfigError(f"{path}: is a {kind}, and {what} is a file. Write the path of a file")
    return status


def _kind_of(status: Any) -> str | None:
    """Kind of a pipe, socket or device; None for files and directories, and for objects in a store."""
    mode = getattr(status, "st_mode", None)
    if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # a directory has an error of its own when opened
        return None
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"

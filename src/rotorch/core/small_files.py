"""Files that are small by what they are: read whole, but never more of them than that."""

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
    """Reads a file that is a few kilobytes long if it is what it should be.

    Takes no more memory than `most_bytes`, whatever the file is: of gigabytes, or growing. Does not open what is no
    file: a pipe would wait for its writer, and a device may have no end.

    Args:
        path: the file.
        most_bytes: more is refused.
        what: the file should be, for the message: "a run's TOML file".

    Raises:
        ConfigError: if it is longer, or no file. OSError: if it cannot be read.
    """
    status = path.stat()
    if (kind := _kind_of(status)) is not None:
        raise ConfigError(f"{path}: is a {kind}, and {what} is a file. Write the path of a file")
    num_bytes = int(status.st_size)
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


def _kind_of(status: Any) -> str | None:
    """The name of what neither is a file nor a directory; None for these, and for what lies in a store."""
    mode = getattr(status, "st_mode", None)
    if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # a directory has an error of its own when opened
        return None
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"

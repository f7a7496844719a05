"""Bytes that a row puts on the wire, by the counter of the network interface of its messages.

[Note: textbook and wire]
    The meter (`comm/meter.py`) counts operations as they are issued, at the bytes of a ring algorithm: the traffic of a
    layout on any backend. The interface counts the bytes that the backend really sends. Over gloo the two
    differ: its reduce-scatter is an all-reduce of a copy, which sends up to twice as much. NCCL has a reduce-scatter of
    its own, so a forecast for GPUs is the meter's figure, not the wire's.

[Note: a network of its own]
    All ranks are on one host, so their messages take the loopback interface. Where the system allows it, the ranks of
    a row are forked into a network namespace, whose loopback carries nothing else; the counter is theirs alone. Else
    the host's counter is read, which also counts messages of other programs, and the record says so. A namespace is a
    thread's own on Linux: the bench's thread goes there, forks the ranks, and comes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWN, HOST = "loopback of the row's own network namespace", "loopback of the host, with whatever else it carried"
"""Whose counter it is."""

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_LOOPBACK = "lo"


@dataclass(frozen=True)
class WireBytes:
    """Bytes that went over the interface in one step.

    Attributes:
        total: of all ranks together, with headers and acknowledgements.
        counter: `OWN` or `HOST`.
    """

    total: int
    counter: str


@contextlib.contextmanager
def network_of_its_own() -> Iterator[bool]:
    """Gives this thread, and processes that it forks, a network with only a loopback interface within the block.

    Yields:
        Whether it has: not if the system forbids it, or if the user has named another interface for gloo.
    """
    before = _enter() if os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK) == _LOOPBACK else None
    try:
        yield before is not None
    finally:
        if before is not None:
            try:
                call_libc("setns", before, _CLONE_NEWNET)
            finally:
                os.close(before)


def loopback_bytes() -> int | None:
    """Bytes that the loopback interface of this process's network has sent so far; None where nobody counts."""
    file = Path("/proc/self/net/dev")  # sysfs would show the network of whoever mounted it
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, figures = line.partition(":")
        if name.strip() == _LOOPBACK:
            return int(figures.split()[8])
    return None


def _enter() -> int | None:
    """Goes into a new network; returns a descriptor of the one before, or None if that is not allowed."""
    if sys.platform != "linux":
        return None
    try:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        call_libc("unshare", _CLONE_NEWNET)
    except OSError:
        os.close(before)
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", _LOOPBACK.encode(), _IFF_UP))
    except OSError:
        call_libc("setns", before, _CLONE_NEWNET)
        os.close(before)
        return None
    return before


def call_libc(name: str, *arguments: int) -> None:
    """Calls `unshare` or `setns` of the C library, which Python has since 3.12.

    Raises:
        OSError: with the system's message.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

"""Hosts made of one machine: a network, a name and memory of their own, and links between them that have a limit.

[Note: a host]
    Three namespaces of Linux: network, UTS and mount. A rank that is forked inside has no other interface than the
    host's, and at the place of shared memory a file system that no other host has; the other files are the machine's.
    Namespaces are a thread's own: the bench's thread goes in, forks, and comes back. It goes to the directory that it
    was in, as a thread that changes its mounts begins at their root; from then on that directory is not shared with
    the process's other threads.

[Note: links]
    Hosts hang on a switch (a bridge in a network of its own) by pairs of virtual interfaces. Both ends of a pair let
    data out at the link's rate, by a token bucket (HTB): up and down are limited apart, and hosts that send to one at
    the same time share its link. Packets without data go past the bucket: behind data, acknowledgements would wait for
    the other direction's queue, and a two-way exchange take two to three times as long as on a real full-duplex link.
    Hosts on two switches reach each other by one more such link, which all of them share.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rotorch.bench.wire import call_libc
from rotorch.process.environment import environment

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_INTERFACE, _UPLINK = "lh0", "up0"
_BURST_S, _LARGEST_PACKET, _OVERHEAD = 2e-3, 65_536, 4_464
"""A bucket lets out at once: the rate times this long, and at least one packet of the largest size and some more."""
_NO_LIMIT = "100gbit"


@dataclass(frozen=True)
class _Namespace:
    """Descriptors of a network, a name and mounts."""

    network: int
    name: int
    mounts: int

    def enter(self) -> None:
        directory = os.getcwd()
        call_libc("setns", self.network, _CLONE_NEWNET)
        call_libc("setns", self.name, _CLONE_NEWUTS)
        call_libc("setns", self.mounts, _CLONE_NEWNS)
        os.chdir(directory)

    def close(self) -> None:
        for descriptor in (self.network, self.name, self.mounts):
            os.close(descriptor)


def why_no_hosts() -> str:
    """Returns the reason why this process cannot make hosts; empty if it can."""
    if sys.platform != "linux":
        return f"namespaces are a thing of Linux, and this is {sys.platform}"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("mount", "util-linux")):
        if shutil.which(tool) is None:
            return f"there is no {tool} (of {package}) on PATH"
    try:
        with Hosts(2, bytes_per_s=1e9):
            return ""
    except OSError as error:
        return f"the system refuses a network namespace: {error}"
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        return f"the system refuses a limited link between namespaces: {' '.join(error.cmd[:3])}: {said[0]}"


class Hosts:
    """Hosts on one switch, or on two that share an uplink. A context manager; leaving it ends the networks.

    Args:
        count: of hosts, 2 to 250. Of two switches, the first half hangs on the first.
        bytes_per_s: of every link, in each direction, the uplink included.
        switches: 1 or 2.
        packet_bytes: the largest packet that the kernel hands down unsplit. Messages up to this size pass an idle link
            at once, whatever its rate; smaller packets cost processor time.
    """

    def __init__(
        self, count: int, *, bytes_per_s: float, switches: int = 1, packet_bytes: int = _LARGEST_PACKET
    ) -> None:
        self.count, self.switches = count, switches
        self._rate, self._packet_bytes = bytes_per_s, packet_bytes
        self._stack = ExitStack()
        self._limited: list[tuple[_Namespace, str]] = []

    def __enter__(self) -> Hosts:
        with self._stack:
            self._memory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rotorch-hosts-"))
            self._here = self._opened()
            self._switch = self._made("switch")
            self._hosts = [self._made(f"host{k}") for k in range(self.count)]
            for k in range(self.switches):
                self._run(self._switch, f"ip link add name sw{k} type bridge")
                self._run(self._switch, f"ip link set sw{k} up")
            for k, host in enumerate(self._hosts):
                self._plug_in(k, host)
            if self.switches == 2:
                self._run(self._switch, f"ip link add name {_UPLINK} type veth peer name {_UPLINK}b")
                self._attach(_UPLINK, switch=0)
                self._attach(f"{_UPLINK}b", switch=1)
            self.limit(self._rate)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def limit(self, bytes_per_s: float) -> None:
        """Changes the rate of all links. Nothing may be on its way."""
        bits = f"{max(int(8 * bytes_per_s), 8000)}bit"
        burst = max(int(_BURST_S * bytes_per_s), self._packet_bytes + _OVERHEAD)
        for where, interface in self._limited:
            made = f"tc class replace dev {interface} parent 1:"
            self._run(
                where, f"{made} classid 1:1 htb rate {bits} ceil {bits} burst {burst} cburst {burst} quantum 60000"
            )

    @contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Moves this thread, and processes that it forks, to a host within the block."""
        own = {"GLOO_SOCKET_IFNAME": _INTERFACE, "ROTORCH_SHARED_MEMORY_DIR": self._memory}
        with environment(**own), self._inside(self._hosts[host]):
            yield

    def sent_bytes(self) -> list[int]:
        """Bytes that each host has put on its link so far, headers and acknowledgements included."""
        return [self._counted(host, _INTERFACE) for host in self._hosts]

    def uplink_bytes(self) -> int:
        """Bytes that have crossed the shared uplink so far, both directions together; 0 without an uplink."""
        if self.switches == 1:
            return 0
        return sum(self._counted(self._switch, name) for name in (_UPLINK, f"{_UPLINK}b"))

    def _opened(self) -> _Namespace:
        """Descriptors of where this thread is."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        here = _Namespace(*(os.open(f"/proc/thread-self/ns/{kind}", flags) for kind in ("net", "uts", "mnt")))
        self._stack.callback(here.close)
        return here

    def _made(self, name: str) -> _Namespace:
        call_libc("unshare", _CLONE_NEWNET | _CLONE_NEWUTS | _CLONE_NEWNS)
        try:
            made = self._opened()
            socket.sethostname(name)
        finally:
            self._here.enter()
        self._run(made, "mount --make-rprivate /")  # what is mounted here is seen nowhere else
        self._run(made, f"mount -t tmpfs tmpfs {self._memory}")
        self._run(made, "ip link set lo up")
        return made

    def _plug_in(self, k: int, host: _Namespace) -> None:
        """Connects a host with its switch."""
        there = f"/proc/{os.getpid()}/fd/{host.network}"
        self._run(self._switch, f"ip link add name port{k} type veth peer name {_INTERFACE} netns {there}")
        self._attach(f"port{k}", switch=k * self.switches // self.count)
        self._run(host, f"ip address add 10.77.0.{k + 1}/24 dev {_INTERFACE}")
        self._run(host, f"ip link set {_INTERFACE} up")
        self._put_bucket(host, _INTERFACE)

    def _attach(self, interface: str, *, switch: int) -> None:
        self._run(self._switch, f"ip link set {interface} master sw{switch}")
        self._run(self._switch, f"ip link set {interface} up")
        self._put_bucket(self._switch, interface)

    def _put_bucket(self, where: _Namespace, interface: str) -> None:
        """See [Note: links]. A packet without data is shorter than 80 bytes, options included."""
        if self._packet_bytes != _LARGEST_PACKET:
            self._run(where, f"ip link set dev {interface} gso_max_size {self._packet_bytes}")
        self._run(where, f"tc qdisc add dev {interface} root handle 1: htb default 1")
        self._run(where, f"tc class add dev {interface} parent 1: classid 1:2 htb rate {_NO_LIMIT} quantum 60000")
        for shape in ("0x0000 0xffc0", "0x0040 0xfff0"):
            chosen = f"protocol ip u32 match u16 {shape} at 2 flowid 1:2"
            self._run(where, f"tc filter add dev {interface} parent 1: {chosen}")
        self._limited.append((where, interface))

    @contextmanager
    def _inside(self, namespace: _Namespace) -> Iterator[None]:
        namespace.enter()
        try:
            yield
        finally:
            self._here.enter()

    def _run(self, where: _Namespace, command: str) -> None:
        with self._inside(where):
            subprocess.run(command.split(), check=True, capture_output=True, text=True)

    def _counted(self, where: _Namespace, interface: str) -> int:
        with self._inside(where):
            text = Path("/proc/thread-self/net/dev").read_text()
        for line in text.splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == interface:
                return int(figures.split()[8])
        raise OSError(f"no interface {interface}")

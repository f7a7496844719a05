"""Seconds of operators and messages on a cluster: the only place where figures of hardware become time.

[Note: operators]
    A matrix product takes flops / (peak x efficiency), or the bytes of its operands / bandwidth if that is more, and
    the launch of a kernel. The efficiency of a shape [m, k] x [k, n] is that of large products divided by
    1 + half_size (1/m + 1/k + 1/n): tiles at the edges are not full, and each pays for its beginning and end. All other
    operators take the time of their bytes. If rows of an operand do not begin at multiples of 16 bytes, as with 50,257
    words in half precision, GPUs use slower kernels, which reach only a part of that (`unaligned`). The host takes a
    time of its own for each operator that it issues.

[Note: messages]
    A transfer takes its messages times (latency + hop log2 of the group's size), and its bytes over the bandwidth of
    the slowest link that the group needs. If several ranks of a group have a link each, a ring uses all of these links
    at once, so the group has their sum, up to the bandwidth of the links inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from rotorch.core.errors import ConfigError
from rotorch.core.traffic import Kind, Transfer
from rotorch.planner.cluster import Cluster, Dtype

Floats = NDArray[np.float64]

Row = tuple[float, float, float, float] | tuple[float, float, float, float, float]
"""Of a table of operators; the last column, where it is left out, is 0."""


@dataclass(frozen=True)
class LinkSpeed:
    """Reached speed of one link of a cluster.

    Attributes:
        devices: consecutive ranks that it joins.
        bytes_per_s: of one of them, each way.
        latency_s: of a message.
        hop_s: of a collective, per doubling of its group.
        copy_s: of a copy out of another device's memory; None where messages are sent.
    """

    devices: int
    bytes_per_s: float
    latency_s: float
    hop_s: float
    copy_s: float | None = None


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, `stride` apart."""

    size: int
    stride: int

    @property
    def reach(self) -> int:
        """Number of consecutive ranks within which the group lies."""
        return (self.size - 1) * self.stride + 1


@dataclass(frozen=True)
class Work:
    """Operators of one computation, in one array with a row each.

    Columns: flops; the sum of one over each side (0: no product); bytes; operators; whether it is not aligned.
    """

    table: Floats

    @staticmethod
    def of(*rows: Row) -> Work:
        """Makes the work of rows of the table."""
        return Work(np.array([(*row, 0.0)[:5] for row in rows], dtype=np.float64).reshape(-1, 5))

    @staticmethod
    def together(works: list[Work]) -> Work:
        """Joins computations that run one after the other."""
        return Work(np.concatenate([w.table for w in works])) if works else Work.of()

    def times(self, number: float) -> Work:
        """Returns the work repeated several times."""
        return Work(np.repeat(self.table, int(number), axis=0))

    @property
    def flops(self) -> float:
        """Floating-point operations of all products."""
        return float((self.table[:, 0]).sum())

    @property
    def num_operators(self) -> float:
        """Number of operators that the host issues."""
        return float(self.table[:, 3].sum())


@dataclass(frozen=True)
class Speeds:
    """A cluster's figures as reached, for one dtype of products.

    Attributes:
        flops_per_s: of large products.
        bytes_per_s: of memory.
        half_size: see [Note: operators].
        launch_s: of the smallest kernel.
        operator_s: of the host, per operator.
        overlap: share by which computation slows down beside a copy.
        unaligned: share of its speed that a product reaches which is not aligned.
        links: from the fastest to the slowest.
    """

    flops_per_s: float
    bytes_per_s: float
    half_size: float
    launch_s: float
    operator_s: float
    overlap: float
    links: tuple[LinkSpeed, ...]
    unaligned: float = 1.0

    def device_s(self, work: Work) -> float:
        """Seconds that a device takes for some work."""
        flops, sides, num_bytes, operators, unaligned = work.table.T
        computing = flops * (1.0 + self.half_size * sides) / self.flops_per_s
        computing = np.where(unaligned > 0, computing / self.unaligned, computing)
        return float((np.maximum(computing, num_bytes / self.bytes_per_s) + operators * self.launch_s).sum())

    def memory_s(self, num_bytes: float) -> float:
        """Seconds that a device takes to read and write so many bytes in one operator."""
        return num_bytes / self.bytes_per_s + self.launch_s if num_bytes else 0.0

    def host_s(self, work: Work) -> float:
        """Seconds that the host takes to issue the work."""
        return work.num_operators * self.operator_s

    def bytes_per_s_of(self, group: Group) -> float:
        """Bandwidth that one rank of a group has (see [Note: messages])."""
        best, members = self.links[0].bytes_per_s, 1
        for inner, link in zip((None, *self.links), self.links, strict=False):
            if inner is not None:
                members = max(1, min(group.size, inner.devices // max(group.stride, 1)))
            speed = link.bytes_per_s * members
            best = speed if members == 1 else min(best, speed)
            if group.reach <= link.devices:
                return best
        return best

    def message_s(self, group: Group, *, collective: bool) -> float:
        """Seconds that a message takes besides its bytes."""
        link = self._link_of(group)
        return link.latency_s + (link.hop_s * log2(group.size) if collective and group.size > 1 else 0.0)

    def transfer_s(self, transfer: Transfer, group: Group) -> float:
        """Seconds that one transfer takes if nothing else uses its links."""
        if group.size == 1 or not transfer.sent_bytes:
            return 0.0
        point_to_point = transfer.kind in (Kind.SEND, Kind.COPY)
        over = Group(2, group.stride) if point_to_point else group
        sent_s = transfer.sent_bytes / self.bytes_per_s_of(over)
        if transfer.kind is Kind.COPY and (copy_s := self._link_of(group).copy_s) is not None:
            return transfer.num_messages * copy_s + sent_s
        return transfer.num_messages * self.message_s(group, collective=not point_to_point) + sent_s

    def _link_of(self, group: Group) -> LinkSpeed:
        return next((link for link in self.links if group.reach <= link.devices), self.links[-1])


def speeds_of(cluster: Cluster, *, dtype: Dtype) -> Speeds:
    """The figures of a cluster as reached, for products in `dtype`.

    Raises:
        ConfigError: the cluster does not say how fast products in it are.
    """
    device = cluster.device
    if dtype not in device.flops:
        known = ", ".join(device.flops)
        raise ConfigError(
            f"cluster {cluster.name!r}: no device.flops.{dtype}. It has: {known}. Write it, or another precision"
        )
    return Speeds(
        flops_per_s=device.flops[dtype].reached,
        bytes_per_s=device.bandwidth.reached,
        half_size=device.half_size.value,
        launch_s=device.launch.value,
        operator_s=device.operator.value,
        overlap=device.overlap.value,
        unaligned=device.unaligned.value if device.unaligned is not None else 1.0,
        links=tuple(
            LinkSpeed(
                link.devices,
                link.bandwidth.reached,
                link.latency.value,
                link.hop.value,
                None if link.copy_from_peer is None else link.copy_from_peer.value,
            )
            for link in cluster.links
        ),
    )

"""Clusters as TOML files: figures of devices and links by their datasheets, the reached share of each, and sources.

[Note: figures]
    A figure has `value` from the datasheet, with `source` and `date`, and `efficiency`, the share of it that programs
    reach, with `efficiency_source`; measuring changes the latter two only. A figure that no datasheet has (the time of
    the smallest kernel, a link's latency) is a measured value and has no efficiency.

[Note: links]
    A link joins `devices` consecutive ranks: 8 GPUs of a node by NVLink, 1,024 of 128 nodes by the network. Links are
    written from the fastest to the slowest; each joins whole groups of the one before, and the last joins all ranks. A
    group of ranks that reaches over several is as fast as the slowest link that it needs.
"""

from __future__ import annotations

import datetime
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.small_files import read_small

_MOST_BYTES = 1 << 20
_FOLDER = "clusters"
"""Where the clusters that rotorch brings lie, within this package."""

Dtype = Literal["float32", "bfloat16", "float16"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Measured(_Table):
    """A figure that is in no datasheet.

    Attributes:
        value: in seconds, or a share.
        source: author of the measurement, or basis of the estimate.
        date: date of the measurement or estimate.
    """

    value: float = Field(ge=0.0)
    source: str = Field(min_length=1)
    date: datetime.date


class Figure(_Table):
    """A datasheet's figure (see [Note: figures])."""

    value: float = Field(gt=0.0)
    efficiency: float = Field(gt=0.0, le=1.0)
    source: str = Field(min_length=1)
    date: datetime.date
    efficiency_source: str = "estimate"

    @property
    def reached(self) -> float:
        """The part of it that programs reach."""
        return self.value * self.efficiency


class Product(_Table):
    """One measured matrix product, [m, k] x [k, n]: the share of the peak that it reaches."""

    dtype: Dtype
    m: PositiveInt
    k: PositiveInt
    n: PositiveInt
    efficiency: float = Field(gt=0.0, le=1.0)


class Device(_Table):
    """One accelerator, or on CPU one rank's part of the machine.

    Attributes:
        name: as its maker calls it.
        type: as torch calls it.
        memory: bytes; the efficiency is the share that a training process can use.
        bandwidth: of its memory, bytes per second.
        flops: operations per second of matrix products, by dtype.
        half_size: sides of a product for which it reaches half of the efficiency (0: shapes do not matter).
        launch: seconds that the smallest kernel takes.
        operator: seconds that the host takes to issue one operator.
        overlap: share by which computation slows down while something is copied beside it.
        unaligned: share of a product's speed that is left where sides are no multiples of 16 bytes; left out: all.
        products: measured products; the nearest one in shape decides where there are any.
    """

    name: str = Field(min_length=1)
    type: Literal["cuda", "cpu"]
    memory: Figure
    bandwidth: Figure
    flops: dict[Dtype, Figure] = Field(min_length=1)
    half_size: Measured
    launch: Measured
    operator: Measured
    overlap: Measured
    unaligned: Measured | None = None
    products: tuple[Product, ...] = ()


class Link(_Table):
    """Link that joins groups of ranks (see [Note: links]).

    Attributes:
        name: of the technology.
        devices: consecutive ranks that it joins.
        bandwidth: bytes per second of one device, each way; the efficiency is what collectives reach of it.
        latency: seconds per message and per collective.
        hop: seconds that a collective takes besides whenever the group doubles.
        copy_from_peer: seconds that a copy out of a mapped memory of another device takes besides its bytes, behind
            another copy; None where no memory is mapped.
    """

    name: str = Field(min_length=1)
    devices: PositiveInt
    bandwidth: Figure
    latency: Measured
    hop: Measured
    copy_from_peer: Measured | None = None


class Cluster(_Table):
    """Devices and links of a cluster.

    Attributes:
        name: for people.
        nodes: machines.
        devices_per_node: ranks of each.
        device: one of them.
        links: from the fastest to the slowest.
    """

    name: str = Field(min_length=1)
    nodes: PositiveInt
    devices_per_node: PositiveInt
    device: Device
    links: tuple[Link, ...] = Field(min_length=1)

    @property  # cached, it would be copied with the fields
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def link_of(self, reach: int) -> Link:
        """The link that a group of ranks needs which lies within `reach` consecutive ranks."""
        return next((link for link in self.links if reach <= link.devices), self.links[-1])

    def with_nodes(self, nodes: int) -> Cluster:
        """Returns the same kind of cluster with another number of nodes."""
        if nodes == self.nodes:
            return self
        last = self.links[-1].model_copy(update={"devices": nodes * self.devices_per_node})
        name = f"{self.name}, with {nodes} nodes"
        return self.model_copy(update={"name": name, "nodes": nodes, "links": (*self.links[:-1], last)})

    def with_ranks(self, ranks: int) -> Cluster:
        """Returns a part of the cluster: so many of its ranks, on nodes with equally many each.

        A prime number of ranks that no node has is one rank per node: then the slowest link joins all.
        """
        if ranks == self.num_devices:
            return self
        each = max(n for n in range(1, self.devices_per_node + 1) if ranks % n == 0)
        links: list[Link] = []
        for link in self.links:
            joined = link.devices if link.devices < each else min(ranks, link.devices // self.devices_per_node * each)
            joined = ranks if link is self.links[-1] else joined
            if joined > (links[-1].devices if links else 1) and ranks % joined == 0:
                links.append(link.model_copy(update={"devices": joined}))
        links = links or [self.links[0].model_copy(update={"devices": ranks})]
        changes = {"nodes": ranks // each, "devices_per_node": each, "links": tuple(links)}
        return self.model_copy(update={"name": f"{self.name}, {ranks} ranks of it", **changes})

    @model_validator(mode="after")
    def _figures_agree(self) -> Self:
        total, before = self.nodes * self.devices_per_node, None
        for link in self.links:
            if before is not None and link.devices % before.devices:
                raise ValueError(
                    f"link {link.name!r} joins {link.devices} devices, no multiple of the {before.devices} that "
                    f"{before.name!r} joins. Write links from the smallest group to the largest"
                )
            if before is not None and link.devices == before.devices:
                raise ValueError(f"links {before.name!r} and {link.name!r} both join {link.devices} devices. Keep one")
            if before is not None and link.bandwidth.value > before.bandwidth.value:
                raise ValueError(
                    f"link {link.name!r} has {link.bandwidth.value:g} bytes/s, more than {before.name!r} inside of it "
                    f"({before.bandwidth.value:g}). Write bytes per second of one device for both"
                )
            before = link
        if self.links[-1].devices != total:
            raise ValueError(
                f"{self.nodes} nodes of {self.devices_per_node} devices are {total}, but the last link "
                f"{self.links[-1].name!r} joins {self.links[-1].devices}. Write devices = {total} there"
            )
        for what, value, least, most in self._bounds():
            if not least <= value <= most:
                raise ValueError(
                    f"{what} = {value:g} is not between {least:g} and {most:g}: another unit? Write bytes, seconds and "
                    "operations, without kilo, giga or bits"
                )
        return self

    def _bounds(self) -> list[tuple[str, float, float, float]]:
        device = self.device
        found = [
            ("device.memory.value", device.memory.value, 1e8, 1e13),
            ("device.bandwidth.value", device.bandwidth.value, 1e8, 1e14),
            *((f"device.flops.{dtype}.value", f.value, 1e9, 1e17) for dtype, f in device.flops.items()),
            ("device.launch.value", device.launch.value, 0.0, 1e-2),
            ("device.operator.value", device.operator.value, 0.0, 1e-2),
            ("device.overlap.value", device.overlap.value, 0.0, 1.0),
            *([("device.unaligned.value", device.unaligned.value, 0.01, 1.0)] if device.unaligned else []),
        ]
        for link in self.links:
            found.append((f"links[{link.name!r}].bandwidth.value", link.bandwidth.value, 1e6, 1e13))
            found.append((f"links[{link.name!r}].latency.value", link.latency.value, 0.0, 1.0))
        return found


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that rotorch brings."""
    folder = resources.files(__package__) / _FOLDER
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def load_cluster(name: str) -> Cluster:
    """Reads a cluster: one that rotorch brings, by name, or a TOML file, by path.

    Raises:
        ConfigError: there is none, it is not TOML, or its figures are missing or contradict each other.
    """
    if name in known_clusters():
        return _read((resources.files(__package__) / _FOLDER / f"{name}.toml").read_bytes(), source=name)
    path = Path(name)
    if not path.exists():
        known = known_clusters()
        raise ConfigError(
            f"--cluster {name}: no such file, and no cluster that rotorch brings{nearest(name, known=known)}. "
            f"Write the path of a TOML file, or one of {', '.join(known)}"
        )
    if path.is_dir():
        raise ConfigError(f"--cluster {name}: is a directory. Write the path of a cluster's TOML file")
    try:
        data = read_small(path, most_bytes=_MOST_BYTES, what="a cluster's TOML file")
    except OSError as error:
        raise ConfigError(f"--cluster {name}: cannot read: {error.strerror}") from None
    return _read(data, source=name)


def _read(data: bytes, *, source: str) -> Cluster:
    try:
        raw = tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: is not TOML: {str(error).splitlines()[0]}") from None
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    """The first of a validation's errors, unknown keys first: a misspelt key also goes missing."""
    first = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        last = str(first["loc"][-1])
        return f"unknown key {key!r}{nearest(last, known=_all_keys())}"
    if first["type"] == "missing":
        return f"{key} is missing. Write it: figures of datasheets have value, efficiency, source and date"
    message = first["msg"].removeprefix("Value error, ")
    if not key:
        return message
    shown: Any = first["input"]
    return f"{key} = {str(shown)[:100]!r}: {message[:1].lower()}{message[1:]}"


def _all_keys() -> set[str]:
    return {name for table in (Cluster, Link, Device, Product, Figure, Measured) for name in table.model_fields}

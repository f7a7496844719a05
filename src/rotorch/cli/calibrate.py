"""`rotorch calibrate`: a cluster file for this machine, from what its ranks reach in less than a minute.

[Note: figures without a datasheet]
    No datasheet has the figures of one rank of a machine. The best measurement takes the place of the value, and the
    median that of its efficiency, so that a value from a real datasheet may replace the former alone.

[Note: ranks at once]
    All ranks measure at the same time: they share memory's bandwidth, and cores that get slower when all are busy.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.collectives import all_reduce_each, barrier, gather_objects
from rotorch.core.errors import ConfigError
from rotorch.planner.cluster import Cluster
from rotorch.process.host_memory import most_bytes
from rotorch.testing.ranks import run_ranks

_LARGE, _SMALL = 1024, 64
_COPY_NUMBERS = 1 << 24
_SUMS = (1 << 10, 1 << 22)
"""Numbers of the messages that are summed: of the small one latency is left, of the large one bandwidth."""
_REPEATS = 7
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def calibrate_command(*, nproc: int | None, out: Path | None) -> dict[str, Any]:
    """Measures, writes the file if asked for, and returns the cluster as JSON values.

    Raises:
        ConfigError: the number of ranks or the file cannot be.
    """
    num_ranks = nproc or os.cpu_count() or 1
    if num_ranks < 2:
        raise ConfigError(f"--nproc {num_ranks}: a link joins two ranks or more. Write 2 or more")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists. Write another name, or remove it")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: no directory {out.parent}")
    found = run_ranks(_measured, num_ranks=num_ranks)
    text = cluster_text(found, num_ranks=num_ranks)
    cluster = Cluster.model_validate(_parsed(text))
    if out is not None:
        out.write_text(text, encoding="utf-8")
    return cluster.model_dump(mode="json")


def _parsed(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _measured() -> dict[str, list[float]]:
    """Measures the speeds of one rank, each several times; all ranks must call it."""
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ranks",))
    found: dict[str, list[float]] = {}
    for name, dtype in _DTYPES.items():
        for what, size in (("large", _LARGE), ("small", _SMALL)):
            a, b = (torch.rand(size, size).to(dtype) for _ in range(2))
            seconds = _seconds(lambda a=a, b=b: a @ b, mesh=mesh)  # type: ignore[misc]
            found[f"flops {name} {what}"] = [2.0 * size**3 / s for s in seconds]
    source, target = torch.ones(_COPY_NUMBERS), torch.empty(_COPY_NUMBERS)
    found["bandwidth"] = [8.0 * _COPY_NUMBERS / s for s in _seconds(lambda: target.copy_(source), mesh=mesh)]
    one = torch.ones(1)
    found["operator"] = [s / 1000 for s in _seconds(lambda: _many(one), mesh=mesh)]
    for what, size in zip(("latency", "sum"), _SUMS, strict=True):
        numbers = torch.ones(size)
        found[what] = _seconds(lambda n=numbers: all_reduce_each([n], mesh=mesh), mesh=mesh)  # type: ignore[misc]
    gather_objects(None, mesh=mesh)
    return found


def _many(one: Tensor) -> None:
    for _ in range(1000):
        one.add_(1.0)


def _seconds(action: Callable[[], Any], *, mesh: Any) -> list[float]:
    action()
    found = []
    for _ in range(_REPEATS):
        barrier(mesh=mesh)
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return found


def cluster_text(ranks: list[dict[str, list[float]]], *, num_ranks: int) -> str:
    """The TOML file of a cluster whose ranks measured these figures (see [Note: figures without a datasheet])."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    source = "rotorch calibrate"

    def reached(key: str) -> tuple[float, float]:
        all_of = [value for rank in ranks for value in rank[key]]
        best = max(all_of)
        return best, min(1.0, median(all_of) / best)

    def figure(best: float, efficiency: float) -> str:
        return (
            f'{{ value = {best:.6g}, efficiency = {efficiency:.4f}, source = "{source}, the best seen", '
            f'efficiency_source = "{source}, the median", date = {today} }}'
        )

    def measured(value: float, what: str = source) -> str:
        return f'{{ value = {value:.6g}, source = "{what}", date = {today} }}'

    seconds = {key: median([value for rank in ranks for value in rank[key]]) for key in ("operator", "latency", "sum")}
    flops = {name: reached(f"flops {name} large") for name in _DTYPES}
    small = median([value for rank in ranks for value in rank["flops float32 small"]])
    best, share = flops["float32"]
    half_size = max(0.0, (best * share / small - 1) * _SMALL / 3)
    sent = 2 * 4 * _SUMS[1] * (num_ranks - 1) / num_ranks
    link = sent / max(seconds["sum"] - seconds["latency"], 1e-9)
    lines = [
        f'name = "{num_ranks} ranks of this machine"',
        "nodes = 1",
        f"devices_per_node = {num_ranks}",
        "",
        "[device]",
        f'name = "{platform.processor() or platform.machine()}, one of {os.cpu_count()} cores"',
        'type = "cpu"',
        f'memory = {{ value = {most_bytes() // num_ranks}, efficiency = 0.9, source = "the system", date = {today} }}',
        f"bandwidth = {figure(*reached('bandwidth'))}",
        f"half_size = {measured(half_size)}",
        f"launch = {measured(0.0, 'part of operator on a CPU')}",
        f"operator = {measured(seconds['operator'])}",
        f"overlap = {measured(0.3, 'estimate')}",
        "",
        "[device.flops]",
        *(f"{name} = {figure(*found)}" for name, found in flops.items()),
        "",
        "[[links]]",
        'name = "messages over loopback"',
        f"devices = {num_ranks}",
        f"bandwidth = {figure(link, 1.0)}",
        f"latency = {measured(seconds['latency'])}",
        f"hop = {measured(0.0, 'part of latency')}",
    ]
    return "\n".join(lines) + "\n"

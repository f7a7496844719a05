"""Process group and device mesh of some strategies: one axis per strategy axis, outermost first."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotorch._torch_private import default_store, flat_group, group_timeout, set_group_timeout
from rotorch.comm.agreement import Agreement, Disagreement, Table
from rotorch.comm.fresh_store import fresh_store
from rotorch.comm.transports.peer_memory import OVERLAPPING
from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase
from rotorch.core.strategy import Strategy
from rotorch.strategies import context_ranks, format_parallel, num_ranks

_LEAVES_WITHIN_S = 30.0
"""Seconds that a rank which differs from others waits for all of them to read the verdict."""

_NAME_S = 60.0
"""Most seconds in which the name of rank 0's host must get an address."""

_TRY_S = 0.2
"""Seconds between two looks for rank 0."""


def device_type(name: str = "auto") -> str:
    """Returns the kind of device that `pick_device` picks, without touching it: a process may fork afterwards."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.device_count() else "cpu"


def pick_device(name: str = "auto") -> torch.device:
    """Returns the device that this rank computes on: `cpu`, or `cuda` with this rank's local index.

    Args:
        name: "auto" (cuda where there is one), "cpu" or "cuda".
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: unknown device {name!r}. Write auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device. Write device=cpu or auto")
    device = local_gpu()
    torch.cuda.set_device(device)
    return device


def local_gpu() -> torch.device:
    """The GPU of this rank: that of its number on its host, or the only one that it sees.

    Raises:
        ConfigError: this host has fewer GPUs than ranks, and none says that they may share one.
    """
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count > 1 and os.environ.get(OVERLAPPING) != "1":
        raise ConfigError(
            f"device: LOCAL_RANK = {number}, and torch sees {count} GPUs on this host. Start {count} ranks per host "
            f"(--nproc-per-node {count}), let each see its own (CUDA_VISIBLE_DEVICES), or write device=cpu"
        )
    return torch.device("cuda", number % count)


def check_world_size(strategies: Sequence[Strategy], *, world_size: int) -> None:
    """Raises `ConfigError` unless the strategies' sizes multiply to `world_size`."""
    needed = num_ranks(strategies)
    if needed != world_size:
        sizes = [str(size) for s in strategies for size in s.axes.values()]
        product = f"{' x '.join(sizes)} = {needed}" if len(sizes) > 1 else str(needed)
        raise ConfigError(
            f"parallel: '{format_parallel(strategies)}' needs {product} ranks, but there are {world_size}. "
            f"Start {needed} ranks (--nproc {needed}), or write sizes that multiply to {world_size}"
        )


def find_store(*, timeout_s: float) -> dist.Store:
    """The store of the ranks of this start, which something else has started: as torchrun's environment says.

    Without torchrun's own store rank 0 serves one, at MASTER_ADDR and MASTER_PORT, as long as it is referred to.

    Raises:
        ConfigError: the host that serves it has no address.
        RankFailure: a rank of torchrun's did not come.
        RuntimeError: nobody serves the store, or this process cannot.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _check_name(host, timeout_s=min(timeout_s, _NAME_S))
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        return fresh_store(shared, rank=rank, num_ranks=world_size, timeout_s=timeout_s)
    # Not by `rendezvous`, where rank 0 would wait for as many ranks as it was told of before anybody can say that they
    # were told of other numbers.
    serves = os.environ["RANK"] == "0"
    if not serves:
        _wait_for_server(host, port, timeout_s=timeout_s)
    return dist.TCPStore(
        host,
        port,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _check_name(host: str, *, timeout_s: float) -> None:
    """Raises `ConfigError` for a host that nobody knows, where torch would ask for it until its own timeout.

    A host that has just been started may get its name late. Name servers keep a failed look-up for a while, Kubernetes'
    for half a minute. A resolver that does not answer has limits of its own.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(host, None)
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() < until and not isinstance(error, UnicodeError):
                tell_phase(f"asking for the address of {host}")
                time.sleep(0.2)
                continue
            why = error.strerror if isinstance(error, socket.gaierror) else error
            raise ConfigError(
                f"MASTER_ADDR={host!r} has no address on this host: {why}. Write the name or address of rank 0's "
                "host, as other hosts know it"
            ) from None
        tell_phase()
        return


def _wait_for_server(host: str, port: int, *, timeout_s: float) -> None:
    """Raises `RuntimeError` unless something listens there in time.

    torch would try for several times its timeout, and print stacks of its own.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), _TRY_S)).close()
        except OSError as error:
            if time.monotonic() + _TRY_S > until:
                raise RuntimeError(error.strerror or str(error)) from None
            tell_phase(f"looking for rank 0 at {host}:{port}")
            time.sleep(_TRY_S)
            continue
        tell_phase()
        return


def join_process_group(*, device: torch.device, timeout_s: float = 600.0, store: dist.Store | None = None) -> None:
    """Joins the default process group as torchrun's environment says; a single process forms a group of one.

    Args:
        device: device of computations.
        timeout_s: seconds that operations of the group wait.
        store: result of `find_store`, if it was called before.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, world_size = 0, 1
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = store or find_store(timeout_s=timeout_s)
    else:
        store = dist.HashStore()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def compare_over_ranks(table: Table, *, device: torch.device) -> None:
    """Returns when `table` (names and values, plain JSON) is the same on all ranks of the default group. All ranks.

    Ranks that are about to build different things would wait for each other in different collectives.

    Raises:
        ConfigError: it is not; names the values and the ranks, on all of them.
        RankFailure: a rank did not come.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if num_ranks == 1 or dist.get_backend() == "fake":  # one process plays one rank of many, without the others
        return
    store, timeout = default_store(), group_timeout(dist.group.WORLD, device=device)
    number = store.add(f"rotorch-compared/{rank}", 1)  # which one it is, counted where it is counted for all ranks
    agreement = Agreement(dist.PrefixStore(f"rotorch-compared/number-{number}", store), rank=rank, num_ranks=num_ranks)
    try:
        agreement.enter()
        agreement.compare(table, round_number=0, timeout_s=timeout.total_seconds())
    except Disagreement:
        agreement.leave(patience_s=_LEAVES_WITHIN_S)
        raise


def make_mesh(strategies: Sequence[Strategy], *, device: torch.device) -> DeviceMesh:
    """Makes the mesh of all ranks, its axes named and sized by the strategies.

    All ranks; joins the process group if need be.
    """
    join_process_group(device=device)
    check_world_size(strategies, world_size=dist.get_world_size())
    axes = {axis: size for s in strategies for axis, size in s.axes.items()}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    timeout = group_timeout(dist.group.WORLD, device=device)
    for axis in axes:
        for carrier in {device, torch.device("cpu")}:
            set_group_timeout(mesh.get_group(axis), timeout, device=carrier)
    return mesh


def sum_in_one_message(mesh: DeviceMesh, *, device: torch.device) -> None:
    """Lets DTensors over `mesh` be summed over all of its axes at once (torch's own clipping). All ranks of the job."""
    if mesh.ndim > 1:
        group, timeout = flat_group(mesh), group_timeout(dist.group.WORLD, device=device)
        for carrier in {device, torch.device("cpu")}:
            set_group_timeout(group, timeout, device=carrier)


def flat_position(axes: Mapping[str, int], positions: Mapping[str, int]) -> int:
    """The number of a rank among those of some axes (names and sizes, outermost first), from its position on each."""
    number = 0
    for axis, size in axes.items():
        number = number * size + positions[axis]
    return number


def batch_position(strategies: Sequence[Strategy], positions: Mapping[str, int]) -> tuple[int, int]:
    """This rank's share of a global batch by number, and how many there are, from its position on each axis.

    Neighbours that share a sequence have one share.
    """
    sizes = {axis: size for strategy in strategies for axis, size in strategy.axes.items()}
    number, total = position_along([axis for strategy in strategies for axis in strategy.batch_axes], sizes, positions)
    sharing = context_ranks(strategies)  # they are neighbours on the innermost of these axes
    return number // sharing, total // sharing


def position_along(axes: Sequence[str], sizes: Mapping[str, int], positions: Mapping[str, int]) -> tuple[int, int]:
    """This rank's number along some axes together, the first of them outermost, and how many there are."""
    number, total = 0, 1
    for axis in axes:
        number, total = number * sizes[axis] + positions[axis], total * sizes[axis]
    return number, total

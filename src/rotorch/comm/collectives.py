"""Collectives over a mesh. Each is called by all ranks of the mesh, and does nothing over a single rank.

Small sums over ranks of one host go through shared memory, once `open_shared_reduces` was called
(`comm/shared_memory_reduce.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import group_timeout
from rotorch.comm.shared_memory_reduce import close_shared_reduce, open_shared_reduce, shared_reduce_of

_ALONE_S = 600.0  # a single rank has no other to wait for


def _groups(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    """The groups that together reach every rank of the mesh: the world where it is the world, else one per axis."""
    if mesh.size() == 1:
        return
    if mesh.size() == dist.get_world_size() and dist.group.WORLD is not None:
        yield dist.group.WORLD
    else:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                yield mesh.get_group(axis)


def open_shared_reduces(mesh: DeviceMesh, *, device: torch.device) -> None:
    """Makes small sums over `mesh`, and over each of its axes, go through shared memory from now on, where they can."""
    for group in (*_groups(mesh), *_groups_of_axes(mesh)):
        open_shared_reduce(group, device=device)


def close_shared_reduces(mesh: DeviceMesh) -> None:
    """Frees the memory of `open_shared_reduces` for the axes of `mesh`; that of the world's group stays."""
    for group in _groups_of_axes(mesh):
        close_shared_reduce(group)


def _groups_of_axes(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if 1 < mesh.size(axis) < mesh.size()]


def all_reduce_sum(tensor: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Sums `tensor` over all ranks of `mesh`, in place, and returns it. Contiguous tensors only."""
    for group in _groups(mesh):
        if (shared_reduce := shared_reduce_of(group, tensor=tensor)) is not None:
            shared_reduce.sum(tensor)
        else:
            dist.all_reduce(tensor, group=group)
    return tensor


def common_seed(*, mesh: DeviceMesh) -> int:
    """Draws a seed, the same on all ranks of `mesh`: that of the first one. All ranks' generators go on alike."""
    # Every rank draws, so all generators advance alike; the factor leaves only the first rank's number in the sum.
    first = not any(mesh.get_coordinate() or [0])
    return int(all_reduce_sum(torch.randint(2**62, ()) * first, mesh=mesh))


def all_reduce_sum_later(tensor: Tensor, *, mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Starts summing `tensor` over all ranks of `mesh`, in place; the returned function waits for it and returns it.

    A sum through shared memory is made when it is waited for, so all ranks must wait for their sums in the same order.
    """
    groups = list(_groups(mesh))
    if len(groups) != 1:  # several groups must follow one another
        all_reduce_sum(tensor, mesh=mesh)
        return lambda: tensor
    if shared_reduce_of(groups[0], tensor=tensor) is not None:
        # Cached: the sum is in place, so a second call of the returned function must not add again.
        return cache(partial(all_reduce_sum, tensor, mesh=mesh))
    work = dist.all_reduce(tensor, group=groups[0], async_op=True)

    def wait() -> Tensor:
        work.wait()
        return tensor

    return wait


def all_reduce_each(tensors: Sequence[Tensor], *, mesh: DeviceMesh) -> None:
    """Sums each tensor over all ranks of `mesh`, in place; all of them are under way at once."""
    for group in _groups(mesh):
        # All are posted before the first wait, so that their latencies overlap.
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors if tensor.numel()]
        for work in works:
            work.wait()


def all_reduce_max(value: float, *, mesh: DeviceMesh) -> float:
    """Returns the largest `value` of all ranks of `mesh`."""
    tensor = torch.tensor([value], dtype=torch.float64)
    for group in _groups(mesh):
        if (shared_reduce := shared_reduce_of(group, tensor=tensor)) is not None:
            shared_reduce.maximum(tensor)
        else:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor)


def all_reduce_min(value: float, *, mesh: DeviceMesh) -> float:
    """Returns the smallest `value` of all ranks of `mesh`."""
    return -all_reduce_max(-value, mesh=mesh)


def any_rank(flag: bool, *, mesh: DeviceMesh) -> bool:
    """Returns True if `flag` holds on any rank of `mesh`."""
    return all_reduce_max(1.0 if flag else 0.0, mesh=mesh) > 0


def gather_objects(value: Any, *, mesh: DeviceMesh) -> list[Any]:
    """Returns every rank's `value` (small, picklable), in the order of positions on the mesh, row by row."""
    found = [value]
    # Innermost axis first: then the lists join in the order of positions, row by row.
    for axis in reversed(range(mesh.ndim)):
        if mesh.size(axis) > 1:
            gathered: list[Any] = [None] * mesh.size(axis)
            dist.all_gather_object(gathered, found, group=mesh.get_group(axis))
            found = [each for of_rank in gathered for each in of_rank]
    return found


def num_hosts(mesh: DeviceMesh) -> int:
    """The number of hosts that the ranks of `mesh` are on, by their names. All of them."""
    return len(set(gather_objects(socket.gethostname(), mesh=mesh)))


def group_timeout_s(mesh: DeviceMesh, *, device: torch.device) -> float:
    """Seconds after which a rank of a one-axis mesh gives up waiting for another one: its process group's timeout."""
    return _ALONE_S if mesh.size() == 1 else group_timeout(mesh.get_group(), device=device).total_seconds()


def own_group(*, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Makes a gloo group over all ranks of `mesh`, for messages of background threads while ranks compute. All ranks.

    Returns None for one rank alone.
    """
    if mesh.size() == 1 or dist.group.WORLD is None:
        return None
    timeout = group_timeout(dist.group.WORLD, device=torch.device("cpu"))
    return dist.new_group(mesh.mesh.flatten().tolist(), backend="gloo", timeout=timeout)


def barrier(*, mesh: DeviceMesh) -> None:
    """Returns after all ranks of `mesh` have come here."""
    all_reduce_max(0.0, mesh=mesh)

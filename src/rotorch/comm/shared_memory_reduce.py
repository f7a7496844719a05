"""Small all-reduces of ranks that share a host, through memory that all of them map.

A step has a few numbers that all ranks wait for: the number of targets, its loss, gradients of norms. As messages
over gloo each of these costs milliseconds on a busy host (a thread must be woken on every rank, and then the one that
waits for it), which is much of a step of few tokens. Here every rank writes its part and reads the others'.

[Note: two slots]
    All ranks of a group make the same sums in one order, so they all know the number of the next one. A rank writes its
    part of sum k into its slot k % 2 and announces that it has come to sum k, and so has read everything of sum k - 1.
    A rank that has seen all others come to sum k + 1 may overwrite its part of sum k.

[Note: a sum that is left]
    A rank that leaves a sum by an exception can never take part again: it is unknown which ranks have read which parts.
    It announces that; the others raise, and it raises itself at its next sum. All raise too if they come with different
    tensors, or if a rank that they wait for has ended.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rotorch._torch_private import group_timeout
from rotorch.comm.direct_collectives import goes_directly
from rotorch.comm.shared_file import Extent, Patience, SharedMemoryUnavailable, announce, share_file
from rotorch.core.errors import HeardFailure, RankFailure

MOST_BYTES = 2 << 20
"""If all ranks' tensors together are larger, messages are faster: each rank would read all of them."""

_SLOT_BYTES = 64 << 10
_LEFT = -1
"""Stands for the number of a sum: this rank has left one."""
_AGAIN = "Start the ranks again, from a checkpoint"

Combine = Callable[[Tensor, Tensor], Any]
Listener = Callable[[str, int, int], None]

_shared_reduces: WeakKeyDictionary[dist.ProcessGroup, SharedMemoryReduce | None] = WeakKeyDictionary()
_listeners: list[Listener] = []


def open_shared_reduce(group: dist.ProcessGroup, *, device: torch.device) -> None:
    """Makes small sums over `group` go through shared memory from now on, if they can. All its ranks call it.

    They can if the ranks compute on CPU, on one host, and there is room. The memory lives as long as the group.
    """
    if group in _shared_reduces or not goes_directly(group, device=device):
        return
    try:
        _shared_reduces[group] = SharedMemoryReduce(
            group, timeout_s=group_timeout(group, device=device).total_seconds()
        )
    except SharedMemoryUnavailable:  # on all ranks of the group
        _shared_reduces[group] = None


def shared_reduce_of(group: dist.ProcessGroup, *, tensor: Tensor) -> SharedMemoryReduce | None:
    """The shared memory in which `group` sums a tensor like this one; None if the tensor must be sent."""
    if tensor.device.type != "cpu" or tensor.nbytes * group.size() > MOST_BYTES:
        return None
    return _shared_reduces.get(group)


def close_shared_reduce(group: dist.ProcessGroup) -> None:
    """Frees the memory; sums over `group` are sent again. All of its ranks."""
    _shared_reduces.pop(group, None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls `listener` for each sum of this rank inside the block, with the group's name, its size, and the bytes."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class SharedMemoryReduce:
    """Shared memory in which the ranks of a group sum small tensors, as one rank sees it. All make it together.

    Args:
        group: the ranks.
        timeout_s: a rank that is later than this counts as gone.

    Raises:
        SharedMemoryUnavailable: on all ranks: they are on several hosts, or there is no room.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self._name, self._ranks = group.group_name, dist.get_process_group_ranks(group)  # not the group: it may go
        self._size, self._position = group.size(), group.rank()
        self._patience = Patience(group=group, timeout_s=timeout_s)
        self._fence = threading.Lock()
        self._number = 0
        self._left_by = RankFailure
        """Once this rank has left a sum: the class of the error that it raised then, and raises from then on."""
        # A page for the counters, then the two slots, so each rank allocates whole pages of its own.
        of_rank = mmap.PAGESIZE + 2 * _SLOT_BYTES
        own = Extent(self._position * of_rank, of_rank)
        mapped = share_file(self._size * of_rank, group=group, owned=[own])
        self._arrivals = [
            np.frombuffer(mapped, dtype=np.int64, count=1, offset=rank * of_rank) for rank in range(self._size)
        ]
        """Per rank: the number of the sum that it has come to, counted from 1."""
        self._calls = [
            np.frombuffer(mapped, dtype=np.int64, count=2, offset=rank * of_rank + 64) for rank in range(self._size)
        ]
        """Per rank and slot: size and operation of its tensor, so that ranks notice if their calls differ."""
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        self._slots = [
            flat[rank * of_rank + mmap.PAGESIZE :][: 2 * _SLOT_BYTES].split(_SLOT_BYTES) for rank in range(self._size)
        ]

    def sum(self, tensor: Tensor) -> None:
        """Sums `tensor` over all ranks, in place, in their order: all come to the same bits. Contiguous."""
        self._combine(tensor, lambda total, part: total.add_(part), kind=0)

    def maximum(self, tensor: Tensor) -> None:
        """The element-wise largest of all ranks, in place. Contiguous."""
        self._combine(tensor, lambda largest, part: torch.maximum(largest, part, out=largest), kind=1)

    def _combine(self, tensor: Tensor, into: Combine, *, kind: int) -> None:
        for listener in _listeners:
            listener(self._name, self._size, tensor.nbytes)
        mine = self._arrivals[self._position]
        if mine[0] == _LEFT:
            raise self._left_by(f"this rank has left a sum of all ranks in the middle. {_AGAIN}")
        chunks = tensor.detach().view(-1).split(_SLOT_BYTES // tensor.itemsize)
        try:
            for chunk in chunks:
                self._combine_chunk(chunk, into, call=2 * tensor.nbytes + kind)
        except BaseException as error:  # see [Note: a sum that is left]
            self._left_by = HeardFailure if isinstance(error, HeardFailure) else RankFailure
            announce(mine, 0, _LEFT, fence=self._fence)
            raise

    def _combine_chunk(self, chunk: Tensor, into: Combine, *, call: int) -> None:
        self._number += 1
        slot = self._number % 2
        parts = [slots[slot][: chunk.nbytes].view(chunk.dtype) for slots in self._slots]
        # Free: all ranks came to the sum before this one, so all have read this slot's part of two sums ago.
        parts[self._position].copy_(chunk)
        self._calls[self._position][slot] = call
        announce(self._arrivals[self._position], 0, self._number, fence=self._fence)
        for rank, arrived in enumerate(self._arrivals):
            if arrived[0] < self._number:
                self._wait_for(rank)
        with self._fence:  # the parts are read after the counters that announce them
            pass
        for rank, theirs in zip(self._ranks, self._calls, strict=True):
            if theirs[slot] != call:
                raise RankFailure(
                    f"ranks do different things: this one comes with {_told(call)}, rank {rank} with "
                    f"{_told(int(theirs[slot]))}"
                )
        # From position 0 on every rank, whichever it is: all get the same bits.
        chunk.copy_(parts[0])
        for part in parts[1:]:
            into(chunk, part)

    def _wait_for(self, rank: int) -> None:
        """Waits until the rank at this position has come to this sum."""
        arrived = self._arrivals[rank]
        self._patience.wait(
            lambda: arrived[0] >= self._number or arrived[0] == _LEFT,
            whom=lambda: rank,
            ranks=self._ranks,
            what="it in a sum",
            late=lambda: (
                f"rank {self._ranks[rank]} did not come to a sum of all ranks within "
                f"{math.ceil(self._patience.timeout_s)} s"
            ),
        )
        if arrived[0] == _LEFT:
            raise HeardFailure(f"rank {self._ranks[rank]} has left a sum of all ranks in the middle. {_AGAIN}")


def _told(call: int) -> str:
    return f"{call // 2} bytes to be {'compared' if call % 2 else 'summed'}"

"""All-gather and reduce-scatter over gloo as direct messages: every rank sends each other rank its part.

Torch's reduce-scatter over gloo is an all-reduce of a copy (2.13: twice a ring's bytes on two ranks, more on more, and
memory for all that is summed), and its all-gather goes through a copy of the whole. Sent directly, bytes are those of
the ring algorithm, gathered parts land where they belong, and a sum takes memory for two parts.

[Note: order]
    Messages between two ranks arrive in the order in which their receives are posted, per tag. Receives of a gather are
    posted at once, those of a sum as memory for them gets free, so these two have tags of their own, and of two sums
    that are under way the first must be waited for first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from rotorch.core.traffic import Kind

BLOCKS = {Kind.ALL_GATHER: "rotorch.all_gather", Kind.REDUCE_SCATTER: "rotorch.reduce_scatter"}
"""Names of the profiler's blocks; the messages inside one block make up one collective."""

_TAGS = {Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 2}
_AHEAD = 2  # parts of a sum that may come before the last one has been added


def goes_directly(group: dist.ProcessGroup, *, device: torch.device) -> bool:
    """Returns True if a group's collectives on a device's tensors are better sent as these messages."""
    return device.type == "cpu" and "cpu:gloo" in str(dist.get_backend_config(group))


def gather_each(wholes: Sequence[Tensor], parts: Sequence[Tensor], *, group: dist.ProcessGroup) -> Callable[[], None]:
    """Starts gathering each part into a whole, of as many elements as all ranks' parts; the returned function waits.

    Contiguous. All ranks of `group`.
    """
    size, position = group.size(), group.rank()
    slots, parts = _cut(wholes, size), [part.view(-1) for part in parts if part.numel()]
    for rows, part in zip(slots, parts, strict=True):
        # Our own part needs no message.
        rows[position].copy_(part)
    # Receives before sends, each straight into its rows of the whole: gloo then buffers nothing.
    works = [
        _receive(rows[source], source=source, group=group, kind=Kind.ALL_GATHER)
        for rows in slots
        for source in _others(position, size, step=-1)
    ]
    with record_function(BLOCKS[Kind.ALL_GATHER]):
        works += [
            _send(part, to=to, group=group, kind=Kind.ALL_GATHER)
            for part in parts
            for to in _others(position, size, step=1)
        ]
    return lambda: _wait(works)


def sum_each(parts: Sequence[Tensor], wholes: Sequence[Tensor], *, group: dist.ProcessGroup) -> Callable[[], None]:
    """Starts summing each whole over all ranks, this rank's share of each into a part; the returned function waits.

    Contiguous. All ranks of `group`; see [Note: order].
    """
    size, position = group.size(), group.rank()
    shares, parts = _cut(wholes, size), [part.view(-1) for part in parts if part.numel()]
    for part, rows in zip(parts, shares, strict=True):
        # Our own share begins the sum; the others' are added to it as they arrive.
        part.copy_(rows[position])
    to_come = deque((part, source) for part in parts for source in _others(position, size, step=-1))
    coming: deque[tuple[Tensor, Tensor, dist.Work]] = deque()

    def receive_next() -> None:
        if to_come:
            part, source = to_come.popleft()
            buffer = torch.empty_like(part)
            coming.append((part, buffer, _receive(buffer, source=source, group=group, kind=Kind.REDUCE_SCATTER)))

    for _ in range(_AHEAD):  # before this rank sends: see [Note: order]
        receive_next()
    with record_function(BLOCKS[Kind.REDUCE_SCATTER]):
        works = [
            _send(rows[to], to=to, group=group, kind=Kind.REDUCE_SCATTER)
            for rows in shares
            for to in _others(position, size, step=1)
        ]

    def end() -> None:
        while coming:
            # In the order of posting, which is the one in which gloo fills the buffers ([Note: order]).
            _add(*coming.popleft())
            receive_next()
        _wait(works)

    return end


def _cut(wholes: Sequence[Tensor], size: int) -> list[Tensor]:
    """Views of the non-empty wholes as `[size, n]`, a row per rank."""
    return [whole.view(size, -1) for whole in wholes if whole.numel()]


def _others(position: int, size: int, *, step: int) -> list[int]:
    """The other positions, ordered so that the ranks' n-th entries are all different."""
    return [(position + step * distance) % size for distance in range(1, size)]


def _send(part: Tensor, *, to: int, group: dist.ProcessGroup, kind: Kind) -> dist.Work:
    work = dist.isend(part, group=group, group_dst=to, tag=_TAGS[kind])
    assert work is not None  # it is None only on ranks outside of the group
    return work


def _receive(buffer: Tensor, *, source: int, group: dist.ProcessGroup, kind: Kind) -> dist.Work:
    # A message goes to the oldest receive of its tag: so the two kinds of collectives never mix.
    work = dist.irecv(buffer, group=group, group_src=source, tag=_TAGS[kind])
    assert work is not None  # as in `_send`
    return work


def _add(part: Tensor, buffer: Tensor, came: dist.Work) -> None:
    came.wait()
    part.add_(buffer)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()

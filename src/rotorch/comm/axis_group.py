"""The ranks along one axis of a mesh and their communication: blocks of a grid of ranks, sums over one side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import as_one_message, group_timeout
from rotorch.comm import direct_collectives
from rotorch.comm.status_word import StatusWord

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
"""By name: the shape of the block that the rank at each position has."""

_SWAPS = 3
"""Tag of `swap`: a ring's slices, whose messages go over the same group, have none."""

Wait = Callable[[], None]
"""Waits for a message under way; its tensors must not change before that."""


class Sums(Protocol):
    """Sums of parts that ranks of a group make for each other."""

    def add(self, part: Tensor, *, target: int) -> None:
        """Adds this rank's part of the sum that belongs to the rank at `target`; `part` may be overwritten."""

    def mine(self) -> Tensor:
        """Returns the sum that belongs to this rank; called after `add` for every target."""


@dataclass(eq=False)
class AxisGroup:
    """This rank and the ranks that differ from it on one axis only. All of them call every method, in one order.

    This one sends messages; `SharedAxisGroup` (`comm/shared_axis_group.py`) reads in place. With a single rank
    nothing is sent.

    Attributes:
        axis: name of the mesh's axis.
        size: number of ranks.
        position: this rank's, 0-based.
        group: their process group; None for a single rank.
        status: status word that says which rank of the group this one waits for, where that is known.
    """

    transport: ClassVar[str] = "messages"

    axis: str
    size: int
    position: int
    group: dist.ProcessGroup | None
    status: StatusWord = field(default_factory=StatusWord, repr=False)

    @cached_property
    def ranks(self) -> list[int]:
        """Global ranks of the group, by position."""
        return list(range(self.size)) if self.group is None else dist.get_process_group_ranks(self.group)

    def write_status_to(self, status: StatusWord) -> None:
        """Makes this rank write to `status`, from now on, which rank it waits for."""
        self.status = status

    @staticmethod
    def along(mesh: DeviceMesh, axis: str) -> AxisGroup:
        """The ranks that this rank shares an axis of `mesh` with."""
        names = mesh.mesh_dim_names or ()
        size = mesh.size(names.index(axis))
        group = mesh.get_group(axis) if size > 1 else None
        return AxisGroup(axis, size, mesh.get_local_rank(axis) if size > 1 else 0, group)

    @staticmethod
    def of_neighbours(mesh: DeviceMesh, axis: str, size: int, *, device: torch.device) -> AxisGroup:
        """Makes the group of the `size` neighbours on an axis that this rank is one of. All ranks of the job.

        Args:
            mesh: of all ranks of the job.
            axis: of it.
            size: of the groups that the axis falls into.
            device: of the tensors that they exchange.
        """
        whole, number = mesh.size((mesh.mesh_dim_names or ()).index(axis)), (mesh.mesh_dim_names or ()).index(axis)
        if size == whole:
            return AxisGroup.along(mesh, axis)
        found: dist.ProcessGroup | None = None
        timeout = group_timeout(dist.group.WORLD, device=device)
        for ranks in mesh.mesh.movedim(number, -1).reshape(-1, size).tolist():
            # Every rank makes every group, in one order: torch asks for that.
            group = dist.new_group(ranks, timeout=timeout)
            if mesh.get_rank() in ranks:
                found = group
        return AxisGroup(axis, size, mesh.get_local_rank(axis) % size, found)

    def broadcast(self, block: Tensor, *, source: int) -> Wait:
        """Starts sending `block` of the rank at `source` to all; the others' is overwritten. Contiguous."""
        # An empty block is empty on all ranks, which know its shape: no rank waits for it.
        if self.group is None or not block.numel():
            return _nothing
        return _waiting(dist.broadcast(block, group_src=source, group=self.group, async_op=True))

    def reduce(self, part: Tensor, *, target: int) -> Wait:
        """Starts summing `part` over all ranks into that of the rank at `target`; the others' may be overwritten."""
        # Empty on all ranks alike, as in `broadcast`.
        if self.group is None or not part.numel():
            return _nothing
        return _waiting(dist.reduce(part, group_dst=target, group=self.group, async_op=True))

    def homes(self, shapes: Shapes, *, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
        """Memory for this rank's blocks that change between steps only, so that other ranks can read them (`blocks`).

        By name, uninitialised; all ranks give the same names in one order.
        """
        return {
            name: torch.empty(of_ranks[self.position], dtype=dtypes[name], device=device)
            for name, of_ranks in shapes.items()
        }

    @property
    def from_own(self) -> list[int]:
        """All positions, this rank's first."""
        return [self.position, *(other for other in range(self.size) if other != self.position)]

    def blocks(
        self, mine: Tensor, *, shapes: Sequence[tuple[int, ...]] | None = None, own_first: bool = False
    ) -> Iterator[Tensor]:
        """Yields every rank's block, in the order of positions; while one is in use the next is under way.

        Args:
            mine: this rank's block, contiguous.
            shapes: of all their blocks; None if all are like `mine`.
            own_first: in the order of `from_own`, on all ranks. This rank's block waits for no message; two others may
                be under way.
        """
        order: Sequence[int] = self.from_own if own_first else range(self.size)
        coming: dict[int, tuple[Tensor, Wait]] = {}
        num_posted = 0

        def post(number: int) -> None:
            # Every rank posts the same broadcasts at the same places, its own among them: collectives of a group must
            # match, and between two blocks the caller may start others.
            nonlocal num_posted
            for source in range(num_posted, min(number, self.size)):
                like = mine.shape if shapes is None else shapes[source]
                block = mine if source == self.position else mine.new_empty(like)
                coming[source] = block, self.broadcast(block, source=source)
                num_posted += 1

        for number, source in enumerate(order):
            if own_first and number == 0:
                post(2)
                yield mine
                continue
            post(number + 1)
            block, wait = coming.pop(source)
            wait()
            # Before this block is given out: the next one travels while the caller computes with this one.
            post(number + 2)
            if own_first and number == self.size - 1:
                coming.pop(self.position)[1]()  # nobody comes back after the last block
            yield block

    def sums(self) -> Sums:
        """Begins sums of parts; at most one is under way while the next is made."""
        return _Reductions(self)

    def start(self) -> None:
        """Begins a step; called after a barrier of all ranks."""
        return None

    def close(self) -> None:
        """Gives memory back. All ranks; nothing may be called afterwards."""
        return None

    def slots(self) -> list[Tensor]:
        """Communication buffers that stay from step to step."""
        return []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place, and returns it. Contiguous."""
        if self.group is not None and tensor.numel():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_later(self, tensor: Tensor) -> Wait:
        """Starts summing `tensor` over all ranks, in place. Contiguous."""
        if self.group is None or not tensor.numel():
            return _nothing
        return _waiting(dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The element-wise largest of all ranks, in place; returns it. Contiguous."""
        if self.group is not None and tensor.numel():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, peers: Sequence[int]) -> Wait:
        """Starts sending a tensor to each of some positions and receiving one from each; empty ones need no message.

        Contiguous. Both ends know the lengths; all ranks of the group call it in the same order.
        """
        if self.group is None:
            return _nothing
        # Receives first: over gloo a send that finds none posted waits for the other direction to be done.
        wanted = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer, tag=_SWAPS)
            for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for tensor, peer in zip(tensors, peers, strict=True)
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(wanted) if wanted else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's `part [n, ..]`, of the same shape on all, one after another: `[size * n, ..]`. Contiguous."""
        if self.group is None:
            return part
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        self.gather_each([whole], [part])()
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """The sum over all ranks of this rank's part of `whole [size * n, ..]`: `[n, ..]`. Contiguous."""
        if self.group is None:
            return whole
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        self.sum_each([part], [whole])()
        return part

    def gather_each(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Wait:
        """Starts an `all_gather` of each part into a whole that is there already, all in one message. Contiguous."""
        if self.group is None:
            for whole, part in zip(wholes, parts, strict=True):
                whole.copy_(part.view(whole.shape))
            return _nothing
        # Torch's gathers over gloo go through a copy of the whole (see `comm/direct_collectives.py`).
        if parts and direct_collectives.goes_directly(self.group, device=parts[0].device):
            return direct_collectives.gather_each(wholes, parts, group=self.group)
        return self._each(dist.all_gather_single, wholes, parts)

    def sum_each(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Wait:
        """Starts a `reduce_scatter` of each whole into a part that is there already, all in one message. Contiguous."""
        if self.group is None:
            for part, whole in zip(parts, wholes, strict=True):
                part.copy_(whole.view(part.shape))
            return _nothing
        # Torch's over gloo is an all-reduce of a copy.
        if parts and direct_collectives.goes_directly(self.group, device=parts[0].device):
            return direct_collectives.sum_each(parts, wholes, group=self.group)
        return self._each(dist.reduce_scatter_single, parts, wholes)

    def _each(self, operation: Callable[..., None], outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Wait:
        if not outputs:
            return _nothing
        assert self.group is not None
        with as_one_message(self.group) as message:
            for output, given in zip(outputs, inputs, strict=True):
                operation(output, given, group=self.group)
        return message.wait  # type: ignore[no-any-return]

    def all_equal(self, value: int) -> bool:
        """Returns True if all ranks gave the same number."""
        if self.group is None:
            return True
        # The maximum of the negatives is the minimum: one reduction gives both ends.
        ends = torch.tensor([value, -value], dtype=torch.int64)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        return int(ends[0]) == -int(ends[1])


class _Reductions:
    """See `AxisGroup.sums`."""

    def __init__(self, axis_group: AxisGroup) -> None:
        self._axis_group = axis_group
        # Each part with its wait: the reduction reads the part's memory until then, and the caller has dropped it.
        self._under_way: list[tuple[Tensor, Wait]] = []
        self._mine: Tensor | None = None

    def add(self, part: Tensor, *, target: int) -> None:
        self._under_way.append((part, self._axis_group.reduce(part, target=target)))
        if target == self._axis_group.position:
            self._mine = part
        # One reduction travels while the caller makes the next part; the memory of earlier parts is free.
        self._finish(at_most=1)

    def mine(self) -> Tensor:
        # Messages to other ranks too: no other code waits for them, and their parts must stay until they have left.
        self._finish(at_most=0)
        if self._mine is None:
            raise AssertionError("no part was made for this rank")
        return self._mine

    def _finish(self, *, at_most: int) -> None:
        while len(self._under_way) > at_most:
            _, wait = self._under_way.pop(0)
            wait()


def _nothing() -> None:
    return None


def _waiting(work: dist.Work | None) -> Wait:
    def wait() -> None:
        if work is not None:
            work.wait()

    return wait

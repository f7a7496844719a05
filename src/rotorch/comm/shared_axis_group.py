"""An axis group whose ranks are all on one host: they read each other's blocks in place, in shared memory.

Weights lie in memory that all ranks map, and are read where they are. A block that a rank makes during a step is copied
into such memory and announced; the others compute with it in place. So a block is copied once at most, whatever the
number of its readers, and no message is taken apart and put together.

[Note: lanes]
    Blocks and parts go through lanes, each with a file of its own: whole tensors for everybody (`blocks`, sums over all
    ranks), and parts for one rank each (`sums`). All ranks make the same calls in the same order, so they all know the
    number of a lane's next operation, and how large it is. A rank's slot in a lane is used again when its readers are
    past the operation that it was used for; each rank announces its progress. A lane that is too small is made
    anew, by all ranks in the same operation; readers keep the old one as long as they need it.

[Note: homes]
    Blocks that change between steps only have their home in a file that all ranks of the group map. `ParallelModel` has
    all ranks meet before and after a pass, so no optimizer writes a block that other ranks still read.

[Note: steps]
    Each step counts from a base of its own, so one that was broken off, at different places on different ranks, leaves
    nothing to clean up. `start` comes after all ranks have met, and so after the last read of the step before.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.axis_group import AxisGroup, Shapes, Sums
from rotorch.comm.collectives import group_timeout_s
from rotorch.comm.shared_file import Extent, Patience, SharedMemoryUnavailable, announce, share_file
from rotorch.comm.status_word import Operation, StatusWord, at
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.messages import SUM_CHUNK_BYTES

_log = logging.getLogger(__name__)

_STEP = 1 << 24  # operations between the bases of two steps: more than a step can have
_ALIGNMENT = 64
_WORDS = 8  # 64 bytes: counters of two ranks lie in different lines of the cache
_SMALL_BYTES = 16 << 10  # up to this, reading all of it takes less than waiting for each other once more

Combine = Callable[[Tensor, Tensor], None]


def _into_sum(total: Tensor, part: Tensor) -> None:
    total.add_(part)


def _into_maximum(largest: Tensor, part: Tensor) -> None:
    torch.maximum(largest, part, out=largest)


class SharedAxisGroup(AxisGroup):
    """An `AxisGroup` over shared memory. All its ranks make it together, and call `start` together.

    Raises:
        SharedMemoryUnavailable: the ranks are on several hosts, or the file system is missing or too small.
    """

    transport = "shared_memory"

    def __init__(self, axis_group: AxisGroup, *, timeout_s: float) -> None:
        super().__init__(axis_group.axis, axis_group.size, axis_group.position, axis_group.group)
        patience = Patience(group=axis_group.group, timeout_s=timeout_s)
        # Operation k writes the slot of k - 2, while slower ranks may still read that of k - 1.
        self._whole = _Lane(axis_group, num_slots=2, num_readers=1, patience=patience)
        # A slot for each other rank's sum, so that a part waits for no reader but its own.
        self._parts = _Lane(
            axis_group, num_slots=max(axis_group.size - 1, 1), num_readers=axis_group.size, patience=patience
        )
        self._homes: dict[int, list[Tensor]] = {}
        """All ranks' blocks in `homes`, by the address of this rank's block."""

    def slots(self) -> list[Tensor]:
        """This rank's part of the shared memory."""
        return [slot for lane in (self._whole, self._parts) for slot in lane.own_slots()]

    def write_status_to(self, status: StatusWord) -> None:
        super().write_status_to(status)
        for lane in (self._whole, self._parts):
            lane.axis_group.write_status_to(status)

    def start(self) -> None:
        self._whole.start()
        self._parts.start()

    def close(self) -> None:
        self._whole.close()
        self._parts.close()
        self._homes = {}

    def homes(self, shapes: Shapes, *, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
        """See `AxisGroup.homes` and [Note: homes]; memory of this rank alone if there is no room for all."""
        if not shapes:
            return {}
        starts: list[dict[str, Extent]] = []
        end = 0
        for position in range(self.size):
            starts.append({})
            for name, of_ranks in shapes.items():
                starts[position][name] = Extent(end, math.prod(of_ranks[position]) * dtypes[name].itemsize)
                end += -(-starts[position][name].num_bytes // _ALIGNMENT) * _ALIGNMENT
            # No page has two owners: each rank allocates its own, on its processor's memory node.
            end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapped = share_file(end, group=self.group, owned=list(starts[self.position].values()))
        except SharedMemoryUnavailable as error:  # on all ranks of the group
            if self.position == 0:
                _log.warning("no shared memory for weights on axis %s (%s): their blocks are copied", self.axis, error)
            return super().homes(shapes, dtypes=dtypes, device=device)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        homes = {}
        for name, of_ranks in shapes.items():
            blocks = [
                flat[extents[name].start :][: extents[name].num_bytes].view(dtypes[name]).view(shape)
                for extents, shape in zip(starts, of_ranks, strict=True)
            ]
            homes[name] = blocks[self.position]
            # Empty blocks may share an address with others, so they cannot be found by it.
            if all(block.numel() for block in blocks):
                self._homes[homes[name].data_ptr()] = blocks
        return homes

    def blocks(
        self, mine: Tensor, *, shapes: Sequence[tuple[int, ...]] | None = None, own_first: bool = False
    ) -> Iterator[Tensor]:
        order: Sequence[int] = self.from_own if own_first else range(self.size)
        at_home = self._homes.get(mine.data_ptr())
        if at_home is not None and mine.shape == at_home[self.position].shape:
            yield from (at_home[source] for source in order)
            return
        sizes = [mine.shape] * self.size if shapes is None else [torch.Size(shape) for shape in shapes]
        with _Operation(self._whole, max(size.numel() for size in sizes) * mine.itemsize) as operation:
            operation.publish(mine, slot=operation.number % 2, reader=0)
            for source in order:
                if source == self.position:
                    yield mine
                else:
                    yield operation.read(source, sizes[source], mine.dtype, slot=operation.number % 2, reader=0)

    def sums(self) -> Sums:
        return _SharedSums(self._parts, size=self.size, position=self.position)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._combine(tensor, _into_sum)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._combine(tensor, _into_maximum)

    def _combine(self, tensor: Tensor, into: Combine) -> Tensor:
        """Combines all ranks' tensors in the order of their positions, so that all get the same bits.

        Every rank combines small tensors itself; of large ones each rank combines a part, which the others copy.
        """
        # In chunks: slots stay small, however large a tensor is.
        for chunk in tensor.view(-1).split(SUM_CHUNK_BYTES // tensor.itemsize):
            # Splitting the work costs one more wait for each other, which pays for itself only beyond this.
            if self.size == 2 or chunk.nbytes < _SMALL_BYTES:
                self._combined(chunk, into, out=chunk, start=0)
                continue
            shards = chunk.tensor_split(self.size)
            start = sum(shard.numel() for shard in shards[: self.position])
            mine = shards[self.position]
            self._combined(chunk, into, out=mine, start=start)
            shapes = [tuple(shard.shape) for shard in shards]
            for shard, theirs in zip(shards, self.blocks(mine, shapes=shapes), strict=True):
                if shard is not mine:
                    shard.copy_(theirs)
        return tensor

    def _combined(self, chunk: Tensor, into: Combine, *, out: Tensor, start: int) -> None:
        """Combines all ranks' elements from `start` on into `out`."""
        with _Operation(self._whole, chunk.nbytes) as operation:
            slot = operation.number % 2
            operation.publish(chunk, slot=slot, reader=0)
            for source in range(self.size):
                theirs = operation.read(source, chunk.shape, chunk.dtype, slot=slot, reader=0)
                part = theirs[start : start + out.numel()]
                if source == 0:
                    out.copy_(part)
                else:
                    into(out, part)

    def all_gather(self, part: Tensor) -> Tensor:
        whole = part.new_empty(self.size, *part.shape)
        for source, block in enumerate(self.blocks(part)):
            whole[source].copy_(block)
        return whole.flatten(0, 1)

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        sums = self.sums()
        for target, part in enumerate(whole.chunk(self.size)):
            # The sum is made in this rank's own part, and `whole` is the caller's.
            sums.add(part.clone() if target == self.position else part, target=target)
        return sums.mine()


class _SharedSums:
    """Sums of parts that ranks make for each other: the owner of a sum reads the others' parts in place."""

    def __init__(self, lane: _Lane, *, size: int, position: int) -> None:
        self._lane, self._size, self._position = lane, size, position
        self._operation: _Operation | None = None
        self._mine: Tensor | None = None
        self._theirs: _Operation | None = None

    def add(self, part: Tensor, *, target: int) -> None:
        if self._operation is None:
            self._operation = _Operation(self._lane, part.nbytes)
        self._operation.make_room(part.nbytes)
        if target == self._position:
            # The others publish their parts for this rank in the memory of now; a larger part to come would replace it.
            self._mine, self._theirs = part, self._operation.now()
        else:
            self._operation.publish(part, slot=self._slot(self._position, target), reader=target)

    def mine(self) -> Tensor:
        if self._mine is None or self._theirs is None or self._operation is None:
            raise AssertionError("no part was made for this rank")
        for source in range(self._size):
            if source != self._position:
                slot = self._slot(source, self._position)
                args = (source, self._mine.shape, self._mine.dtype)
                self._mine.add_(self._theirs.read(*args, slot=slot, reader=self._position))
        self._operation.end()
        return self._mine

    def _slot(self, source: int, target: int) -> int:
        return (target - source - 1) % self._size


class _Lane:
    """Slots of every rank, and each rank's progress (see [Note: lanes]).

    Args:
        axis_group: the ranks.
        num_slots: number of each rank's slots.
        num_readers: number of readers that a rank announces to separately; 1 if it announces to all at once.
        patience: makes ranks wait for each other.
    """

    def __init__(self, axis_group: AxisGroup, *, num_slots: int, num_readers: int, patience: Patience) -> None:
        self.axis_group, self.patience = axis_group, patience
        self._num_slots, self._num_readers = num_slots, num_readers
        self.next = self._base = _STEP
        self.is_open = False
        self.fence = threading.Lock()
        self.memory = self._make(0)

    def begin(self) -> int:
        """Begins the next operation and returns its number; this rank is past all before it."""
        if self.is_open:
            raise AssertionError("an operation began on an axis group before the last one was over")
        self.is_open = True
        number, self.next = self.next, self.next + 1
        self.past(number)
        return number

    def past(self, number: int) -> None:
        """Announces that this rank is done with all operations before `number`."""
        done = self.memory.done[self.axis_group.position]
        if done[0] < number:
            announce(done, 0, number, fence=self.fence)

    def make_room(self, num_bytes: int) -> None:
        """Makes slots large enough for `num_bytes`. All ranks, in the same operation."""
        if num_bytes > self.memory.slot_bytes:
            try:
                self.memory = self._make(num_bytes)
            except SharedMemoryUnavailable as error:  # on all ranks of the group
                raise RankFailure(
                    f"axis {self.axis_group.axis!r}: shared memory for blocks of {num_bytes:,} bytes cannot be had: "
                    f"{error}. "
                    "Write transport=messages, or make room there"
                ) from None
            # Counters of a new file begin at 0; without this other ranks would wait for operations long done.
            self.past(self.next - 1)

    def start(self) -> None:
        # Higher than any number of the last step, wherever on each rank that step ended.
        self._base += _STEP
        self.next = self._base
        self.is_open = False
        self.past(self._base)

    def own_slots(self) -> list[Tensor]:
        return [self.memory.slots[self.axis_group.position][slot] for slot in range(self._num_slots)]

    def close(self) -> None:
        """Drops the memory; it is free once all ranks have."""
        del self.memory

    def _make(self, num_bytes: int) -> _Memory:
        return _Memory(self.axis_group, num_slots=self._num_slots, num_readers=self._num_readers, slot_bytes=num_bytes)


class _Memory:
    """One file of a lane.

    Attributes:
        slot_bytes: of each slot.
        done: per rank `[1]`: the operation before which the rank is done with all.
        published: per rank `[num_readers]`: the operation before which everything for a reader is there.
        slots: per rank and slot, its bytes.
    """

    def __init__(self, axis_group: AxisGroup, *, num_slots: int, num_readers: int, slot_bytes: int) -> None:
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        words = _WORDS * (1 + num_readers)
        header = -(-8 * words // mmap.PAGESIZE) * mmap.PAGESIZE
        of_rank = header + num_slots * slot_bytes

        own = Extent(axis_group.position * of_rank, of_rank)
        self._map = share_file(axis_group.size * of_rank, group=axis_group.group, owned=[own])
        flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.slot_bytes = slot_bytes
        self.done, self.published, self.slots = [], [], []
        for rank in range(axis_group.size):
            start = rank * of_rank
            numbers = np.frombuffer(self._map, dtype=np.int64, count=words, offset=start)
            self.done.append(numbers[:1])
            self.published.append(numbers[_WORDS::_WORDS])
            body = flat[start + header : start + of_rank]
            self.slots.append([body[s * slot_bytes : (s + 1) * slot_bytes] for s in range(num_slots)])


class _Operation:
    """One operation of a lane, on this rank; as a context manager it ends on leaving, also after an exception."""

    def __init__(self, lane: _Lane, num_bytes: int, *, number: int | None = None) -> None:
        self._lane = lane
        self.number = lane.begin() if number is None else number
        lane.make_room(num_bytes)
        self._memory = lane.memory

    def __enter__(self) -> _Operation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def now(self) -> _Operation:
        """Returns this operation with the lane's memory of this moment."""
        return _Operation(self._lane, 0, number=self.number)

    def make_room(self, num_bytes: int) -> None:
        """See `_Lane.make_room`; tensors that were published before stay where they are."""
        self._lane.make_room(num_bytes)
        self._memory = self._lane.memory

    def end(self) -> None:
        """Ends the operation on this rank."""
        if self.number + 1 == self._lane.next:  # else it is one that was broken off, of a step before
            self._lane.is_open = False
            self._lane.past(self.number + 1)

    def publish(self, tensor: Tensor, *, slot: int, reader: int) -> None:
        """Copies `tensor` where others read it. Waits until the slot is free."""
        lane, memory, me = self._lane, self._memory, self._lane.axis_group.position
        everybody = memory.published[me].shape[0] == 1
        # Two slots take turns, so everybody is past the operation before the last; else the last was read by `reader`.
        for rank in [r for r in range(lane.axis_group.size) if r != me] if everybody else [reader]:
            self._wait(memory.done[rank], 0, self.number - 1 if everybody else self.number, rank)
        room = memory.slots[me][slot][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor)
        announce(memory.published[me], reader, self.number + 1, fence=lane.fence)

    def read(self, source: int, shape: torch.Size, dtype: torch.dtype, *, slot: int, reader: int) -> Tensor:
        """Waits for the tensor that the rank at `source` publishes, and returns it where it lies."""
        memory = self._memory
        self._wait(memory.published[source], reader, self.number + 1, source)
        return memory.slots[source][slot][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _wait(self, numbers: np.ndarray, index: int, at_least: int, rank: int) -> None:
        if numbers[index] >= at_least:
            return
        patience, axis_group = self._lane.patience, self._lane.axis_group
        here, axis_group.status.peer = axis_group.status.now, axis_group.ranks[rank] + 1
        axis_group.status.now = at(Operation.AWAIT_BLOCK)
        patience.wait(
            lambda: numbers[index] >= at_least,
            whom=lambda: rank,
            ranks=axis_group.ranks,
            what="a block of it",
            late=lambda: (
                f"position {axis_group.position} on axis {axis_group.axis!r} waited {patience.timeout_s:.0f} s for "
                f"position {rank}, which is late or gone"
            ),
        )
        axis_group.status.now = here


def make_axis_group(mesh: DeviceMesh, axis: str, *, transport: str, device: torch.device) -> AxisGroup:
    """Makes the group of ranks that share an axis of `mesh` with this one. All ranks of the mesh call it.

    Args:
        mesh: of all ranks.
        axis: name of the mesh's axis.
        transport: "auto", "messages" or "shared_memory". "auto" takes shared memory on CPU if every rank can.
        device: where tensors lie.

    Raises:
        ConfigError: shared memory was asked for and cannot be had.
    """
    axis_group = AxisGroup.along(mesh, axis)
    if transport == "messages" or axis_group.size == 1:
        return axis_group
    # The other ranks of a fake group do not run, so they would never write a block.
    if transport == "auto" and (device.type != "cpu" or dist.get_backend(axis_group.group) == "fake"):
        return axis_group
    if device.type != "cpu":
        raise ConfigError(
            f"transport=shared_memory works between CPU ranks, not on {device.type}. Write transport=auto"
        )
    try:
        return SharedAxisGroup(axis_group, timeout_s=group_timeout_s(mesh[axis], device=device))
    except SharedMemoryUnavailable as error:  # on all ranks of the group
        if transport == "shared_memory":
            raise ConfigError(f"transport=shared_memory is not possible: {error}. Write transport=auto") from None
        if axis_group.position == 0:
            _log.warning("no shared memory on axis %s (%s): blocks travel as messages instead", axis, error)
        return axis_group

"""Memory of tensors: a storage that several share counts once; of shared memory only what the tensors cover."""

from __future__ import annotations

import bisect
import gc
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch._torch_private import storage_key

PLAIN = (Tensor, nn.Parameter)
"""Types whose values lie in their own storage; other subclasses are wrappers."""


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def allocate(tensor: Tensor) -> None:
    """Allocates the memory of a tensor with a storage of its own again after `free`; not its values."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def free(tensor: Tensor) -> None:
    """Frees a tensor's memory; tensors that share its storage keep their shapes and have no values."""
    tensor.untyped_storage().resize_(0)


def owned_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take: whole private storages, each once; in shared mappings only what the tensors cover."""
    mappings = SharedMappings()
    private: dict[int, int] = {}
    mapped: list[tuple[int, int]] = []
    for tensor in map(local_part, tensors):
        storage = tensor.untyped_storage()
        if mappings.contains(storage):
            mapped.extend(extents(tensor))
        else:
            private[storage_key(tensor)] = storage.nbytes()
    return sum(private.values()) + union(mapped)


class SharedMappings:
    """Address ranges of this process that other processes map, too, by `/proc/self/maps`."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        file = Path("/proc/self/maps")
        for line in file.read_text().splitlines() if file.is_file() else ():
            extent, flags, *_ = line.split(maxsplit=2)
            if flags.endswith("s"):
                start, end = (int(part, 16) for part in extent.split("-"))
                self._starts.append(start)
                self._ends.append(end)

    def contains(self, storage: torch.UntypedStorage) -> bool:
        """Returns True if a storage lies in such a mapping."""
        if storage.device.type != "cpu" or not storage.nbytes():
            return False
        index = bisect.bisect_right(self._starts, storage.data_ptr()) - 1
        return index >= 0 and storage.data_ptr() < self._ends[index]


def extents(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """First and past-the-end addresses of a tensor's contiguous runs (columns of a weight: one run per row)."""
    run, outer = tensor.element_size(), len(tensor.shape)
    while outer and (tensor.shape[outer - 1] == 1 or tensor.stride(outer - 1) * tensor.element_size() == run):
        outer -= 1
        run *= tensor.shape[outer]
    steps = [tensor.stride(dim) * tensor.element_size() for dim in range(outer)]
    for place in itertools.product(*map(range, tensor.shape[:outer])):  # no operations: a dispatch mode would see them
        start = tensor.data_ptr() + sum(map(operator.mul, place, steps))
        yield start, start + run


def union(found: Sequence[tuple[int, int]]) -> int:
    """Bytes that some extents of addresses cover together."""
    total, reached = 0, 0
    for start, end in sorted(found):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def all_tensors() -> Iterator[Tensor]:
    """Every plain tensor that Python knows of; wrappers (DTensor) hold plain ones."""
    return (found for found in gc.get_objects() if type(found) in PLAIN)

"""Parameters that share memory without being one: ranks' parts would share none, and the weights would part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rotorch._torch_private import storage_key
from rotorch.core.errors import ConfigError


@dataclass(frozen=True)
class _Extent:
    """Bytes from a weight's first element to its last, by address, or from the begin of a storage without one.

    Attributes:
        number: of the weight in the module.
        name: its first one.
        weight: itself.
        start: its first byte.
        end: behind its last one.
    """

    number: int
    name: str
    weight: nn.Parameter
    start: int
    end: int

    @property
    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides in bytes, down to bytes."""
        size = self.weight.element_size()
        return (*self.weight.shape, size), (*(stride * size for stride in self.weight.stride()), 1)


def refuse_shared_memory(module: nn.Module) -> None:
    """Raises `ConfigError` for parameters that have elements in common and are trained as several.

    One parameter under several names is tied, and stays so. Frozen ones have equal values however they are held.
    """
    for extents in _by_memory(module).values():
        reaching: list[_Extent] = []  # those before this one that end behind its start
        for extent in sorted(extents, key=lambda each: each.start):
            reaching = [other for other in reaching if other.end > extent.start]
            for other in reaching:
                if (other.weight.requires_grad or extent.weight.requires_grad) and _overlap(other, extent):
                    raise ConfigError(_refusal(*sorted((other, extent), key=lambda each: -each.number)))
            reaching.append(extent)


def _by_memory(module: nn.Module) -> dict[object, list[_Extent]]:
    """Extents of all parameters that have elements, by device; by storage where there is no address."""
    found: dict[object, list[_Extent]] = {}
    for number, (name, weight) in enumerate(module.named_parameters()):
        try:
            address = 0 if weight.is_meta or not weight.numel() else weight.untyped_storage().data_ptr()
            key = weight.device if address else (weight.device, storage_key(weight))
        except (RuntimeError, NotImplementedError):  # a tensor around others, with no memory of its own
            continue
        if weight.numel() and weight.layout is torch.strided:
            size = weight.element_size()
            last = sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
            start = address + weight.storage_offset() * size
            found.setdefault(key, []).append(_Extent(number, name, weight, start, start + (last + 1) * size))
    return found


def _overlap(first: _Extent, second: _Extent) -> bool:
    """True if two weights whose extents overlap have a byte in common: columns of one tensor have none."""
    if first.start == second.start or (first.weight.is_contiguous() and second.weight.is_contiguous()):
        return True
    start = min(first.start, second.start)
    covered = torch.zeros(max(first.end, second.end) - start, dtype=torch.bool)
    covered.as_strided(*first.strides, first.start - start).fill_(True)
    return bool(covered.as_strided(*second.strides, second.start - start).any())


def _refusal(later: _Extent, earlier: _Extent) -> str:
    is_same = (later.start, later.strides) == (earlier.start, earlier.strides)
    is_same = is_same and later.weight.dtype == earlier.weight.dtype
    tie = f"{later.name} = {earlier.name} (one parameter, which stays tied), or " if is_same else ""
    return (
        f"parallelize: {later.name!r} and {earlier.name!r} share memory and are two parameters: parts of them on ranks "
        f"would share none, and the two would part. Before parallelize write {tie}{later.name}.data = "
        f"{later.name}.data.clone()"
    )

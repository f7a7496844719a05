"""Bytes of weights that are cut along their first dim and gathered whole for use, for `fsdp` and `zeropp`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rotorch.core.layout import Layout
from rotorch.core.spec import Unit, Weight
from rotorch.core.traffic import Kind, Phase, Transfer


def _rows(rows: int, *, size: int, position: int) -> int:
    """Rows that `torch.chunk(rows, size)` gives to `position`."""
    chunk = -(-rows // size)
    return max(0, min(rows, (position + 1) * chunk) - position * chunk)


def _padded_bytes(weights: Iterable[Weight], *, size: int) -> int:
    """Bytes that each of `size` ranks sends of some weights: as many rows as the rank with the most has."""
    return sum(w.num_bytes // max(w.shape[0], 1) * -(-w.shape[0] // size) for w in weights if w.shape)


def gathered_layout(
    unit: Unit, *, size: int, position: int, axis: str, gathers: Sequence[Phase], transient_bytes: int
) -> Layout:
    """Layout of a unit on the rank at `position` of `size`, with these gathers and one reduce-scatter of gradients."""
    resident = 0
    for weight in unit.weights:
        rows = weight.shape[0] if weight.shape else 1
        resident += weight.num_bytes // max(rows, 1) * _rows(rows, size=size, position=position)
    padded = _padded_bytes(unit.weights, size=size)
    summed = _padded_bytes((w for w in unit.weights if w.trained), size=size)
    transfers = [Transfer(Kind.ALL_GATHER, axis, phase, padded, padded * (size - 1)) for phase in gathers]
    transfers.append(Transfer(Kind.REDUCE_SCATTER, axis, Phase.BACKWARD, summed * size, summed * (size - 1)))
    return Layout(resident_bytes=resident, transient_bytes=transient_bytes, transfers=tuple(transfers))

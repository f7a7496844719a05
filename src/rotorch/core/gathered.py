"""Bytes of weights that are cut along their first dim and gathered whole for use, for `fsdp` and `zeropp`."""

from __future__ import annotations

from collections.abc import Sequence

from rotorch.core.layout import Layout
from rotorch.core.spec import Unit
from rotorch.core.traffic import Kind, Phase, Transfer


def _rows(rows: int, *, size: int, position: int) -> int:
    """Rows that `torch.chunk(rows, size)` gives to `position`."""
    chunk = -(-rows // size)
    return max(0, min(rows, (position + 1) * chunk) - position * chunk)


def gathered_layout(
    unit: Unit, *, size: int, position: int, axis: str, gathers: Sequence[Phase], transient_bytes: int
) -> Layout:
    """Layout of a unit on the rank at `position` of `size`, with these gathers and one reduce-scatter of gradients."""
    resident = 0
    for weight in unit.weights:
        rows = weight.shape[0] if weight.shape else 1
        resident += weight.num_bytes // max(rows, 1) * _rows(rows, size=size, position=position)
    padded = sum(w.num_bytes // max(w.shape[0], 1) * -(-w.shape[0] // size) for w in unit.weights if w.shape)
    sent = padded * (size - 1)
    transfers = [Transfer(Kind.ALL_GATHER, axis, phase, padded, sent) for phase in gathers]
    transfers.append(Transfer(Kind.REDUCE_SCATTER, axis, Phase.BACKWARD, padded * size, sent))
    return Layout(resident_bytes=resident, transient_bytes=transient_bytes, transfers=tuple(transfers))

"""Bytes of weights that are cut along their first dim and gathered whole for use, for `fsdp` and `zeropp`.

[Note: outside of blocks]
    `fsdp` gathers each block by itself, and all weights outside of blocks as one group, which is whole from the
    beginning of a forward to the end of its backward. So a model may use its embedding and its head wherever it likes.

[Note: around another strategy]
    Ranks around another strategy's (`fsdp=2,megatron=4`) gather slices of weights, with which that strategy computes.
    Blocks are gathered one after another, in forward and again in backward; weights outside of blocks (embedding, last
    norm, head) once a step, since a head's logits may be made after the model's forward has ended. In a loop of a
    user's own forward and backward are two passes, and these weights come once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotorch.core.layout import Layout, combine_layouts
from rotorch.core.spec import ModelSpec, Unit, Weight
from rotorch.core.traffic import Kind, Phase, Transfer


def _rows(rows: int, *, size: int, position: int) -> int:
    """Rows that `torch.chunk(rows, size)` gives to `position`."""
    chunk = -(-rows // size)
    return max(0, min(rows, (position + 1) * chunk) - position * chunk)


def with_rows(unit: Unit, *, size: int, position: int) -> Unit:
    """A unit of the rows of each weight that the rank at `position` of `size` has; what is gathered has no copies."""

    def rows(weight: Weight) -> Weight:
        shape = (_rows(weight.shape[0], size=size, position=position), *weight.shape[1:])
        return replace(weight, shape=shape, copy_itemsize=None)

    return replace(unit, weights=tuple(map(rows, unit.weights)))


def _padded_rows(weight: Weight, *, size: int) -> int:
    """Elements that each of `size` ranks sends of a weight: as many rows as the rank with the most has."""
    return weight.numel // max(weight.shape[0], 1) * -(-weight.shape[0] // size) if weight.shape else 0


def gathered_layout(
    unit: Unit, *, size: int, position: int, axis: str, gathers: Sequence[Phase], transient_bytes: int
) -> Layout:
    """Layout of a unit on the rank at `position` of `size`, with these gathers and one reduce-scatter of gradients."""
    resident = 0
    for weight in unit.weights:
        rows = weight.shape[0] if weight.shape else 1
        resident += weight.num_bytes // max(rows, 1) * _rows(rows, size=size, position=position)
    padded = sum(_padded_rows(w, size=size) * w.itemsize_in_pass for w in unit.weights)
    summed = sum(_padded_rows(w, size=size) * w.itemsize for w in unit.weights if w.trained)
    transfers = [Transfer(Kind.ALL_GATHER, axis, phase, padded, padded * (size - 1)) for phase in gathers]
    transfers.append(Transfer(Kind.REDUCE_SCATTER, axis, Phase.BACKWARD, summed * size, summed * (size - 1)))
    return Layout(resident_bytes=resident, transient_bytes=transient_bytes, transfers=tuple(transfers))


@dataclass(frozen=True)
class OutsideOfBlocks:
    """Note of a unit that has weights outside of the model's repeated blocks: their names."""

    names: frozenset[str]


def with_blocks_noted(spec: ModelSpec) -> ModelSpec:
    """The same units, with notes of weights outside of blocks (see [Note: around another strategy])."""
    units = []
    for unit in spec.units:
        names = (w.name for w in unit.weights if spec.block_number(w) == len(spec.blocks))
        outside = frozenset(names)
        units.append(unit.with_note(OutsideOfBlocks(outside)) if outside else unit)
    return replace(spec, units=tuple(units))


def _in_parts(unit: Unit) -> tuple[Unit, Unit]:
    """A unit's weights outside of blocks, and those inside, as units."""
    note = unit.note(OutsideOfBlocks)
    outside = tuple(w for w in unit.weights if note is not None and w.name in note.names)
    inside = tuple(w for w in unit.weights if w not in outside)
    return replace(unit, weights=outside), replace(unit, weights=inside)


def _layout_of_parts(
    parts: Sequence[tuple[Unit, Sequence[Phase], int]], *, size: int, position: int, axis: str
) -> Layout:
    """Layout of parts of a unit, each with its gathers and transient bytes."""
    return combine_layouts(
        gathered_layout(part, size=size, position=position, axis=axis, gathers=gathers, transient_bytes=transient_bytes)
        for part, gathers, transient_bytes in parts
        if part.weights
    )


def _gathers_of_blocks(*, again: bool) -> list[Phase]:
    return [Phase.FORWARD, Phase.BACKWARD] if again else [Phase.FORWARD]


def blocks_layout(unit: Unit, *, size: int, position: int, axis: str, again: bool) -> Layout:
    """Layout of a unit's rows, on the rank at `position` of `size` ranks that compute with whole weights.

    Args:
        unit: the whole weights.
        size: number of ranks.
        position: of the rank among these.
        axis: of these.
        again: True if backward gathers blocks again.
    """
    outside, inside = _in_parts(unit)
    parts = (  # with gradients and the message that sends them; of blocks the one that is fetched ahead, too
        (outside, [Phase.FORWARD], 2 * outside.bytes_in_pass + outside.num_bytes),
        (inside, _gathers_of_blocks(again=again), 3 * inside.bytes_in_pass + inside.num_bytes),
    )
    return _layout_of_parts(parts, size=size, position=position, axis=axis)


def slices_layout(unit: Unit, *, size: int, position: int, axis: str, again: bool) -> Layout:
    """Layout of a rank's slices of a unit, on the rank at `position` of `size` around its strategy.

    Args:
        unit: the slices, as weights.
        size: number of ranks that have the same slices.
        position: of the rank among these.
        axis: of these.
        again: True if backward gathers blocks again.
    """
    outside, inside = _in_parts(unit)
    parts = (
        (outside, [Phase.FORWARD], outside.bytes_in_pass + outside.num_bytes),
        (inside, _gathers_of_blocks(again=again), 2 * (inside.bytes_in_pass + inside.num_bytes)),
    )
    return _layout_of_parts(parts, size=size, position=position, axis=axis)

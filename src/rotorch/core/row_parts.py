"""Tables that visit in parts of rows, so that buffers need not be as large as their slices. No torch.

An embedding or a head with a large vocabulary has slices many times as large as those of a layer, and slots that
slices pass through are as large as the largest. A table's slice is any range of its rows, and so is every part of it:
look-ups and losses take parts one by one, as they take slices. Parts of one slice lie side by side at home, so a shard
is what it was; each part is an item of its own on the ring, and as many bytes travel, in more messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rotorch.core.spec import Combine, ModelSpec, Range, Unit, UnitKind

LEAST_TIMES, LEAST_BYTES = 1.25, 1 << 20
"""Tables are divided if their slice is at least so many times the largest visit of any other unit, into parts of at
least so many bytes: smaller ones save little, and each is a message.
"""


@dataclass(frozen=True)
class RowParts:
    """Note of a unit whose slices visit in parts.

    Attributes:
        count: parts of a slice.
    """

    count: int

    def of(self, rows: Range) -> tuple[Range, ...]:
        """The parts of a slice's rows; some are empty if there are fewer rows than parts."""
        bounds = [rows.start + rows.length * number // self.count for number in range(self.count + 1)]
        return tuple(Range(start, stop - start) for start, stop in pairwise(bounds))


def num_parts(unit: Unit) -> int:
    """Parts in which each slice of a unit visits."""
    note = unit.note(RowParts)
    return 1 if note is None else note.count


def with_row_parts(spec: ModelSpec, *, num_slices: int, together: int = 1) -> ModelSpec:
    """The same model, its tables in parts about as large as `together` slices of the largest of the other units."""
    tables = [unit for unit in spec.cut_units if is_table(unit)]
    others = (largest_slice(unit, num_slices) for unit in spec.cut_units if not is_table(unit))
    most = together * max(others, default=0)
    counts = {unit.name: _count(unit, num_slices, most) for unit in tables}
    noted = (u.with_note(RowParts(c)) if (c := counts.get(u.name, 1)) > 1 else u for u in spec.units)
    return replace(spec, units=tuple(noted))


def largest_part(unit: Unit, num_slices: int) -> int:
    """Bytes of the largest part of a unit's slices, or of its largest slice if they come whole."""
    slices = [unit.slice_bytes(num_slices=num_slices, index=k) for k in range(num_slices)]
    return max(map(max, part_bytes(unit, slices, num_slices=num_slices)))


def part_bytes(unit: Unit, slices: Sequence[int], *, num_slices: int) -> list[list[int]]:
    """Bytes of the parts of each slice, given the slices' own."""
    note = unit.note(RowParts)
    if note is None:
        return [[num_bytes] for num_bytes in slices]
    weight = unit.weights[0]
    if weight.cut is None:
        raise AssertionError(f"{weight.name} is not cut")
    rows = weight.shape[weight.cut.dim]
    ranges = (weight.cut.ranges(rows, num_slices=num_slices, index=k)[0] for k in range(num_slices))
    return [[part.length * weight.num_bytes // rows for part in note.of(each)] for each in ranges]


def is_table(unit: Unit) -> bool:
    """True for an embedding or a head whose slice is one range of rows, and nothing else."""
    if unit.kind is not UnitKind.WEIGHT or len(unit.weights) > 1 or not (unit.logits or unit.combine is Combine.SUM):
        return False
    (weight,) = unit.weights
    return weight.cut is not None and weight.cut.dim == 0 and weight.cut.blocks == 1 and len(weight.shape) == 2


def largest_slice(unit: Unit, num_slices: int) -> int:
    """Bytes of the largest slice of a unit."""
    return max(unit.slice_bytes(num_slices=num_slices, index=k) for k in range(num_slices))


def _count(unit: Unit, num_slices: int, most: int) -> int:
    largest = largest_slice(unit, num_slices)
    if not most or largest < LEAST_TIMES * most:
        return 1
    return max(1, min(-(-largest // most), largest // LEAST_BYTES))

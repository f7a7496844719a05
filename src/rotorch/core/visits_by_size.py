"""Numbers of visits by the sizes of units, where several slices come at once. No torch.

Slots are as large as the largest visit of any unit. With one number of visits for all units most visits would leave
most of a slot empty: an attention's slices are a quarter of an MLP's, and a table's are larger than both. So layers'
largest units come in as many visits as were asked for, all others in as few as fit into the same slots: that is fewer
and larger products for no memory at all. Tables come in more visits rather than make slots larger, and those whose
slices are larger than a slot one by one, in parts (core/row_parts.py).

Where backward computes units again a slice at a time, the interior of a unit is there in as many parts as it has
visits. So that this memory stays as small as was asked for, only tables differ there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotorch.core.row_parts import is_table, largest_part, num_parts, with_row_parts
from rotorch.core.spec import ModelSpec, Unit


@dataclass(frozen=True)
class Visits:
    """Note of a unit whose slices come in another number of visits than their ring has ranks.

    Attributes:
        count: visits of a pass.
    """

    count: int


def visits_of(unit: Unit, *, num_slices: int) -> int:
    """Number of visits in which a unit's slices come."""
    note = unit.note(Visits)
    return num_slices if note is None else note.count


def with_visits(spec: ModelSpec, *, num_slices: int, most: int, by_size: bool) -> ModelSpec:
    """The same model, its units with their numbers of visits.

    Args:
        spec: the model.
        num_slices: ranks of the ring.
        most: visits of the largest unit that is no table; it divides `num_slices`.
        by_size: smaller units have fewer visits; else tables alone have others.
    """
    together = num_slices // most
    spec = with_row_parts(spec, num_slices=num_slices, together=together)
    largest = {unit.name: largest_part(unit, num_slices) for unit in spec.cut_units}
    tables = {unit.name: num_parts(unit) for unit in spec.cut_units if is_table(unit)}
    in_layers = [num_bytes for name, num_bytes in largest.items() if name not in tables]
    room = max([together * max(in_layers or largest.values(), default=0), *largest.values()])
    divisors = [d for d in range(1, num_slices + 1) if num_slices % d == 0]

    def count(name: str) -> int:
        if tables.get(name, 1) > 1:
            return num_slices
        if name not in tables and not by_size:
            return most
        return next(d for d in divisors if num_slices // d * largest[name] <= room)

    noted = (unit.with_note(Visits(count(unit.name))) if unit.name in largest else unit for unit in spec.units)
    return replace(spec, units=tuple(noted))

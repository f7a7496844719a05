"""Numbers of visits by the sizes of units, where several slices come at once. No torch.

Slots are as large as the largest visit of any unit. With one number of visits for all units most visits would leave
most of a slot empty: an attention's slices are a quarter of an MLP's. So the largest unit of layers comes in as many
visits as were asked for, and smaller ones in as few as fit into the same slots: fewer and larger products, and weights
take no more memory. Tables and heads are the other way round: their slices are larger than a layer's, and no product is
the faster for it. They come one by one where two slices do not fit into a slot, and in parts (core/row_parts.py) where
one is larger than it by a quarter; a slice between these sizes makes slots as large as itself.

What a pass makes of a unit a visit at a time is as large as a visit of it: logits, and the interiors of units that
backward computes again. So heads never come in fewer visits than were asked for, nor do any units of layers where those
are computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotorch.core.row_parts import is_table, largest_part, num_parts, with_row_parts
from rotorch.core.spec import ModelSpec, Unit


@dataclass(frozen=True)
class Visits:
    """Note of a unit whose slices may come several at once.

    Attributes:
        count: visits of a pass.
    """

    count: int


def visits_of(unit: Unit, *, num_slices: int) -> int:
    """Number of visits in which a unit's slices come."""
    note = unit.note(Visits)
    return num_slices if note is None else note.count


def with_visits_by_size(spec: ModelSpec, *, num_slices: int, most: int, by_size: bool) -> ModelSpec:
    """The same model, its units with their numbers of visits.

    Args:
        spec: the model.
        num_slices: ranks of the ring.
        most: visits of the largest unit of layers; it divides `num_slices`.
        by_size: smaller units of layers have fewer; else all of them have as many.
    """
    together = num_slices // most
    spec = with_row_parts(spec, num_slices=num_slices, together=together)
    largest = {unit.name: largest_part(unit, num_slices) for unit in spec.cut_units}
    around = {unit.name: unit for unit in spec.cut_units if unit.logits or is_table(unit)}
    in_layers = [num_bytes for name, num_bytes in largest.items() if name not in around]
    visit = together * max(in_layers or largest.values(), default=0)
    room = max([visit, *largest.values()])
    divisors = [d for d in range(1, num_slices + 1) if num_slices % d == 0]

    def count(name: str) -> int:
        if name not in around:
            return next(d for d in divisors if num_slices // d * largest[name] <= visit) if by_size else most
        if num_parts(around[name]) > 1:
            return num_slices
        least = most if around[name].logits else 1
        return next(d for d in divisors if d >= least and num_slices // d * largest[name] <= room)

    noted = (unit.with_note(Visits(count(unit.name))) if unit.name in largest else unit for unit in spec.units)
    return replace(spec, units=tuple(noted))

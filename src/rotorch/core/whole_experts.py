"""Mixtures of experts cut between experts: a slice of their weights is a set of whole experts. No torch.

A strategy with an option `experts` takes its units and its refusal from here. `ModelSpec.experts` has the units of all
modules whose experts may be kept whole, beside the units that cut every expert through its width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind


@dataclass(frozen=True)
class WholeExperts:
    """Note of a unit whose slices are sets of whole experts: a slice computes for the tokens that go to them.

    Attributes:
        number: of the unit's experts.
    """

    number: int


def with_whole_experts(spec: ModelSpec) -> ModelSpec:
    """The same model, its experts cut between them and no longer through their widths."""
    if not spec.experts:
        return spec
    expert_of = {weight.name: unit.name for unit in spec.experts for weight in unit.weights}
    by_name = {unit.name: unit for unit in spec.experts}
    units: list[Unit] = []
    for unit in spec.units:
        left = tuple(weight for weight in unit.weights if weight.name not in expert_of)
        for name in dict.fromkeys(expert_of[w.name] for w in unit.weights if w.name in expert_of):
            notes = (*by_name[name].notes, *(() if left else unit.notes))
            by_name[name] = replace(by_name[name], stages=unit.stages, notes=notes)
            if unit.kind is not UnitKind.REPLICATED:
                units += [] if name in {u.name for u in units} else [by_name[name]]
        if left or not unit.weights:
            units.append(replace(unit, weights=left))
    placed = {unit.name for unit in units}
    for unit in by_name.values():  # those that were whole on every rank
        if unit.name not in placed:
            units.insert(_place_of(unit, units, spec=spec), unit)
    kept = tuple(kept for kept in spec.kept_whole if kept.name not in expert_of)
    return replace(spec, units=tuple(by_name.get(u.name, u) for u in units), kept_whole=kept, experts=())


def _place_of(unit: Unit, units: list[Unit], *, spec: ModelSpec) -> int:
    """Position behind the cut units of the same layer and of those before it."""
    layer = spec.order.layer_number(unit.weights[0].name)
    before = [
        number
        for number, other in enumerate(units)
        if other.combine is not Combine.NONE and spec.order.layer_number(other.weights[0].name) <= layer
    ]
    return max(before, default=-1) + 1


def check_whole_experts(spec: ModelSpec, *, kind: str) -> None:
    """Raises `ConfigError` for a model none of whose experts can be kept whole."""
    if not spec.experts and not any(unit.note(WholeExperts) for unit in spec.units):
        raise ConfigError(
            f"{kind}: experts=whole gives ranks whole experts, and {spec.name} has none that could be kept so: "
            f"{spec.experts_stay_cut or 'it has no module of experts'}. Leave experts out"
        )

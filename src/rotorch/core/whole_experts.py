"""Mixtures of experts cut between experts: a slice of their weights is a set of whole experts. No torch.

A strategy with an option `experts` takes its units and its refusals from here. `ModelSpec.experts` has the units of all
modules whose experts may be kept whole, beside the units that cut every expert through its width.

[Note: what travels]
    Under `rtp` sets of experts travel and tokens stay; under `fsdp` sets stay and tokens travel (`token_transfers`). In
    forward a pair of a token and one of its experts is sent to the expert's rank: the token, its weight, the expert's
    number; its row of the output comes back. In backward the row's gradient goes there, and the gradients of token and
    weight come back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer

_NUMBER_BYTES = 8
"""Of an expert's number beside a token."""


@dataclass(frozen=True)
class WholeExperts:
    """Note of a unit whose slices are sets of whole experts: a slice computes for the tokens that go to them.

    Attributes:
        number: of the unit's experts.
        per_token: number of these that a token goes to; 0 if that is not known.
        width: features of a token; 0 if that is not known.
    """

    number: int
    per_token: int = 0
    width: int = 0


def with_whole_experts(spec: ModelSpec) -> ModelSpec:
    """The same model, its experts cut between them and no longer through their widths."""
    here = {weight.name for weight in spec.weights}  # of a few layers of a model only theirs
    by_name = {unit.name: unit for unit in spec.experts if here.issuperset(weight.name for weight in unit.weights)}
    if not by_name:
        return replace(spec, experts=())
    expert_of = {weight.name: unit.name for unit in by_name.values() for weight in unit.weights}
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


def token_transfers(
    unit: Unit, *, batch: MicroBatch, size: int, axis: str, context: int = 1, num_forwards: int = 1
) -> tuple[Transfer, ...]:
    """Transfers of one micro-batch for experts that stay where they are (see [Note: what travels]).

    Of pairs that are not counted yet (`MicroBatch.routed`) as many go to each rank as to every other.

    Args:
        unit: any; none for a unit without whole experts.
        batch: the micro-batch.
        size: number of ranks that share the experts.
        axis: of the mesh.
        context: number of ranks that share the micro-batch's tokens.
        num_forwards: 2 if backward runs the forward again.
    """
    note = unit.note(WholeExperts)
    if note is None or size == 1:
        return ()
    even = batch.num_rows * batch.num_tokens * note.per_token // context * (size - 1) // size
    goes, comes = next(((out, back) for name, out, back in batch.routed if name == unit.name), (even, even))
    row = note.width * batch.itemsize
    there = row + batch.loss_itemsize  # routers compute their weights in float32

    def sent(num_bytes: int, phase: Phase) -> Transfer:
        return Transfer(Kind.SEND, axis, phase, num_bytes, num_bytes, size - 1)

    forward = goes * (there + _NUMBER_BYTES) + comes * row
    return (
        sent(forward, Phase.FORWARD),
        *(sent(forward, Phase.BACKWARD) for _ in range(num_forwards - 1)),
        sent(goes * row + comes * there, Phase.BACKWARD),
    )


def crossover_tokens(unit: Unit, *, itemsize: int) -> float:
    """Tokens of a rank's micro-batch at which moving a layer's experts and moving its tokens send as much.

    Experts that travel send 3 (n-1)/n E bytes (in forward, in backward, their gradients home), tokens that travel
    4 k (n-1)/n T D b: with more tokens than these the experts should travel, with fewer the tokens. The number n of
    ranks does not matter.

    Args:
        unit: of whole experts, E bytes; each of T tokens of D features goes to k of them.
        itemsize: bytes b of a feature.
    """
    note = unit.note(WholeExperts)
    if note is None or not note.per_token * note.width:
        raise ValueError(f"{unit.name} is no unit of whole experts whose tokens are known")
    return 3 * unit.num_bytes / (4 * note.per_token * note.width * itemsize)


def check_every_rank_has_some(spec: ModelSpec, *, size: int, kind: str) -> None:
    """Raises `ConfigError` for more ranks than a layer of whole experts has experts."""
    notes = {unit.name: note for unit in spec.units if (note := unit.note(WholeExperts))}
    for name, note in notes.items():
        if note.number < size:
            raise ConfigError(
                f"{kind}: experts=whole over {size} ranks, and {name!r} has {note.number} experts: some would have "
                f"none. Write {kind}={note.number} or less, or leave experts out"
            )


def check_not_compiled(spec: ModelSpec, *, kind: str, compiled: bool) -> None:
    """Raises `ConfigError` if forwards are to be compiled."""
    if compiled and any(unit.note(WholeExperts) for unit in spec.units):
        raise ConfigError(
            f"{kind}: experts=whole gives each set of experts another number of tokens, and a forward would be "
            "compiled for each. Leave experts out, or leave compile out"
        )


def check_whole_experts(spec: ModelSpec, *, kind: str) -> None:
    """Raises `ConfigError` for a model none of whose experts can be kept whole."""
    if not spec.experts and not any(unit.note(WholeExperts) for unit in spec.units):
        raise ConfigError(
            f"{kind}: experts=whole gives ranks whole experts, and {spec.name} has none that could be kept so: "
            f"{spec.experts_stay_cut or 'it has no module of experts'}. Leave experts out"
        )

"""Cuts of a model into pipeline stages, and the units of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit, UnitKind
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer


@dataclass(frozen=True)
class InStage:
    """A pipeline's note about a unit.

    Attributes:
        boundary_width: features of the hidden states that enter and leave its stage; set for a stage's first unit only.
        borrowed: True if another rank owns it and this rank receives its values for a step.
    """

    boundary_width: int = 0
    borrowed: bool = False


def in_stage(unit: Unit) -> InStage:
    """Returns a pipeline's note about a unit; an empty one if there is none."""
    return unit.note(InStage) or InStage()


def with_features_cut(spec: ModelSpec, *, ranks: int) -> ModelSpec:
    """The same units, between whose stages each of `ranks` ranks passes on its part of the features."""

    def cut(unit: Unit) -> Unit:
        note = in_stage(unit)
        return unit.with_note(replace(note, boundary_width=note.boundary_width // ranks)) if unit.stages else unit

    return replace(spec, units=tuple(map(cut, spec.units)))


def places_of(parts: Sequence[range]) -> tuple[range, ...]:
    """The half layers of stages of whole layers: two for each layer (`LayerOrder.place_number`)."""
    return tuple(range(2 * part.start, 2 * part.stop) for part in parts)


def whole_layers(places: range) -> range:
    """The layers of which a stage of half layers has both."""
    return range((places.start + 1) // 2, places.stop // 2)


def with_stages(spec: ModelSpec, *, places: Sequence[range]) -> ModelSpec:
    """The same units, each with the stages that use it; replicated weights become a unit per stage.

    Args:
        spec: the model.
        places: half layers of each stage.
    """

    def stage_of(name: str) -> int:
        place = min(max(spec.order.place_number(name), 0), spec.order.num_places - 1)
        return next(number for number, mine in enumerate(places) if place in mine)

    units: list[Unit] = []
    for unit in spec.units:
        by_stages: dict[tuple[int, ...], list[int]] = {}
        for number, weight in enumerate(unit.weights):
            used = tuple(sorted({stage_of(name) for name in (weight.name, *weight.aliases)}))
            by_stages.setdefault(used, []).append(number)
        if len(by_stages) > 1 and unit.kind is not UnitKind.REPLICATED:
            # A module that runs on slices is one stage's; a weight that it shares is another's too.
            used = tuple(sorted({stage for each in by_stages for stage in each}))
            by_stages = {used: list(range(len(unit.weights)))}
        units += [
            replace(unit, stages=used, weights=tuple(unit.weights[number] for number in numbers))
            for used, numbers in sorted(by_stages.items())
        ]
    first: set[int] = set()
    for number, unit in enumerate(units):
        if unit.stages[0] not in first:
            first.add(unit.stages[0])
            units[number] = unit.with_note(InStage(boundary_width=spec.order.width))
    return replace(spec, units=tuple(units))


def of_stages(spec: ModelSpec, *, mine: Callable[[int], bool]) -> ModelSpec:
    """The units of some stages, with the number of their uses there: the part of the model on a pipeline's rank."""
    order = spec.order
    units: list[Unit] = []
    for unit in spec.units:
        if not any(mine(stage) for stage in unit.stages):
            continue
        if len(unit.stages) > 1 and not all(mine(stage) for stage in unit.stages):
            # An embedding tied to a head that another rank has: each has one use, and only a head reads in backward.
            weight = unit.weights[0]
            layers = [order.layer_number(name) for name in (weight.name, *weight.aliases)]
            here = [layer for layer in layers if mine(unit.stages[0] if layer < 0 else unit.stages[-1])]
            unit = replace(unit, uses=len(here), reads_in_backward=sum(layer >= 0 for layer in here))
            unit = unit.with_note(replace(in_stage(unit), borrowed=not mine(unit.stages[0])))
        units.append(unit)
    return replace(spec, units=tuple(units))


# ---------------------------------------------------------------- layouts


def check_stages(spec: ModelSpec, *, num_stages: int, strategy: str, inside: bool = False) -> None:
    """Raises `ConfigError` if a model cannot be cut into so many stages; `inside`: of half layers, or more."""
    order = spec.order
    if order.refused:
        raise ConfigError(
            f"{strategy}: {spec.name} cannot be cut into stages: {order.refused}. Write rtp or fsdp, which cut layers"
        )
    most, least = (order.num_places, "half a layer") if inside else (len(order.layers), "one layer")
    if num_stages > most:
        raise ConfigError(
            f"{strategy}: {num_stages} stages over {spec.name}, which has {len(order.layers)} layers: a stage has "
            f"{least} or more. Write at most {most} stages (ranks times chunks)"
        )
    for weight in spec.weights:
        if not weight.shape:
            raise ConfigError(f"{strategy}: {weight.name!r} is a single number, which cannot be cut. Write rtp or ddp")
    if spec.shared_by_layers:
        raise ConfigError(
            f"{strategy}: {spec.shared_by_layers!r} is shared by several layers, which may be of different stages. "
            "Write rtp or fsdp"
        )


def stage_layout(unit: Unit, *, position: int, rank_of: Callable[[int], int], axis: str) -> Layout:
    """Layout of a unit on the rank at `position` of a pipeline, without activations.

    A unit of stages on two ranks, an embedding tied to a head, is owned by the first; the other borrows its values and
    returns gradients.
    """
    owner, *borrowers = dict.fromkeys(rank_of(stage) for stage in unit.stages or (0,))
    if position == owner:
        values = [Transfer(Kind.SEND, axis, Phase.FORWARD, unit.num_bytes, unit.num_bytes) for _ in borrowers]
        return Layout(resident_bytes=unit.num_bytes, transfers=tuple(values))
    if position not in borrowers:
        return Layout(resident_bytes=0)
    gradient = Transfer(Kind.SEND, axis, Phase.BACKWARD, unit.trained_bytes, unit.trained_bytes)
    copies = unit.bytes_in_pass if any(w.copy_itemsize for w in unit.weights) else 0
    return Layout(resident_bytes=0, transient_bytes=unit.num_bytes + copies, transfers=(gradient,))


def stage_transfers(
    unit: Unit, *, batch: MicroBatch, position: int, num_stages: int, rank_of: Callable[[int], int], axis: str
) -> tuple[Transfer, ...]:
    """The hidden states of one micro-batch that the rank at `position` sends on for a stage that begins with `unit`."""
    stage = unit.stages[0] if unit.stages else 0
    width = in_stage(unit).boundary_width
    if not width or rank_of(stage) != position:
        return ()
    num_bytes = batch.num_rows * batch.num_tokens * width * batch.itemsize
    neighbours = {Phase.FORWARD: stage + 1, Phase.BACKWARD: stage - 1}
    return tuple(
        Transfer(Kind.SEND, axis, phase, num_bytes, num_bytes)
        for phase, other in neighbours.items()
        if 0 <= other < num_stages and rank_of(other) != position
    )

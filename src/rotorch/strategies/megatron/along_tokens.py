"""Modules of a model's layers that need all tokens, where activations between them are cut along the sequence.

A layer's children that have matrices (attentions, MLPs) need them; the others (norms) work on every token alone, which
a trial of a tiny model has shown (`models/trial/sequence.py`). So each rank has a part of the gradient of such a
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import MicroBatch, Phase, Transfer, all_gather, reduce_scatter


@dataclass(frozen=True)
class TokensCut:
    """A note about a unit where activations between modules are cut along the sequence.

    Attributes:
        around: True if, around the unit, each rank that holds a slice has a shard of the tokens.
        gathers: pairs of features of hidden states that are gathered along the sequence: in forward, and, of a
            gradient, in backward. Set for the first unit that needs it.
        ends: features of hidden states that are gathered behind all layers, and whose gradient is before them. Set for
            the first unit of the layers, of each stage in a pipeline; else 0.
    """

    around: bool = False
    gathers: tuple[tuple[int, int], ...] = ()
    ends: int = 0


def tokens_cut(unit: Unit) -> TokensCut:
    """Returns the note about a unit; an empty one if there is none."""
    return unit.note(TokensCut) or TokensCut()


@dataclass(frozen=True)
class Children:
    """The children of layers that have matrices.

    Attributes:
        on_slices: children whose own forward runs on slices of their weights: all tokens go in, and each rank's shard
            of the sum comes out.
        whole: the others: all ranks compute them, with whole activations in and out.
    """

    on_slices: tuple[str, ...]
    whole: tuple[str, ...]


def child_of(name: str, layers: tuple[str, ...]) -> str | None:
    """The child of a layer that a weight belongs to, the layer itself, or None outside of them."""
    stack = layers[0].rpartition(".")[0] + "."
    if not name.startswith(stack):
        return None
    parts = name[len(stack) :].split(".")
    return stack + ".".join(parts[:2] if len(parts) > 2 else parts[:1])


def children(spec: ModelSpec) -> Children:
    """The children of a model's layers, in the order of their first weights."""
    layers = spec.order.layers
    units = {u.name for u in spec.units if u.kind is UnitKind.MODULE}
    of_matrices = (child_of(w.name, layers) for w in spec.weights if len(w.shape) > 1)
    found = dict.fromkeys(child for child in of_matrices if child is not None and child not in layers)
    return Children(tuple(c for c in found if c in units), tuple(c for c in found if c not in units))


def without_ends(unit: Unit) -> Unit:
    """The same unit without what is gathered behind all layers: one of many layers that are alike."""
    note = tokens_cut(unit)
    return unit.with_note(replace(note, ends=0)) if note.ends else unit


def with_tokens_cut(spec: ModelSpec) -> ModelSpec:
    """The same units, with notes of token shards around them, of gathers, and of weights whose gradients are parts."""
    layers, found = spec.order.layers, children(spec)
    whole = {f"{child}." for child in found.whole}
    gathered: dict[str, list[tuple[int, int]]] = {}  # by the first weight that wants it
    begun: set[tuple[int, ...]] = set()
    ends: set[str] = set()
    for stages, weight in ((unit.stages, weight) for unit in spec.units for weight in unit.weights):
        child = child_of(weight.name, layers)
        if child is None or len(weight.shape) < 2:
            continue
        if stages not in begun:
            begun.add(stages)
            ends.add(weight.name)
        if f"{child}." in whole:
            whole.discard(f"{child}.")
            alone = weight.name == f"{child}.weight" and len(weight.shape) == 2
            widths = (weight.shape[1], weight.shape[0]) if alone else (spec.order.width, spec.order.width)
            gathered.setdefault(weight.name, []).append(widths)

    def described(unit: Unit) -> Unit:
        weights = unit.weights
        if unit.kind is UnitKind.REPLICATED:
            weights = tuple(replace(w, beside_slices=w.beside_slices or is_part(w, spec, found)) for w in weights)
        gathers = tuple(widths for w in unit.weights for widths in gathered.get(w.name, ()))
        width = spec.order.width if any(w.name in ends for w in unit.weights) else 0
        note = TokensCut(around=unit.name in found.on_slices, gathers=gathers, ends=width)
        return replace(unit, weights=weights).with_note(note)

    return replace(spec, units=tuple(map(described, spec.units)))


def rows_of_layers(spec: ModelSpec) -> list[list[str]]:
    """Names of the layers that run one after another: all, or those of each stage of a pipeline that has units here."""
    order = spec.order
    stages = {order.layer_number(weight.name): unit.stages for unit in spec.units for weight in unit.weights}
    here = [number for number in range(len(order.layers)) if number in stages]
    return [[order.layers[n] for n in numbers] for _, numbers in groupby(here, key=stages.__getitem__)]


def is_part(weight: Weight, spec: ModelSpec, found: Children) -> bool:
    """Returns True if a weight that is not cut is used on a rank's own tokens only."""
    return all(_on_own_tokens(name, spec, found) for name in (weight.name, *weight.aliases))


def _on_own_tokens(name: str, spec: ModelSpec, found: Children) -> bool:
    child = child_of(name, spec.order.layers)
    return child is not None and child not in found.whole


def check_tokens(spec: ModelSpec, *, strategy: str, num_ranks: int) -> None:
    """Raises `ConfigError` if activations of a model cannot be cut along the sequence; says why."""
    without = "Leave sequence_parallel out"
    why = spec.tokens_stay_whole or ("" if spec.order.layers else spec.order.refused)
    if why:
        raise ConfigError(f"{strategy}: activations of {spec.name} cannot be cut along the sequence: {why}. {without}")
    layers, found = spec.order.layers, children(spec)
    for unit in spec.units:
        for weight in unit.weights:
            names = (weight.name, *weight.aliases)
            places = [child_of(name, layers) for name in names]
            cut = unit.kind is not UnitKind.REPLICATED
            if (cut or len(weight.shape) > 1) and any(place in layers for place in places):
                raise ConfigError(
                    f"{strategy}: {weight.name!r} belongs to a layer itself, whose tokens are cut. {without}"
                )
            if cut and len(names) > 1 and any(place is not None for place in places):
                raise ConfigError(f"{strategy}: {weight.name!r} is also {names[1]!r}, and layers share it. {without}")
            if not cut and len({_on_own_tokens(name, spec, found) for name in names}) > 1:
                raise ConfigError(
                    f"{strategy}: {weight.name!r} is also {names[1]!r}, and only one of them is used on shards of the "
                    f"tokens. {without}"
                )
            groups = weight.cut.groups if weight.cut is not None else num_ranks
            if unit.name in found.on_slices and groups < num_ranks:
                raise ConfigError(
                    f"{strategy}: {weight.name!r} has {groups} groups (heads) for {num_ranks} ranks, and a rank that "
                    f"holds none cannot take part in its shards of the tokens. Write megatron={groups} or less"
                )


def longest(batch: MicroBatch, num_ranks: int) -> int:
    """Tokens of the longest shard, over all sequences."""
    return batch.num_rows * Cut(1, batch.num_tokens).ranges(batch.num_tokens, num_slices=num_ranks, index=0)[0].length


def token_shards_sent(
    unit: Unit, *, batch: MicroBatch, axis: str, size: int, width_in: int, width_out: int
) -> Iterator[Transfer]:
    """Transfers of one micro-batch for a unit that has shards of the tokens around it, and for its gathers.

    Args:
        unit: as `with_tokens_cut` describes it.
        batch: the micro-batch.
        axis: of the ranks.
        size: number of ranks.
        width_in: features that go into a module on slices.
        width_out: features that come out of it.
    """
    column = longest(batch, size) * batch.itemsize

    def gather(width: int, phase: Phase) -> Transfer:
        return all_gather(width * column, axis=axis, size=size, phase=phase)

    def scatter(width: int, phase: Phase) -> Transfer:
        return reduce_scatter(size * width * column, axis=axis, size=size, phase=phase)

    note = tokens_cut(unit)
    for forward, backward in (*note.gathers, *([(note.ends, note.ends)] if note.ends else [])):
        yield gather(forward, Phase.FORWARD)
        yield gather(backward, Phase.BACKWARD)
    if note.around:
        yield gather(width_in, Phase.FORWARD)
        yield scatter(width_out, Phase.FORWARD)
        yield gather(width_out, Phase.BACKWARD)
        if any(w.trained for w in unit.weights):
            yield gather(width_in, Phase.BACKWARD)  # again: forward keeps no more than a shard
        yield scatter(width_in, Phase.BACKWARD)

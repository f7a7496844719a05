"""Units that are whole on every rank of a model whose other units are cut: a choice within a budget of memory.

No torch.
A strategy with an option `memory` chooses by `with_whole_units`, and takes the Layout of chosen units from
`whole_layout`. Source: OSDP (arXiv 2209.13258).

[Note: what is weighed]
    The budget is for what a rank holds from step to step: weights, their copies in the dtype of passes, gradients,
    AdamW's two moments and its counter per weight. A unit that is whole costs the difference of these. It is worth the
    bytes that it does not send, and a fixed number of bytes for each message that it spares (its gradients travel with
    those of the other whole units, in one message). The rank at position 0 counts: of uneven cuts it has the largest
    parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pydantic import ByteSize, TypeAdapter, ValidationError

from rotorch.core.errors import ConfigError
from rotorch.core.knapsack import Item, most_valuable
from rotorch.core.layout import Layout, copies_beside
from rotorch.core.quantities import format_bytes
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import all_reduce

MESSAGE_BYTES = 256 << 10
"""Bytes that a link carries in the time that a message takes besides its bytes: 20 microseconds at 12.5 GB/s."""

_ADAMW_COUNTER_BYTES = 4


@dataclass(frozen=True)
class StaysWhole:
    """Note of a unit that was chosen to be whole on every rank."""


def is_whole(unit: Unit) -> bool:
    """Returns True if a unit was chosen to be whole on every rank."""
    return unit.note(StaysWhole) is not None


def check_memory(memory: str | None, *, kind: str, context: int) -> None:
    """Raises `ValueError` for an option `memory` that is no number of bytes, or whose ranks share sequences."""
    if memory is None:
        return
    try:
        num_bytes = memory_bytes(memory)
    except ValidationError:
        num_bytes = 0
    if num_bytes <= 0:
        raise ValueError(f"memory={memory} is no number of bytes above 0. Write for example memory=2GiB")
    if context > 1:
        raise ValueError(
            f"memory={memory} with context={context}: units of {kind} are whole only where ranks have sequences of "
            "their own. Leave one of the two out"
        )


def memory_bytes(memory: str) -> int:
    """Number of bytes of an option `memory`, such as "2GiB"."""
    return int(TypeAdapter(ByteSize).validate_python(memory))


def whole_layout(unit: Unit, *, axis: str, size: int) -> Layout:
    """Layout of a unit that is whole on `size` ranks: nothing moves but the sum of its gradients."""
    summed = (all_reduce(unit.trained_bytes, axis=axis, size=size),) if size > 1 and unit.trained_bytes else ()
    return Layout(resident_bytes=unit.num_bytes, transfers=summed)


def with_whole_units(spec: ModelSpec, *, strategy: Strategy, axis: str, memory: str) -> ModelSpec:
    """The same model with the units marked that are worth most as whole ones, within the budget.

    Args:
        spec: the model, its units as `strategy` holds them.
        strategy: holds all units in parts (its own option `memory` is not set).
        axis: its mesh axis.
        memory: budget of a rank, see [Note: what is weighed].

    Raises:
        ConfigError: even the model in parts takes more; says the least that would do.
    """
    if any(is_whole(unit) for unit in spec.units):
        return spec
    budget = memory_bytes(memory)
    weighed = _weighed(spec.units, strategy=strategy, axis=axis)
    least = sum(each.held_bytes for each in weighed.values())
    if least > budget:
        raise ConfigError(
            f"{strategy.kind}: memory={memory}, but weights, gradients and AdamW's moments of {spec.name} take "
            f"{least} bytes ({format_bytes(least)}) on a rank with every unit cut over {strategy.num_ranks} ranks. "
            f"Write memory={least} or more, or more ranks"
        )
    groups = _groups(spec.units)
    items = []
    for group in groups:
        more = sum(weighed[unit.name].more_bytes for unit in group)
        saved = sum(weighed[unit.name].saved for unit in group)
        items.append(Item(more, saved if more > 0 else 0))  # else nobody cuts it
    chosen = {unit.name for number in most_valuable(items, limit=budget - least) for unit in groups[number]}
    units = (unit.with_note(StaysWhole()) if unit.name in chosen else unit for unit in spec.units)
    return replace(spec, units=tuple(units))


@dataclass(frozen=True)
class _Weighed:
    """A unit's bytes from step to step in parts, those that it takes more as a whole, and what that is worth."""

    held_bytes: int
    more_bytes: int
    saved: int


def _weighed(units: Sequence[Unit], *, strategy: Strategy, axis: str) -> dict[str, _Weighed]:
    """Weighs units, by name; of equal ones, which differ in names only and which layers have many of, one is asked."""
    whole = partial(whole_layout, axis=axis, size=strategy.num_ranks)
    equal: dict[Unit, _Weighed] = {}
    found: dict[str, _Weighed] = {}
    for unit in units:
        weights = tuple(replace(weight, name="", aliases=()) for weight in unit.weights)
        key = replace(unit, name="", weights=weights, replicated=(), added_once=())
        if key not in equal:
            held_bytes = _held_bytes(unit, strategy.layout, copies=strategy.keeps_copies(unit))
            saved = _cost(strategy.layout(unit)) - whole(unit).sent_bytes()
            equal[key] = _Weighed(held_bytes, _held_bytes(unit, whole, copies=True) - held_bytes, saved)
        found[unit.name] = equal[key]
    return found


def _cost(layout: Layout) -> int:
    return sum(t.sent_bytes + MESSAGE_BYTES * t.num_messages for t in layout.transfers if t.sent_bytes)


def _held_bytes(unit: Unit, layout_of: Callable[[Unit], Layout], *, copies: bool) -> int:
    """Bytes of a unit from step to step: weights, copies if they stay, gradients, moments, counters."""
    layout, copied = layout_of(unit), copies_beside(unit, layout_of=layout_of) if copies else 0
    trained = tuple(weight for weight in unit.weights if weight.trained)
    states = layout_of(replace(unit, weights=trained)).resident_bytes if trained else 0
    held = layout.resident_bytes + layout.padding_bytes + copied
    return held + 3 * states + _ADAMW_COUNTER_BYTES * len(trained)


def _groups(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units that are chosen together: a module, and units whose weights its forward needs whole."""
    groups: list[list[Unit]] = []
    for unit in units:
        if not unit.replicated:
            groups.append([unit])
            continue
        needs = [group for group in groups if any(other.name in unit.replicated for other in group)]
        groups = [group for group in groups if all(group is not needed for needed in needs)]
        groups.append([*(other for group in needs for other in group), unit])
    return groups

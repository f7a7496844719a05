"""Units that are whole on every rank within a budget: bytes, the best choice, and budgets that are too small."""

from dataclasses import replace
from itertools import combinations

import pytest

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import Kind
from rotorch.core.whole_units import MESSAGE_BYTES, is_whole
from rotorch.planner.prediction import predict
from rotorch.strategies import parse_parallel


def mlp(name, width, *, trained=True):
    up = Weight(f"{name}.up", (width, 64), 4, Cut(0, width), trained=trained)
    down = Weight(f"{name}.down", (64, width), 4, Cut(1, width), trained=trained)
    return Unit(name, UnitKind.MODULE, Combine.SUM, (up, down))


NORM = Unit("replicated", UnitKind.REPLICATED, Combine.NONE, (Weight("norm", (64,), 4),))
SPEC = ModelSpec("spec", (*(mlp(f"mlp{n}", 30 + 12 * n) for n in range(6)), NORM))


def osdp(memory, *, inner, size=3):
    (strategy,) = parse_parallel(f"osdp={size}[memory={memory},inner={inner}]")
    return strategy


def held_bytes(strategy, spec=SPEC, rank=0):
    ledger = predict(spec, strategies=(strategy,), rank=rank).ledger
    return ledger["weights"] + ledger["gradients"] + ledger["optimizer"]


def least_bytes(inner, size=3, spec=SPEC):
    return held_bytes(parse_parallel(f"{inner}={size}")[0], spec)


def saved(strategy, unit):
    """Bytes that a whole unit does not send, and messages that it spares."""
    transport = {"transport": "send_receive"} if strategy.kind == "rtp" else {}
    layout = strategy.model_copy(update={"memory": None, **transport}).layout(unit)
    cut = sum(t.sent_bytes + MESSAGE_BYTES * t.num_messages for t in layout.transfers)
    return cut - 2 * unit.trained_bytes * (strategy.size - 1) // strategy.size


@pytest.mark.parametrize("inner", ["rtp", "fsdp"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_the_choice_is_the_best_within_the_budget_to_the_byte(inner, share):
    least, most = least_bytes(inner), held_bytes(parse_parallel("ddp=3")[0])
    budget = int(least + share * (most - least))
    strategy = osdp(budget, inner=inner)
    assert all(held_bytes(strategy, rank=rank) <= budget for rank in range(3))
    none = osdp(least, inner=inner)
    more = {u.name: 4 * (u.num_bytes - none.layout(u).resident_bytes) for u in SPEC.units if u is not NORM}
    units = [unit for unit in SPEC.units if unit is not NORM]
    best = max(
        sum(saved(strategy, unit) for unit in chosen)
        for number in range(len(units) + 1)
        for chosen in combinations(units, number)
        if sum(more[unit.name] for unit in chosen) <= budget - least
    )
    whole = {unit.name for unit in strategy.units_of(SPEC).units if is_whole(unit)}
    found = sum(saved(strategy, unit) for unit in SPEC.units if unit.name in whole)
    if inner == "fsdp":  # there the norm is cut as well
        assert best <= found <= best + saved(strategy, NORM)
    else:
        assert found == best
    assert (share == 1.0) == whole.issuperset(unit.name for unit in units)


@pytest.mark.parametrize(("width", "chosen"), [(639, "trained"), (641, "frozen")])
def test_a_message_is_worth_256_kib(width, chosen):
    """Whole, the trained unit spares three messages and 64 KiB, the frozen one two and 320 KiB; only one has room."""
    units = (mlp("trained", 256), mlp("frozen", width, trained=False))
    spec = replace(SPEC, units=units, blocks=("trained", "frozen"))
    room = 2 * spec.units[0].num_bytes  # the other half of weights, gradients and moments
    strategy = osdp(least_bytes("fsdp", 2, spec) + room, inner="fsdp", size=2)
    assert [unit.name for unit in strategy.units_of(spec).units if is_whole(unit)] == [chosen]


@pytest.mark.parametrize("inner", ["rtp", "fsdp"])
def test_one_byte_less_than_the_least_is_refused_and_names_the_least(inner):
    least = least_bytes(inner)
    osdp(least, inner=inner).check(SPEC)
    with pytest.raises(ConfigError, match=rf"Write memory={least} or more") as caught:
        osdp(least - 1, inner=inner).check(SPEC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("inner", ["rtp", "fsdp"])
def test_whole_units_move_nothing_but_their_gradients(inner):
    strategy = osdp("1GiB", inner=inner)
    frozen = replace(SPEC, units=(*SPEC.units, mlp("frozen", 30, trained=False)))
    for unit in strategy.units_of(frozen).units:
        layout = strategy.layout(unit)
        assert layout.resident_bytes == unit.num_bytes
        assert {t.kind for t in layout.transfers} <= {Kind.ALL_REDUCE}
        assert layout.sent_bytes() == 2 * unit.trained_bytes * 2 // 3


def test_choosing_twice_changes_nothing():
    strategy = osdp(least_bytes("rtp") + 200_000, inner="rtp")
    once = strategy.units_of(SPEC)
    assert any(map(is_whole, once.units)) and not all(map(is_whole, once.units))
    assert set(strategy.units_of(once).units) == set(once.units)


def test_alone_on_a_ring_nothing_is_chosen():
    assert not any(map(is_whole, osdp("1GiB", inner="fsdp", size=1).units_of(SPEC).units))


def test_the_choice_does_not_hang_on_the_transport_that_auto_comes_to():
    """A plan knows it, and a run chooses before."""
    strategy = osdp(least_bytes("rtp") + 200_000, inner="rtp")
    transports = ("auto", "send_receive", "shared_memory", "symmetric_memory")
    every = [strategy.model_copy(update={"transport": name}).units_of(SPEC) for name in transports]
    chosen = [[is_whole(unit) for unit in spec.units] for spec in every]
    assert all(found == chosen[0] for found in chosen) and any(chosen[0]) and not all(chosen[0])

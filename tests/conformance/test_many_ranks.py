"""Bytes of one of 8 or of 64 ranks against its Layout, exactly: the rank alone, the others faked."""

import typing
from fractions import Fraction

import pytest
from layouts import of_size, smallest

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import COMPOSES, STRATEGIES, cuts_features, format_parallel, num_ranks, parse_parallel
from rotorch.testing.fake import as_rank
from rotorch.testing.traffic import expected_resident_bytes

pytestmark = pytest.mark.usefixtures("warm")

LAYOUTS = [
    *(layout for kind in STRATEGIES for n in (8, 64) if (layout := of_size(kind, n))),
    *(
        f"{of_size(outer, 2)},{layout}"
        for outer, inner in sorted(COMPOSES)
        for n in (8, 64)
        if (layout := of_size(inner, n // 2))
    ),
]


def over_messages(parallel):
    """The layout with every transport left to choice set to messages: no other rank is there to share memory with."""
    chosen = [
        s.model_copy(update={name: _messages(s, name) for name, value in s.model_dump().items() if value == "auto"})
        for s in parse_parallel(parallel)
    ]
    return parse_parallel(format_parallel(chosen))


def _messages(strategy, name):
    """Name of messages among the values of an option."""
    choices = typing.get_args(type(strategy).model_fields[name].annotation)
    return next(value for value in ("send_receive", "messages") if value in choices)


def held_bytes(path, strategies, *, rank, num_ranks):
    """Per unit: (what this rank holds, what the Layout says, the unit's bytes, this rank's share of what it holds)."""
    with as_rank(rank, num_ranks=num_ranks):
        with rotorch.on_meta():
            module = causal_lm(load_config(path))
        model = rotorch.parallelize(module, strategies, device="cpu")
        found = {}
        for unit in model.spec.units:
            weights = [model.weights[w.name] for w in unit.weights]
            held = sum(w.local.nbytes for w in weights)
            share = sum(Fraction(w.local.nbytes, w.num_holders) for w in weights)
            found[unit.name] = (held, expected_resident_bytes(model, unit), unit.num_bytes, share)
        model.close()
    return found


def refusal(path, strategies):
    """Why a strategy cannot hold a model, if it says so before any rank starts."""
    with rotorch.on_meta():
        spec = describe(causal_lm(load_config(path)), features=cuts_features(strategies))
    try:
        for strategy in strategies:
            strategy.check(spec)
    except ConfigError as error:
        return str(error)
    return None


FAMILIES = ("llama", "qwen3", "mixtral")


@pytest.mark.parametrize(
    ("parallel", "family"),
    [
        (layout, family)
        if (num_ranks(parse_parallel(layout)) <= 8) == (family != "llama") and "," not in layout
        else pytest.param(layout, family, marks=pytest.mark.slow)
        for layout in LAYOUTS
        for family in FAMILIES
    ],
)
def test_resident_bytes(tiny, parallel, family):
    strategies = over_messages(parallel)
    total = num_ranks(strategies)
    if (why := refusal(tiny(family), strategies)) is not None:
        pytest.skip(why)
    for rank in (0, 1, total // 2 - 1, total - 1):
        for name, (held, expected, *_) in held_bytes(tiny(family), strategies, rank=rank, num_ranks=total).items():
            assert held == expected, (rank, name)


@pytest.mark.parametrize("kind", [kind for kind, strategy in STRATEGIES.items() if strategy.cuts_weights])
def test_all_ranks_together_hold_what_is_cut_once(tiny, kind):
    strategies = over_messages(of_size(kind, 8) or smallest(kind))
    total = num_ranks(strategies)
    by_rank = [held_bytes(tiny("llama"), strategies, rank=rank, num_ranks=total) for rank in range(total)]
    for name, (*_, whole, _) in by_rank[0].items():
        assert sum(found[name][3] for found in by_rank) == whole, name

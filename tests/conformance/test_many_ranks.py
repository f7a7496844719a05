"""What one of 8 or of 64 ranks holds, to the byte what the Layout says: the rank alone, the others faked."""

import pytest
from layouts import of_size

import rotorch
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import COMPOSES, STRATEGIES, format_parallel, parse_parallel
from rotorch.testing.fake import as_rank
from rotorch.testing.traffic import expected_resident_bytes

pytestmark = pytest.mark.usefixtures("warm")

LAYOUTS = [
    *(layout for kind in STRATEGIES for n in (8, 64) if (layout := of_size(kind, n))),
    *(f"{of_size(outer, 2)},{of_size(inner, n // 2)}" for outer, inner in sorted(COMPOSES) for n in (8, 64)),
]


def over_messages(parallel):
    """The layout with every transport left to choice set to messages: no other rank is there to share memory with."""
    chosen = [
        s.model_copy(update={name: "send_receive" for name, value in s.model_dump().items() if value == "auto"})
        for s in parse_parallel(parallel)
    ]
    return parse_parallel(format_parallel(chosen))


def held_bytes(path, strategies, *, rank, num_ranks):
    """Per unit: (what this rank holds, what the Layout says, the unit's bytes)."""
    with as_rank(rank, num_ranks=num_ranks):
        with rotorch.on_meta():
            module = causal_lm(load_config(path))
        model = rotorch.parallelize(module, strategies, device="cpu")
        found = {}
        for unit in model.spec.units:
            local = [model.weights[w.name].local for w in unit.weights]
            held = sum(t.numel() * t.element_size() for t in local)
            found[unit.name] = (held, expected_resident_bytes(model, unit), unit.num_bytes)
        model.close()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("parallel", LAYOUTS)
def test_resident_bytes(tiny, parallel, family):
    strategies = over_messages(parallel)
    num_ranks = strategies[0].num_ranks * (strategies[1].num_ranks if len(strategies) > 1 else 1)
    for rank in (0, 1, num_ranks // 2 - 1, num_ranks - 1):
        for name, (held, expected, _) in held_bytes(tiny(family), strategies, rank=rank, num_ranks=num_ranks).items():
            assert held == expected, (rank, name)


@pytest.mark.parametrize("kind", [kind for kind, strategy in STRATEGIES.items() if strategy.cuts_weights])
def test_all_ranks_together_hold_what_is_cut_once(tiny, kind):
    strategies = over_messages(of_size(kind, 8))
    by_rank = [held_bytes(tiny("llama"), strategies, rank=rank, num_ranks=8) for rank in range(8)]
    for name, (_, _, whole) in by_rank[0].items():
        held = [found[name][0] for found in by_rank]
        assert sum(held) == (whole if held[0] != whole else 8 * whole), name

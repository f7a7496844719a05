"""The same seed and the same global batches give the same losses under every layout: 20 steps of AdamW in float32."""

import pytest
from layouts import is_grid, is_pipeline, of_size, smallest

import rotorch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.shard.materialize import take_recipes
from rotorch.strategies import COMPOSES, STRATEGIES, num_ranks, parse_parallel
from rotorch.testing.parity import parallel_losses, reference_losses
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import fill, plain_config

NUM_STEPS, SEED = 20, 3
TELLING = [kind for kind, s in STRATEGIES.items() if s.cuts_weights and not is_grid(kind) and not is_pipeline(kind)]
"""Each way to cut a weight; of blocks and stages fewer steps are quick: tests/conformance/test_float64_parity.py."""
QUICK = ["single", *(smallest(kind) for kind in TELLING)]
SLOW = [
    *(smallest(kind) for kind in STRATEGIES if kind not in ("single", *TELLING)),
    *(layout for kind in STRATEGIES for size in (1, 3) if (layout := of_size(kind, size)) and layout != kind),
    *(f"{of_size(outer, 2)},{smallest(inner)}" for outer, inner in sorted(COMPOSES)),
]
LAYOUTS = [*QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)]


@pytest.fixture(scope="module")
def config(tiny):
    return plain_config(tiny("llama"))


def build(config):
    with rotorch.on_meta():
        return causal_lm(config).train()


@pytest.fixture(scope="module")
def expected(config):
    watched = build(config)
    module = causal_lm(config).train()
    spec, recipes = describe(watched), take_recipes(watched)
    fill(module, spec=spec, recipes=recipes, seed=SEED)
    return list(reference_losses(module, num_steps=NUM_STEPS, vocab_size=config.vocab_size))


def losses(config, parallel):
    model = rotorch.parallelize(build(config), parallel, device="cpu").materialize(seed=SEED)
    found = list(parallel_losses(model, num_steps=NUM_STEPS, vocab_size=config.vocab_size))
    model.close()
    return found


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_losses_of_twenty_steps(warm, config, expected, parallel):
    by_rank = run_ranks(losses, config, parallel, num_ranks=num_ranks(parse_parallel(parallel)))
    for found in by_rank:
        assert found == by_rank[0]  # every rank returns the loss of the whole batch
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]

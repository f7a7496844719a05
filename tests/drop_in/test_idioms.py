"""Every idiom under every strategy, in float64, held against one process: see idioms.py."""

import importlib

import pytest
from idioms import IDIOMS
from lockstep import Models, expected_of, problems_of

from rotorch.models.hf import load_config
from rotorch.strategies import STRATEGIES, batch_ranks, num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("single", "ddp=2", "fsdp=2", "rtp=2", "rtp=2[transport=send_receive]")


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for kind in STRATEGIES:
        importlib.import_module(f"rotorch.strategies.{kind}.apply")
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def config(tiny):
    return load_config(tiny("llama"))


@pytest.fixture(scope="module")
def expected(config):
    """What one process makes of each idiom for so many shares, made once."""
    made = {}

    def of(shares):
        for name in IDIOMS:
            if (name, shares) not in made:
                made[name, shares] = expected_of(name, config, num_shares=shares)
        return {name: made[name, shares] for name in IDIOMS}

    return of


def all_problems(config, expected, layout):
    models = Models(config, layout)
    problems = {name: problems_of(name, config, expected[name], models=models) for name in IDIOMS}
    models.close()
    return {name: found for name, found in problems.items() if found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loops_of_ones_own_do_what_they_do_on_one_process(config, expected, layout):
    strategies = parse_parallel(layout)
    theirs = expected(batch_ranks(strategies))
    for rank, found in enumerate(
        run_ranks(all_problems, config, theirs, layout, num_ranks=num_ranks(strategies), timeout_s=300)
    ):
        assert not found, f"rank {rank}: " + "\n".join(f"{name}: {what[:3]}" for name, what in found.items())

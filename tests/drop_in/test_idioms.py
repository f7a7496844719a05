"""Every idiom under every strategy, in float64, held against one process: see idioms.py."""

import importlib

import pytest
from idioms import IDIOMS
from lockstep import Models, expected_of, problems_of

from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.strategies import batch_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

LAYOUTS = {
    1: ("single",),
    2: ("ddp=2", "fsdp=2", "rtp=2", "rtp=2[transport=send_receive]"),
}
"""By the number of ranks: those of one line share a group of ranks, forked once."""


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    load_step_code(["ddp", "fsdp", "rtp"])
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def found(tiny):
    """By layout and rank: the problems of each idiom."""
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 90
    expected = {
        shares: {name: expected_of(name, config, num_shares=shares) for name in IDIOMS}
        for shares in {shares_of(layout) for layouts in LAYOUTS.values() for layout in layouts}
    }
    problems = {}
    for num_ranks, layouts in LAYOUTS.items():
        by_rank = run_ranks(all_problems, config, expected, layouts, num_ranks=num_ranks, timeout_s=600)
        problems.update({layout: [each[layout] for each in by_rank] for layout in layouts})
    return problems


def shares_of(layout):
    return batch_ranks(parse_parallel(layout))


def all_problems(config, expected, layouts):
    problems = {}
    for layout in layouts:
        models, theirs = Models(config, layout), expected[shares_of(layout)]
        found = {name: problems_of(name, config, theirs[name], models=models) for name in IDIOMS}
        problems[layout] = {name: each for name, each in found.items() if each}
        models.close()
    return problems


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts])
def test_loops_of_ones_own_do_what_they_do_on_one_process(found, layout):
    for rank, problems in enumerate(found[layout]):
        assert not problems, f"rank {rank}: " + "\n".join(f"{name}: {what[:3]}" for name, what in problems.items())

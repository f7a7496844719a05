"""Idioms under layouts, in float64, held against one process (see idioms.py), and the page that says so.

A sample of the product in which each idiom meets a layout of two ranks, and each layout some idioms; all of it is slow.
"""

import importlib
import os

import idioms_page
import pytest
from idioms import IDIOMS
from lockstep import REFUSED, Models, expected_of, problems_of

from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

LAYOUTS = (
    "single",
    "ddp=2",
    "fsdp=2",
    "rtp=2",
    "rtp=2[recompute=none]",
    "rtp=2[recompute=slice]",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,recompute=slice]",
    "rtp=2[transport=send_receive,buffering=in_place]",
    "osdp=2[memory=1MiB]",
    "megatron=2",
    "megatron=2[sequence_parallel=true]",
    "atp=1x2",
    "summa=2x2",
    "tesseract=2x2x1",
    "ddp=2,rtp=2",
    "ddp=2,atp=1x2",
    "fsdp=2,megatron=2",
    "rtp=2,megatron=2",
    "ddp=2,fsdp=2",
    "ddp=2,rtp=2[transport=send_receive]",
)


def ranks_of(layout):
    return num_ranks(parse_parallel(layout))


def shares_of(layout):
    return batch_ranks(parse_parallel(layout))


EVERY = {1: 15, 2: sum(ranks_of(layout) == 2 for layout in LAYOUTS), 4: 31}
"""By the number of ranks: one idiom in so many is of the sample. Two ranks take each idiom once, in turn."""

ALSO = {
    "fsdp=2": ("a_loss_on_hidden_states", "a_loss_on_attention_maps", "a_graph_that_is_kept"),
    "ddp=2": ("weights_that_a_loss_leaves_out",),
    "rtp=2[transport=send_receive]": ("a_graph_that_is_kept",),
    "atp=1x2": ("a_loss_on_attention_maps", "gradients_of_inputs"),
}
"""Cells of the sample by name, with which each idiom is exact somewhere, and each refusal is seen."""

CELLS = {
    layout: [
        name
        for number, name in enumerate(IDIOMS)
        if (number + place) % EVERY[ranks_of(layout)] == 0 or name in ALSO.get(layout, ())
    ]
    for place, layout in enumerate(LAYOUTS)
}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "atp", "summa", "tesseract"])
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def config(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 90
    config.hidden_size, config.intermediate_size, config.head_dim = 48, 72, 8
    return config


@pytest.fixture(scope="module")
def found(config):
    """By layout and idiom: what each rank has to say, of the sample."""
    return outcomes_of(config, CELLS)


def outcomes_of(config, cells):
    """Forks one group of ranks for all layouts that need as many."""
    wanted = {(shares_of(layout), name): None for layout, names in cells.items() for name in names}
    expected = {(shares, name): expected_of(name, config, num_shares=shares) for shares, name in wanted}
    found = {}
    for count in sorted({ranks_of(layout) for layout in cells}):
        mine = {layout: names for layout, names in cells.items() if ranks_of(layout) == count}
        by_rank = run_ranks(all_problems, config, expected, mine, num_ranks=count, timeout_s=3600)
        for layout, names in mine.items():
            found[layout] = {name: [problems[layout, name] for problems in by_rank] for name in names}
    return found


def all_problems(config, expected, cells):
    problems = {}
    for layout, names in cells.items():
        models = Models(config, layout)
        for name in names:
            problems[layout, name] = problems_of(name, config, expected[shares_of(layout), name], models=models)
        models.close()
    return problems


def check(found, layout):
    """Holds what ranks have found under a layout against the page."""
    page = idioms_page.parse(idioms_page.PAGE.read_text())
    wrong = []
    for name, by_rank in found[layout].items():
        wanted = [REFUSED + page[name][layout]] if page[name][layout] else []
        wrong += [f"rank {rank}: {name}: {it[:3]}" for rank, it in enumerate(by_rank) if it != wanted]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_of_ones_own_does_what_it_does_on_one_process(found, layout):
    check(found, layout)


def test_the_sample_covers_every_idiom_and_layout():
    assert len(IDIOMS) >= 40
    assert all(len(names) >= (2 if ranks_of(layout) == 4 else 4) for layout, names in CELLS.items())
    of_two = [names for layout, names in CELLS.items() if ranks_of(layout) == 2]
    assert all(any(name in names for names in of_two) for name in IDIOMS)
    page = idioms_page.parse(idioms_page.PAGE.read_text())
    sampled = [(name, page[name][layout]) for layout, names in CELLS.items() for name in names]
    assert {name for name, line in sampled if not line} == set(IDIOMS)
    assert {line for _, line in sampled} == {line for lines in page.values() for line in lines.values()}


def test_the_page_is_as_it_was_written():
    text = idioms_page.PAGE.read_text()
    page = idioms_page.parse(text)
    assert idioms_page.render(page) == text, "docs/idioms.md: run make idioms"
    assert list(page) == list(IDIOMS)
    assert all(list(cells) == list(LAYOUTS) for cells in page.values())


@pytest.mark.slow
def test_every_idiom_under_every_layout(config):
    found = outcomes_of(config, {layout: list(IDIOMS) for layout in LAYOUTS})
    if os.environ.get(idioms_page.WRITES):
        idioms_page.PAGE.write_text(idioms_page.render(as_on_the_page(found)))
    for layout in LAYOUTS:
        check(found, layout)


def as_on_the_page(found):
    """Refusals that all ranks agree on; anything else stays a problem of the test's."""
    return {name: {layout: line_of(found[layout][name]) for layout in LAYOUTS} for name in IDIOMS}


def line_of(by_rank):
    first = by_rank[0]
    refused = len(first) == 1 and first[0].startswith(REFUSED) and all(it == first for it in by_rank)
    return first[0].removeprefix(REFUSED) if refused else ""

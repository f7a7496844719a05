"""Losses that look at weights themselves, as penalties do: their gradients and those of the pass add up."""

from functools import cache

import pytest
from idioms import Loop
from lockstep import build
from torch.distributed.tensor import DTensor

import rotorch
from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks

LAYOUTS = (
    "ddp=2",
    "fsdp=2",
    "rtp=2",
    "rtp=2[recompute=slice]",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,buffering=in_place]",
    "megatron=2",
    "atp=1x2",
    "tesseract=1x1x2[zero=true]",
    "osdp=2[memory=6MiB]",
)
SLOW = ("rtp=2[recompute=slice]", "rtp=2[transport=send_receive,buffering=in_place]")
"""Those whose sums over ranks are made as by other layouts here."""

OF_FOUR = ("ddp=2,rtp=2[transport=send_receive]", "fsdp=2,megatron=2")
MORE_OF_FOUR = ("ddp=2,fsdp=2", "ddp=2,megatron=2")
NUM_BACKWARDS = 3


def penalty(model):
    """Of all weights: a half of their squares."""
    squares = [weight.pow(2).sum() for weight in model.parameters()]
    return sum(s.full_tensor() if isinstance(s, DTensor) else s for s in squares) / 2


@pytest.fixture(scope="module")
def config(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 92  # even: penalties on uneven parts are refused
    return config


def gradients_by_layout(config, layouts):
    with exact_arithmetic():
        return {layout: errors(config, layout) for layout in layouts}


def errors(config, layout):
    """Relative errors of gradients after each of several backwards, none cleared; gradients that a hook has seen."""
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    alone = build(config, seed=1)
    loop = Loop(model, None, model.batch_rank, config.vocab_size)
    others = [Loop(alone, None, share, config.vocab_size) for share in range(model.num_batch_ranks)]
    norm, seen = next(p for n, p in model.named_parameters() if n.endswith("norm.weight")), []
    norm.register_hook(lambda gradient: seen.append(gradient.to_local().clone()) and None)
    found = []
    for step in range(NUM_BACKWARDS):
        first = 0.1 * penalty(model) if step == 1 else 0  # then backward comes to it last
        then = 0.1 * penalty(model) if step != 1 else 0
        (first + model(**loop.batch(step)).loss + then).backward()
        for other in others:
            (alone(**other.batch(step)).loss / len(others)).backward()
        (0.1 * penalty(alone)).backward()
        expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
        found.append(max(gradient_errors(model.weights, expected).values()))
    summed = float((sum(seen) - norm.grad.to_local()).abs().max())
    model.close()
    return found, summed


@pytest.fixture(scope="module")
def ranks(config):
    """Returns what each rank has found, of the layouts measured together with one."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "atp", "tesseract"])

    @cache
    def measured(*, slow):
        layouts = [layout for layout in LAYOUTS if (layout in SLOW) == slow]
        return run_ranks(gradients_by_layout, config, layouts, num_ranks=2, timeout_s=300)

    return lambda layout: measured(slow=layout in SLOW)


def check(ranks, layout):
    for of_rank in ranks:
        found, summed = of_rank[layout]
        assert max(found) < 1e-10
        assert summed < 1e-12


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in LAYOUTS]
)
def test_gradients_of_a_penalty_are_added(ranks, layout):
    check(ranks(layout), layout)


@pytest.mark.parametrize("layouts", [OF_FOUR, pytest.param(MORE_OF_FOUR, marks=pytest.mark.slow)], ids=["two", "more"])
def test_gradients_of_a_penalty_are_added_once_over_replicas(config, layouts):
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])
    ranks = run_ranks(gradients_by_layout, config, layouts, num_ranks=4, timeout_s=300)
    for layout in layouts:
        check(ranks, layout)

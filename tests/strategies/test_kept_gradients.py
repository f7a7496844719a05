"""Gradients of a ring's slices over several steps: kept after they were cleared, and added to, under what is around."""

import math

import pytest
import torch

import rotorch
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.ranks import run_ranks

SLOW = pytest.mark.slow
LAYOUTS = [
    "rtp=2",
    "rtp=2[transport=send_receive]",
    pytest.param("rtp=2[transport=send_receive,visits=1]", marks=SLOW),
    pytest.param("rtp=2[buffering=in_place,transport=send_receive]", marks=SLOW),
    pytest.param("ddp=2,rtp=2", marks=SLOW),
    "ddp=2,rtp=2[transport=send_receive]",
    "pp=2,rtp=2",
    pytest.param("pp=2,rtp=2[transport=send_receive]", marks=SLOW),
    "ddp=2,pp=2,rtp=1",
    pytest.param("ddp=2,pp=2,rtp=2", marks=SLOW),
    pytest.param("ddp=2,zeropp=1x2[inner=rtp]", marks=SLOW),
    pytest.param("ddp=2,pp=2,rtp=2[transport=send_receive]", marks=SLOW),
    pytest.param("rtp=2[transport=send_receive],megatron=2", marks=SLOW),
]


def steps(path, parallel, hooks=False):
    """Largest differences: of kept gradients after further steps, and of the sum of three steps."""
    with exact_arithmetic():
        with rotorch.on_meta():
            module = widen(causal_lm(load_config(path))).train()
        model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=1)
        for held in list(model.weights.values())[::2] if hooks else ():
            held.parameter.register_hook(lambda gradient: gradient)
        torch.manual_seed(3)
        ids = torch.randint(0, module.config.vocab_size, (8, 12))
        rows = ids.tensor_split(model.num_batch_ranks)[model.batch_rank]
        batches = [{"input_ids": row[None], "labels": row[None]} for row in rows]
        model.forward_backward(batches)
        kept = {name: held.parameter.grad for name, held in model.weights.items()}
        before = {name: held.local_grad.clone() for name, held in model.weights.items()}
        model.zero_grad()
        for _ in range(3):
            model.forward_backward(batches, accumulate=True)
        changed = max(_largest(kept[name].to_local() - values) for name, values in before.items())
        added = max(_largest(model.weights[name].local_grad - 3 * values) for name, values in before.items())
        model.close()
    return changed, added


def _largest(values):
    return float(values.abs().max()) if values.numel() else 0.0


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_what_was_cleared_stays_as_it_is_and_what_was_not_is_added_to(tiny, parallel):
    num_ranks = math.prod(strategy.num_ranks for strategy in parse_parallel(parallel))
    for changed, added in run_ranks(steps, tiny("qwen3"), parallel, num_ranks=num_ranks):
        assert changed == 0.0 and added < 1e-11


@pytest.mark.parametrize(
    "parallel", ["rtp=2[transport=send_receive]", "pp=2,rtp=2", pytest.param("pp=2,tesseract=1x1x2", marks=SLOW)]
)
def test_hooks_of_some_gradients_see_a_step_alone_and_leave_the_sum_right(tiny, parallel):
    num_ranks = math.prod(strategy.num_ranks for strategy in parse_parallel(parallel))
    for changed, added in run_ranks(steps, tiny("llama"), parallel, True, num_ranks=num_ranks):
        assert changed == 0.0 and added < 1e-11

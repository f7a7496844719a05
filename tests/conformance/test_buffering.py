"""One matrix for rtp: in place and out of place, what is recomputed, accumulation, precision, transport.

In float64 every combination is one process's loss and gradients to 1e-10, over two optimizer steps.

In bfloat16 it is held against one process in float32, whose own errors are a thousandth of what is looked at here: its
gradients may be off by at most twice what those of one process under the same autocast are off, and a loss, a mean over
two hundred tokens, by a quarter of the 2^-8 that each of them may be off. Every product of both keeps 8 bits. The
sum over slices is rounded once more per slice, and an embedding's rows are rounded, which one process does not do: so
more than once its error, but of the same kind. A wrong factor, or a rank's part missing, is off by a third and more.
"""

from functools import cache
from itertools import product

import pytest
import torch

import rotorch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.shard.materialize import take_recipes
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors, relative_error
from rotorch.testing.parity import parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import fill, plain_config, reference_step

RANKS, STEPS, SEED = 3, 2, 5
EXACT = 1e-10
TIMES = 2.0  # what gradients of one process under autocast are off
LOSS_BAR = 2.0**-10
PRECISIONS = ("float64", "bfloat16")
WAYS = (
    ("shared_memory", "out_of_place"),  # there is nothing to buffer: see tests/strategies/test_layouts.py
    ("send_receive", "out_of_place"),
    ("send_receive", "in_place"),
)
CELLS = list(product(("none", "head", "all_but_attention", "slice"), (1, 4)))


@pytest.fixture(scope="module")
def config(tiny):
    return plain_config(tiny("llama"), layers=2)


def build(config, precision):
    with rotorch.on_meta():
        module = causal_lm(config).train()
        return widen(module) if precision == "float64" else module


def optimizer_over(parameters):
    return torch.optim.SGD(parameters, lr=0.1)  # steps as large as gradients are: errors show in the next one


def one_process(config, precision, *, autocast=False):
    """Losses and gradients of every step."""
    watched = build(config, precision)
    module = causal_lm(config).train()
    module = widen(module) if precision == "float64" else module
    fill(module, spec=describe(watched), recipes=take_recipes(watched), seed=SEED)
    optimizer, steps = optimizer_over(module.parameters()), []
    for step in range(STEPS):
        computing = exact_arithmetic() if precision == "float64" else torch.autocast("cpu", torch.bfloat16, autocast)
        with computing:
            loss = float(reference_step(module, parity_batch(step=step, vocab_size=config.vocab_size)))
        steps.append((loss, {name: p.grad.clone() for name, p in module.named_parameters()}))
        optimizer.step()
    return steps


@pytest.fixture(scope="module")
def expected(config):
    """What one process gets, by precision."""
    return {"float64": one_process(config, "float64"), "bfloat16": one_process(config, "float32")}


@pytest.fixture(scope="module")
def bars(config, expected):
    """By precision: the largest errors of a loss and of a gradient."""
    error = 0.0
    autocast = one_process(config, "float32", autocast=True)
    for (_, gradients), (_, true) in zip(autocast, expected["bfloat16"], strict=True):
        floor = 1e-3 * max(float(g.abs().max()) for g in true.values())  # as in `gradient_errors`
        error = max(error, *(relative_error(gradients[name], true[name], floor=floor) for name in true))
    assert error < 0.15  # or the bar would let a missing part through
    return {"float64": (EXACT, EXACT), "bfloat16": (LOSS_BAR, TIMES * error)}


def errors(config, expected, precision, transport, buffering):
    """On a rank: the largest errors of loss and gradients, by (what is recomputed, accumulation)."""
    found = {}
    for recompute, accumulation in CELLS:
        model = rotorch.parallelize(
            build(config, precision),
            f"rtp={RANKS}[recompute={recompute},transport={transport},buffering={buffering}]",
            device="cpu",
            autocast_dtype=torch.bfloat16 if precision == "bfloat16" else None,
        ).materialize(seed=SEED)
        optimizer, worst = optimizer_over(model.parameters()), [0.0, 0.0]
        for step, (loss, gradients) in enumerate(expected):
            batch = parity_batch(step=step, vocab_size=config.vocab_size)
            mine = {name: rows.tensor_split(RANKS)[model.batch_rank] for name, rows in batch.items()}
            parts = [
                {name: rows.tensor_split(accumulation)[i] for name, rows in mine.items()} for i in range(accumulation)
            ]
            if precision == "float64":
                with exact_arithmetic():
                    ours = float(model.forward_backward(parts))
            else:
                ours = float(model.forward_backward(parts))
            worst[0] = max(worst[0], abs(ours - loss) / abs(loss))
            worst[1] = max(worst[1], *gradient_errors(model.weights, gradients).values())
            optimizer.step()
            optimizer.zero_grad()
        found[recompute, accumulation] = worst
        model.close()
    return found


@pytest.fixture(scope="module")
def measured(warm, config, expected):
    """The worst rank's errors of every cell; one fork for those that differ only in what a step does."""

    @cache
    def of(precision, transport, buffering):
        args = (config, expected[precision], precision, transport, buffering)
        by_rank = run_ranks(errors, *args, num_ranks=RANKS, timeout_s=400)
        return {cell: [max(found[cell][i] for found in by_rank) for i in range(2)] for cell in CELLS}

    return of


@pytest.mark.parametrize(("recompute", "accumulation"), CELLS)
@pytest.mark.parametrize(("transport", "buffering"), WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_cell_of_the_matrix(measured, bars, precision, transport, buffering, recompute, accumulation):
    loss_error, gradient_error = measured(precision, transport, buffering)[recompute, accumulation]
    assert loss_error <= bars[precision][0]
    assert gradient_error <= bars[precision][1]

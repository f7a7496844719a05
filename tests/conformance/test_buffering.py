"""One matrix for rtp: in place or not, what is recomputed, accumulation, precision, transport, compiled or not.

In float64 every combination is one process's loss and gradients to 1e-10, over two optimizer steps.

In bfloat16 it is held against one process in float32, whose own errors are a thousandth of what is looked at here: its
gradients may be off by at most twice what those of one process in the same precision are off, and a loss, a mean over
two hundred tokens, by a quarter of the 2^-8 that each of them may be off. That process runs under the same autocast,
or, for weights in bfloat16, with a copy of the model in bfloat16, whose gradients go to weights in float32. Every
product of both keeps 8 bits. The sum over slices is rounded once more per slice, and under autocast an embedding's rows
are, which one process does not do: so more than once its error, but of the same kind. Roundings go either way, and what
they do to a gradient's length along the true one averages out: that is off by a hundredth, may be by three, and is by
eight if one rank's part of one batch of four is missing or counted twice.
"""

import copy
import math
from functools import cache
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

import rotorch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.shard.materialize import take_recipes
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors, gradients_along, relative_error
from rotorch.testing.parity import parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import fill, plain_config, reference_step

RANKS, STEPS, SEED = 3, 2, 5
EXACT = 1e-10
TIMES = 2.0  # what gradients of one process under autocast are off
LOSS_BAR = 2.0**-10
LENGTH_BAR = 0.03
SMALL = 1e-3  # of the model's largest gradient: less is zero but for rounding (the bias of keys)
PRECISIONS = ("float64", "bfloat16", "autocast_bfloat16")
WAYS = (
    ("shared_memory", "out_of_place"),  # there is nothing to buffer: see tests/strategies/test_layouts.py
    ("send_receive", "out_of_place"),
    ("send_receive", "in_place"),
)
ALL_BUT_ATTENTION = "all_but_attention"  # picks operations, which a graph has none of


EACH = (("none", 1), ("head", 1), (ALL_BUT_ATTENTION, 1), ("slice", 4))
QUICK = {
    ("float64", *WAYS[0]): (("none", 1), (ALL_BUT_ATTENTION, 1)),
    ("float64", *WAYS[1]): (("head", 1), (ALL_BUT_ATTENTION, 1)),
    ("float64", *WAYS[2]): EACH,
    ("bfloat16", *WAYS[0]): (("none", 1),),
    ("bfloat16", *WAYS[2]): (("none", 1), ("slice", 4)),
    ("autocast_bfloat16", *WAYS[2]): (("none", 1), ("slice", 4)),
}
"""Each value where slices come in place; of the rest two. Of four micro-batches steps take four times as long."""


def cells(*, compile, quick=None):
    """Of each way, or those of `quick`."""
    recompute = ("none", "head", *(() if compile else (ALL_BUT_ATTENTION,)), "slice")
    return list(product(recompute, (1, 4))) if quick is None else list(quick)


def not_quick(way):
    return [cell for cell in cells(compile=False) if cell not in QUICK.get(way, ())]


@pytest.fixture(scope="module")
def config(tiny):
    return plain_config(tiny("llama"), layers=2)


def build(config, precision):
    with rotorch.on_meta():
        module = causal_lm(config).train()
        return widen(module) if precision == "float64" else module


def optimizer_over(parameters):
    return torch.optim.SGD(parameters, lr=0.1)  # steps as large as gradients are: errors show in the next one


def in_bfloat16(module):
    """A copy of a module whose weights are in bfloat16."""
    half = copy.deepcopy(module)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    return half


def one_process(config, precision):
    """Losses and gradients of every step."""
    watched = build(config, precision)
    module = causal_lm(config).train()
    module = widen(module) if precision == "float64" else module
    fill(module, spec=describe(watched), recipes=take_recipes(watched), seed=SEED)
    optimizer, steps = optimizer_over(module.parameters()), []
    for step in range(STEPS):
        batch, computing = parity_batch(step=step, vocab_size=config.vocab_size), module
        if precision == "bfloat16":
            computing = in_bfloat16(module)
        autocast = torch.autocast("cpu", torch.bfloat16, precision == "autocast_bfloat16")
        with exact_arithmetic() if precision == "float64" else autocast:
            loss = float(reference_step(computing, batch))
        for parameter, computed in zip(module.parameters(), computing.parameters(), strict=True):
            parameter.grad = computed.grad.to(parameter.dtype)
        steps.append((loss, {name: p.grad.clone() for name, p in module.named_parameters()}))
        optimizer.step()
    return steps


@pytest.fixture(scope="module")
def expected(config):
    """Results of one process, by precision."""
    true = one_process(config, "float32")
    return {"float64": one_process(config, "float64"), "bfloat16": true, "autocast_bfloat16": true}


@pytest.fixture(scope="module")
def bars(config, expected):
    """By precision: the largest errors of a loss, of a gradient, and of its length along the true one."""
    found = {"float64": (EXACT, EXACT, EXACT)}
    for precision in ("bfloat16", "autocast_bfloat16"):
        error = 0.0
        for (_, gradients), (_, true) in zip(one_process(config, precision), expected[precision], strict=True):
            floor = 1e-3 * max(float(g.abs().max()) for g in true.values())  # as in `gradient_errors`
            error = max(error, *(relative_error(gradients[name], true[name], floor=floor) for name in true))
        assert error < 0.15  # or the bar would let a missing part through
        found[precision] = (LOSS_BAR, TIMES * error, LENGTH_BAR)
    return found


def errors(config, expected, precision, transport, buffering, compile, quick):
    """On a rank, by (what is recomputed, accumulation): the largest errors of loss and gradients, and `gradients_along`
    of each (step, weight).
    """
    found = {}
    for recompute, accumulation in cells(compile=compile, quick=quick):
        model = rotorch.parallelize(
            build(config, precision),
            f"rtp={RANKS}[recompute={recompute},transport={transport},buffering={buffering}]",
            device="cpu",
            autocast_dtype=torch.bfloat16 if precision == "autocast_bfloat16" else None,
            param_dtype=torch.bfloat16 if precision == "bfloat16" else None,
            compile=compile,
        ).materialize(seed=SEED)
        optimizer, worst, along = optimizer_over(model.parameters()), [0.0, 0.0], {}
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
            along |= {(step, name): sums for name, sums in gradients_along(model.weights, gradients).items()}
            optimizer.step()
            optimizer.zero_grad()
        found[recompute, accumulation] = (*worst, along)
        model.close()
    assert (counters["stats"]["unique_graphs"] > 0) == compile
    return found


def worst_of(ranks):
    """Of one cell, from what all ranks found."""
    largest = max(math.sqrt(square) for *_, along in ranks for _, square in along.values())
    lengths = []
    for weight in ranks[0][-1]:
        product, square = (sum(along[weight][i] for *_, along in ranks) for i in range(2))
        if math.sqrt(square) > SMALL * largest:
            lengths.append(abs(product / square - 1))
    return max(loss for loss, *_ in ranks), max(gradient for _, gradient, _ in ranks), max(lengths)


@pytest.fixture(scope="module")
def measured(warm, config, expected):
    """Errors of every cell, as `bars` has them; one fork for those that differ only in what a step does."""

    @cache
    def of(precision, transport, buffering, compile, quick=None):
        args = (config, expected[precision], precision, transport, buffering, compile, quick)
        by_rank = run_ranks(errors, *args, num_ranks=RANKS, timeout_s=900 if compile else 400)
        return {cell: worst_of([found[cell] for found in by_rank]) for cell in by_rank[0]}

    return of


@pytest.mark.parametrize(
    ("precision", "transport", "buffering", "recompute", "accumulation"),
    [
        pytest.param(precision, *way, *cell, marks=() if cell in QUICK.get((precision, *way), ()) else pytest.mark.slow)
        for precision, way in product(PRECISIONS, WAYS)
        for cell in cells(compile=False)
    ],
)
def test_a_cell_of_the_matrix(measured, bars, precision, transport, buffering, recompute, accumulation):
    cell, way = (recompute, accumulation), (precision, transport, buffering)
    chosen = QUICK.get(way, ())
    holds(measured(*way, False, chosen if cell in chosen else tuple(not_quick(way)))[cell], bars[precision])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("recompute", "accumulation"), cells(compile=True))
@pytest.mark.parametrize(("transport", "buffering"), WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_compiled_cell(measured, bars, precision, transport, buffering, recompute, accumulation):
    holds(measured(precision, transport, buffering, True)[recompute, accumulation], bars[precision])


def holds(found, bars):
    for what, error, bar in zip(("loss", "gradient", "length"), found, bars, strict=True):
        assert error <= bar, (what, found)

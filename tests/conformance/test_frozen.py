"""Bytes that ranks send if some weights are frozen: no gradients of those, under any strategy or composition."""

import pytest
from layouts import of_size, smallest
from test_many_ranks import over_messages

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.spec import UnitKind
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import COMPOSES, STRATEGIES, format_parallel, num_ranks
from rotorch.testing.parity import my_micro_batches, parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import micro_batch_of, traffic_problems

ALONE = [smallest(kind) for kind in STRATEGIES if of_size(kind, 2) or of_size(kind, 4)]
COMPOSED = [f"{of_size(outer, 2)},{layout}" for outer, inner in sorted(COMPOSES) if (layout := of_size(inner, 2))]
TELLING = ["ddp=2,rtp=2", "ddp=2,fsdp=2", "rtp=2,megatron=2"]
"""Of compositions: replicas of slices in one buffer, and of shards with gradients of their own."""


def with_every_second_frozen(path):
    """A model of two layers in which every second unit, and every second uncut weight, is frozen, as by adapters.

    Embeddings are trained. Below a frozen one no gradient goes, so strategies that send gradients of activations send
    fewer than their formulas say.
    """
    config = load_config(path)
    config.num_hidden_layers = 2
    with rotorch.on_meta():
        module = causal_lm(config)
    spec = describe(module)
    cut = [weight.name for unit in spec.cut_units[1::2] for weight in unit.weights]
    whole = [w.name for unit in spec.units if unit.kind is UnitKind.REPLICATED for w in unit.weights]
    for name in (*cut, *whole[1::2]):
        module.get_parameter(name).requires_grad_(False)
    return module


def differences(path, layouts):
    """Differences of this rank's traffic from the Layouts, by layout."""
    problems = {}
    for layout in layouts:
        module = with_every_second_frozen(path)
        model = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
        batch = my_micro_batches(model, parity_batch(step=0, vocab_size=module.config.vocab_size))[0]
        for _ in range(3):  # what a library exchanges once is no part of a step: DDP in its second, our third
            model.forward_backward(batch, accumulate=True)
        with Meter() as meter:
            model.forward_backward(batch, accumulate=True)
        problems[layout] = list(traffic_problems(model, meter, batch=micro_batch_of(model, batch)))
        model.close()
    return problems


@pytest.mark.parametrize(
    ("size", "layouts"),
    [(2, ALONE), (4, [*ALONE, *TELLING]), pytest.param(4, COMPOSED, marks=pytest.mark.slow)],
    ids=["alone", "four ranks", "composed"],
)
def test_frozen_weights_send_no_gradients(tiny, size, layouts):
    over = map(over_messages, layouts)
    examined = [format_parallel(strategies) for strategies in over if num_ranks(strategies) == size]
    for found in run_ranks(differences, tiny("llama"), examined, num_ranks=size):
        assert not any(found.values()), found

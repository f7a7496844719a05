"""Layers that multiply with `weight.T` on grids of ranks and planes: as on one process, in float64."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import rotorch
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.batches import global_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import compute_exactly

pytestmark = pytest.mark.usefixtures("warm")


def stepped(path, layout):
    """Loss and whole gradients of a Llama all of whose linear layers, the head too, are products with a transpose."""
    values = {**json.loads(Path(path).read_text()), "attention_bias": False, "mlp_bias": False}
    config = config_from_dict(values, source="test")
    compute_exactly(config)
    with rotorch.on_meta():
        module = widen(causal_lm(config)).train()
    if layout != "single":
        for child in module.modules():
            if type(child) is nn.Linear:
                child.forward = partial(lambda layer, x: x @ layer.weight.T, child)
    model = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
    batch = global_batch(
        seed=0, step=0, num_shares=2, num_micro_batches=1, num_rows=2, num_tokens=16, vocab_size=config.vocab_size
    )
    mine = {name: rows.chunk(model.num_batch_ranks)[model.batch_rank] for name, rows in batch.items()}
    with exact_arithmetic():
        loss = float(model.forward_backward(mine))
    gradients = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return loss, gradients


@pytest.mark.parametrize("layout", ["summa=2x2", "atp=2x2"])
def test_products_with_transposes_are_exact(tiny, layout):
    ((loss, expected),) = run_ranks(stepped, tiny("llama"), "single", num_ranks=1)
    for found, gradients in run_ranks(stepped, tiny("llama"), layout, num_ranks=4):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)

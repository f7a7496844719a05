"""A plan of one's own is taken literally over every transport: what cannot be right over one is refused over all."""

import importlib

import pytest
import torch
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.testing.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for name in ("rtp", "megatron"):
        importlib.import_module(f"rotorch.strategies.{name}.apply")


class MultipliesFromTheRight(nn.Module):
    """A linear layer's weight, cut along its outputs, as a matrix `[inputs, outputs]`."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        return x @ self.mix.weight


def refusal(layout):
    model = rotorch.parallelize(
        MultipliesFromTheRight(),
        layout,
        device="cpu",
        loss=lambda module, batch, _: module(batch["x"]).sum(),
        plan={"mix": "colwise_gather_output"},
    )
    try:
        model.forward_backward({"x": torch.ones(2, 6), "labels": torch.zeros(2, dtype=torch.int64)})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", ["rtp=2", "rtp=2[transport=send_receive]", "megatron=2"])
def test_a_product_that_slices_cannot_make_is_refused_over_every_transport(layout):
    for message in run_ranks(refusal, layout, num_ranks=2):
        assert "'mix.weight' is used by" in message

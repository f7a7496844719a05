"""Models that are called in a loop of one's own are gone with their memory once nobody refers to them."""

import gc
import weakref

import pytest
import torch
from torch import nn

import rotorch
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")


def is_freed(layout):
    made = rotorch.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layout, device="cpu")
    seen = weakref.ref(made), weakref.ref(made.weights["0.weight"])
    made(torch.ones(2, 4)).sum().backward()
    made.close()
    del made
    gc.collect()
    return [each() is None for each in seen]


@pytest.mark.parametrize("layout", ["ddp=2", "rtp=2", "megatron=2"])
def test_nothing_keeps_a_model_that_has_been_called(layout):
    assert run_ranks(is_freed, layout, num_ranks=2) == [[True, True], [True, True]]

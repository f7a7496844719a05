"""Ranks that were given different values for a model's weights are told so."""

import warnings

import pytest
import torch
from torch import nn

import rotorch
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


def build(*, seed, dtype):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)


def warned(layout, dtype):
    """Warnings on a rank: of a model that is the same on all, and of one that is not."""
    said = []
    for seeds in ((1, 1), (1, 2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = build(seed=seeds[torch.distributed.get_rank()], dtype=dtype)
            rotorch.parallelize(model, layout, device="cpu")
        said.append([str(each.message) for each in caught])
    return said


@pytest.mark.parametrize(("layout", "dtype"), [("ddp=2", torch.float32), ("rtp=2", torch.bfloat16)])
def test_values_that_differ_over_ranks_are_told(layout, dtype):
    load_step_code(["ddp", "rtp"])
    for same, different in run_ranks(warned, layout, dtype, num_ranks=2):
        assert not same
        (told,) = different
        assert "ranks were given different values of '0.weight'" in told and "torch.manual_seed(0)" in told

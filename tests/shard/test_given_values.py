"""Ranks that were given different values for a model's weights are told so."""

import warnings

import pytest
import torch
from torch import nn

import rotorch
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


def build(*, seed, dtype, of_buffer=0.0):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)
    module.register_buffer("phase", torch.tensor(1j * of_buffer))
    return module


def warned(layout, dtype):
    """Warnings on a rank: of a model that is the same on all, and of one that is not."""
    said = []
    rank = torch.distributed.get_rank()
    for given in ({"seed": 1}, {"seed": rank}, {"seed": 1, "of_buffer": float(rank)}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rotorch.parallelize(build(**given, dtype=dtype), layout, device="cpu")
        said.append([str(each.message) for each in caught])
    return said


@pytest.mark.parametrize(("layout", "dtype"), [("ddp=2", torch.float32), ("rtp=2", torch.bfloat16)])
def test_values_that_differ_over_ranks_are_told(layout, dtype):
    load_step_code(["ddp", "rtp"])
    for same, different, of_buffer in run_ranks(warned, layout, dtype, num_ranks=2):
        assert not same
        (told,), (told_of_buffer,) = different, of_buffer
        assert "ranks were given different values of '0.weight'" in told and "torch.manual_seed(0)" in told
        assert "ranks were given different values of 'phase'" in told_of_buffer

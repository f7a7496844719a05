"""Texts of models with an encoder are refused in one line: `generate` calls the encoder by itself."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


def made():
    sizes = dict(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def said():
    model = rotorch.parallelize(made(), "rtp=2", device="cpu")
    with pytest.raises(ConfigError) as caught:
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2)
    return str(caught.value)


def test_generate_says_what_to_write_instead():
    load_step_code(["rtp"])
    describe(made())
    for line in run_ranks(said, num_ranks=2):
        assert "the encoder is called by itself" in line and "model.save_pretrained(directory)" in line

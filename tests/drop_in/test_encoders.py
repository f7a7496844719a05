"""Texts of models with an encoder are refused in one line: `generate` calls the encoder by itself."""

import pytest
import torch
from foreign_models import t5, whisper
from more_foreign_models import bart

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

GIVEN = {
    t5: torch.tensor([[3, 4, 5]]),
    bart: torch.tensor([[3, 4, 5]]),
    whisper: torch.zeros(1, 8, 16, dtype=torch.float64),
}
LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", "rtp=2[transport=send_receive]", "megatron=2")


def said():
    """Messages by layout and model."""
    found = {}
    for layout in LAYOUTS:
        for make, given in GIVEN.items():
            model = rotorch.parallelize(make(), layout, device="cpu")
            with pytest.raises(ConfigError) as caught:
                model.generate(given, max_new_tokens=2)
            found[layout, make.__name__] = str(caught.value)
            model.close()
    return found


def test_generate_says_what_to_write_instead():
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])
    for make in GIVEN:
        describe(make())
    for found in run_ranks(said, num_ranks=2, timeout_s=300):
        for line in found.values():
            assert "the encoder is called by itself" in line and "model.save_pretrained(directory)" in line
            assert "\n" not in line

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerTextConfig

from rotorch.models.trial.tiny import (
    NUM_DRAWN_TOKENS,
    inputs_for,
    never_set,
    number_for,
    shrunk,
    shrunk_like,
    with_values,
)
from rotorch.testing.subjects import tiny_subject


def test_a_rich_tiny_model_has_few_heads_groups_and_biases():
    config = next(shrunk(transformers.LlamaConfig))
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.attention_bias and config.mlp_bias
    assert config.vocab_size < 1000 and config.hidden_size < 100


def test_one_layer_of_each_kind_is_kept_in_order():
    default = transformers.Gemma2Config()
    config = next(shrunk(transformers.Gemma2Config))
    assert len(config.layer_types) == config.num_hidden_layers < default.num_hidden_layers
    assert set(config.layer_types) == set(default.layer_types)
    assert 0 < config.sliding_window < 32


def test_what_is_like_another_configuration_keeps_all_but_its_sizes():
    real = transformers.CohereConfig(use_qk_norm=True, attention_bias=False, num_key_value_heads=8)
    tiny = next(shrunk_like(real))
    assert tiny.use_qk_norm and not tiny.attention_bias
    assert tiny.hidden_size < real.hidden_size
    assert real.hidden_size == transformers.CohereConfig().hidden_size


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_attention_heads", 4), ("moe_intermediate_size", 24), ("attention_dropout", 0), ("unheard_of", None)],
)
def test_rules_go_by_names_of_fields(name, value):
    assert number_for(name) == value


def test_special_tokens_are_never_drawn():
    config = next(shrunk(transformers.Llama4Config))
    ids = inputs_for(transformers.Llama4ForConditionalGeneration, config, num_rows=2, num_tokens=64)["input_ids"]
    assert int(ids.max()) < NUM_DRAWN_TOKENS <= config.image_token_index


def test_images_divide_by_rows():
    config = transformers.ViTConfig(image_size=16, patch_size=4)
    made = inputs_for(transformers.ViTModel, config, num_rows=6, num_tokens=8)
    assert {name: len(rows) % 6 for name, rows in made.items()} == {"pixel_values": 0}
    assert made["pixel_values"].dtype == torch.float64


def test_kinds_of_layers_that_are_left_to_checkpoints_follow_from_other_fields():
    assert transformers.Lfm2MoeConfig().layer_types is None
    richest = next(config for config in shrunk(transformers.Lfm2MoeConfig) if config.layer_types)
    assert richest.layer_types == ["conv", "full_attention"]
    assert richest.num_dense_layers < richest.num_hidden_layers == 2  # so there are experts, too


def test_rotary_parameters_that_are_left_to_checkpoints_are_filled_in():
    assert not transformers.CohereCompassTextConfig().rope_parameters
    config = list(shrunk(transformers.CohereCompassTextConfig))[-1]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 10_000.0


def test_weights_that_a_model_forgets_to_set_get_values():
    """transformers sets the experts of the thinker, not those of the talker."""
    subject = tiny_subject(Qwen3OmniMoeTalkerTextConfig)
    torch.manual_seed(0)
    first = dict(subject.build().named_parameters())
    assert all("experts" in name for name in subject._never_set) and subject._never_set
    torch.manual_seed(0)
    assert all(torch.equal(first[name], value) for name, value in subject.build().named_parameters())


class Forgetful(nn.Module):
    """A model whose initialisation sets one of its two weights."""

    def __init__(self, config):
        super().__init__()
        self.set, self.forgotten = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(4))
        nn.init.ones_(self.set)

    @classmethod
    def _from_config(cls, config):
        return cls(config)


def test_weights_that_a_model_forgets_have_values_all_the_same():
    assert never_set(Forgetful, None) == ("forgotten",)
    made = []
    for rubbish in (float("nan"), 3e3):
        torch.full((4,), rubbish)  # what lies in memory that is given back
        torch.manual_seed(0)
        made.append(with_values(Forgetful, None).forgotten.tolist())
    assert made[0] == made[1] and 0 < max(map(abs, made[0])) < 0.2

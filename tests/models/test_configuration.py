"""A configuration is held against its class: misspelt keys, sizes that cannot be, models that cannot be built."""

import json

import pytest
from transformers import CONFIG_MAPPING

from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm, config_from_dict, load_config
from rotorch.shard.materialize import on_meta

LLAMA = {
    **{"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def build(**changes):
    with on_meta():
        return causal_lm(config_from_dict({**LLAMA, **changes}, source="model.config", is_own=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_hidden_layer": 3},
            "num_hidden_layer = 3: LlamaConfig has no such key (did you mean 'num_hidden_layers'?)",
        ),
        ({"anything": 3}, "LlamaConfig has no such key. Write one that it has"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0. Write 1 or more"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1. Write 1 or more"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000. Write 4096 or less"),
        ({"hidden_size": 0}, "hidden_size = 0. Write 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0. Write 1 or more"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads = 3 does not divide num_attention_heads = 4. Write one of 1, 2, 4",
        ),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"head_dim": 3}, "heads of 3 features, of which rotary positions turn 3: an odd number"),
        ({"hidden_act": "silly"}, "cannot build this llama with hidden_act = 'silly'"),
        ({"hidden_size": 10**6}, "one of its weights would take"),
        ({"hidden_size": 10**8}, "hidden_size = 100000000: one weight of 100000000 x 100000000 would take"),
        ({"hidden_size": "16"}, "'hidden_size' expected int, got str"),
        ({"attention_dropout": 2.0}, "attention_dropout = 2.0: not a fraction"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0. Write a small positive number"),
        ({"pad_token_id": 1000}, "Padding_idx must be within num_embeddings"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_line(changes, words):
    with pytest.raises(ConfigError) as caught:
        build(**changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0. Write 1 or more"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9, "num_experts": 8},
            "num_experts_per_tok = 9 of num_local_experts = 8. Write",
        ),
        ("mixtral", {"num_local_experts": 0}, "num_experts_per_tok = 2 of num_local_experts = 0. Write as many"),
        ("mixtral", {"num_local_experts": -8}, "of num_local_experts = -8"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0. Write 1 or more"),
        ("mixtral", {"sliding_window": 0}, "sliding_window = 0. Write 1 or more, or leave it out"),
        ("mistral", {"sliding_window": -3}, "sliding_window = -3. Write 1 or more"),
        ("gpt2", {"n_inner": 0}, "n_inner = 0. Write 1 or more"),
        ("llama", {"rope_theta": 0}, "rope_theta = 0. Write a positive number"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}},
            "rope_theta = -5.0. Write a positive",
        ),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0.0. Write a positive number, or leave"),
        ("glm", {"partial_rotary_factor": 3.0}, "partial_rotary_factor = 3.0: not a share of a head"),
    ],
    ids=str,
)
def test_sizes_and_numbers_of_other_kinds(kind, changes, words):
    """Some ended in a traceback or in the first step, and windows below 1 trained on without a word."""
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"model_type": kind, **changes}, source="model.config", is_own=True)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
        ("qwen2_moe", {"sliding_window": 0}),  # which it has unless use_sliding_window is true
        ("gemma4_text", {}),  # whose layers differ in their heads
    ],
)
def test_what_a_kind_leaves_out_is_no_mistake(kind, changes):
    config_from_dict({"model_type": kind, **changes}, source="config.json")


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 5e5}, {"_name_or_path": "x", "torch_dtype": "float16"}, {"rope_scaling": None}], ids=str
)
def test_older_spellings_and_notes_are_keys_too(changes):
    build(**changes)


def test_a_published_file_may_have_notes_and_no_misspelt_keys(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "written_by": "another program", "num_nextn_predict_layers": 1}))
    load_config(file)
    file.write_text(json.dumps({**LLAMA, "hidden_actt": "relu"}))
    with pytest.raises(ConfigError, match=r"'hidden_actt' = 'relu'.*did you mean 'hidden_act'"):
        load_config(file)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "qwen3", "gemma3", "deepseek_v3", "falcon", "mamba"])
def test_what_transformers_writes_passes(kind):
    config = CONFIG_MAPPING[kind]()
    for values in (config.to_dict(), config.to_diff_dict()):
        config_from_dict({**values, "model_type": kind}, source="config.json")

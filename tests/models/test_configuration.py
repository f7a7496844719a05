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

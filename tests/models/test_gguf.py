"""GGUF: weights, configuration and tokenizer of one file, slice by slice; damage said in one line."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.gguf import find_gguf, open_gguf, read_gguf_metadata
from rotorch.models.hf import load_config
from rotorch.testing.ranks import run_ranks

gguf = pytest.importorskip("gguf")

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
"""Three groups of heads, which two ranks hold unevenly; widths in blocks of 32, which quantised files need."""


def permuted(weight, num_heads):
    """The order in which llama.cpp stores the rows of q and k."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A GGUF file of a tiny Llama, some weights rounded to eight bits, and the values that it should give."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(64)
    writer.add_head_count(6)
    writer.add_head_count_kv(3)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    tokens = [bytes([b]).decode("latin1") for b in range(33, 127)] + ["<|endoftext|>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 94 + [3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(94)
    writer.add_eos_token_id(94)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    expected = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values, stored = value.numpy(), name
        for theirs, ours in NAMES.items():
            stored = stored.replace(theirs, ours)
        stored = stored.replace("model.layers", "blk").replace("model.embed_tokens", "token_embd")
        stored = stored.replace("model.norm", "output_norm")
        heads = {"attn_q": 6, "attn_k": 3}.get(stored.split(".")[-2])
        values = permuted(values, heads) if heads else values
        if values.ndim == 2 and "attn_v" not in stored:
            kind = gguf.GGMLQuantizationType.Q8_0
            raw = gguf.quants.quantize(values, kind)
            rounded = torch.from_numpy(gguf.quants.dequantize(raw, kind))
            if heads:  # rounded where it was stored, and back in the model's order
                rounded = rounded.reshape(heads, rounded.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
            expected[name] = rounded.reshape(value.shape)
            writer.add_tensor(stored, raw, raw_dtype=kind)
        else:
            expected[name] = value
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, expected


def load_whole(path, parallel):
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(CONFIG)
    model = rotorch.parallelize(module, parallel).load(str(path))
    whole = {name: model.full_tensor(name).numpy() for name in model.weights}
    model.close()
    return whole


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [("single", 1), ("rtp=2", 2), ("fsdp=2", 2), pytest.param("rtp=4", 4, marks=pytest.mark.slow)],
)
def test_every_rank_reads_its_rows(written, warm, parallel, num_ranks):
    path, expected = written
    loaded = run_ranks(load_whole, path, parallel, num_ranks=num_ranks)[0]
    assert loaded.keys() == expected.keys()
    for name, values in loaded.items():
        assert torch.equal(torch.from_numpy(values), expected[name]), name


def test_rows_of_a_slice_alone_are_made_into_numbers(written, monkeypatch):
    path, _ = written
    made = []
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: made.append(len(data)) or dequantize(data, kind))
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(CONFIG)
    with open_gguf(path, module=module) as stored:
        q = stored["model.layers.0.self_attn.q_proj.weight"]
        assert q.shape == (96, 96) and not made
        q.read((range(32), range(96)), out=torch.empty(32, 96))
    assert sum(made) == 32


def test_configuration_and_tokenizer_become_a_directory(written, tmp_path):
    path, _ = written
    directory = read_gguf_metadata(path, tmp_path)
    config = AutoConfig.from_pretrained(directory)
    for key in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "head_dim", "vocab_size"):
        assert getattr(config, key) == getattr(CONFIG, key), key
    assert math.isclose(config.rope_parameters["rope_theta"], 10000.0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("cab").input_ids == [ord("c") - 33, 95]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 94
    assert read_gguf_metadata(path, tmp_path) == directory and len(list(tmp_path.iterdir())) == 1


def test_a_gguf_file_is_a_configuration(written):
    assert load_config(written[0]).num_key_value_heads == 3
    assert load_config(written[0].parent).num_key_value_heads == 3


@pytest.mark.parametrize("kept", [0, 3, 40, 3000, -100])
def test_a_truncated_file(written, tmp_path, kept):
    file = tmp_path / "model.gguf"
    file.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(ConfigError, match="is no GGUF file, or a corrupt or truncated one"):
        load_config(file)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (gguf.GGMLQuantizationType.I32, "of a dtype that is not converted: model.norm.weight (torch.int32 in the file"),
        (gguf.GGMLQuantizationType.Q8_K, "cannot read output_norm.weight in "),
    ],
)
def test_kinds_that_are_no_weights_are_refused_by_name(written, tmp_path, kind, said):
    content, name = bytearray(written[0].read_bytes()), b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # behind the number of dims, and its one size
    assert content[at : at + 4] == bytes(4)  # F32
    content[at : at + 4] = int(kind).to_bytes(4, "little")
    (tmp_path / "wrong.gguf").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_whole(tmp_path / "wrong.gguf", "single")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_several_files_in_one_directory(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds a.gguf, b.gguf. Write the path of one of them"):
        find_gguf(tmp_path)


def test_without_the_package(written, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the package gguf. Write pip install 'rotorch\[gguf\]'"):
        load_config(written[0])

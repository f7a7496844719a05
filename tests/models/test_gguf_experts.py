"""Experts in GGUF: gates, ups and downs kept apart, in one tensor each or expert by expert."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.gguf import open_gguf
from rotorch.testing.ranks import run_ranks

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2)
QWEN = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=3, num_experts_per_tok=2, head_dim=16)

NAMES = {
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}


def permuted(weight, num_heads):
    """The order in which llama.cpp stores the rows of q and k of a llama."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model, *, architecture, one_by_one):
    """A file's content for a model: {name: numbers}."""
    found = {}
    for name, value in model.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if architecture == "llama" and "attn_q.weight" in name:
            value = permuted(value, 4)
        if architecture == "llama" and "attn_k.weight" in name:
            value = permuted(value, 2)
        block = name.partition(".mlp")[0]
        parts = {}
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            parts = {"gate": gate, "up": up}
        elif name.endswith("experts.down_proj"):
            parts = {"down": value}
        for part, all_of_them in parts.items():
            if one_by_one:
                found |= {f"{block}.ffn_{part}.{i}.weight": one for i, one in enumerate(all_of_them)}
            else:
                found[f"{block}.ffn_{part}_exps.weight"] = all_of_them
        if not parts:
            found[name] = value
    return found


def write(path, architecture, tensors):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    for name, value in tensors.items():
        writer.add_tensor(name, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_whole(path, config, parallel):
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(config)
    model = rotorch.parallelize(module, parallel).load(str(path))
    whole = {name: model.full_tensor(name).numpy() for name in model.weights}
    model.close()
    return whole


def original(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "architecture", "one_by_one", "parallel"),
    [
        (QWEN, "qwen3moe", False, "rtp=2"),
        (MIXTRAL, "llama", False, "fsdp=2"),
        (MIXTRAL, "llama", True, "rtp=2"),  # as files of early 2024 are
    ],
)
def test_experts_are_put_together(tmp_path, warm, config, architecture, one_by_one, parallel):
    model = original(config)
    path = tmp_path / "model.gguf"
    write(path, architecture, tensors_of(model, architecture=architecture, one_by_one=one_by_one))
    loaded = run_ranks(load_whole, path, config, parallel, num_ranks=2)[0]
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, values in loaded.items():
        assert torch.equal(torch.from_numpy(values), expected[name]), name


def opened(tmp_path, config, tensors, architecture="llama"):
    path = tmp_path / "model.gguf"
    write(path, architecture, tensors)
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(config)
    with open_gguf(path, module=module) as stored:
        return dict(stored)


def test_a_slice_reads_its_own_rows(tmp_path, monkeypatch):
    made = []
    dequantize = gguf.quants.dequantize
    monkeypatch.setattr(gguf.quants, "dequantize", lambda data, kind: made.append(len(data)) or dequantize(data, kind))
    path = tmp_path / "model.gguf"
    write(path, "llama", tensors_of(original(MIXTRAL), architecture="llama", one_by_one=True))
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(MIXTRAL)
    with open_gguf(path, module=module) as stored:
        assert not made
        joined = stored["model.layers.1.mlp.experts.gate_up_proj"]
        joined.read((range(3), range(24, 40), range(64)), out=torch.empty(3, 16, 64))  # 8 rows of gates, 8 of ups
    assert sum(made) == 3 * 16


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (MIXTRAL, lambda t: t.pop("blk.1.ffn_up.1.weight"), r"blk\.1\.ffn_up\.1\.weight is missing"),
        (
            MIXTRAL,
            lambda t: (
                [t.pop(f"blk.0.ffn_down.{i}.weight") for i in range(3)]
                + [t.pop(f"blk.0.ffn_up.{i}.weight") for i in range(3)]
            ),
            r"the experts of blk\.0 \(ffn_gate \[3, 32, 64\]\) are not in a form that MixtralForCausalLM has",
        ),
        (MIXTRAL, lambda t: t.update({"blk.0.ffn_gate.0.weight": torch.ones(32, 32)}), "parts of different shapes"),
        (LlamaConfig(**SIZES, intermediate_size=32), lambda t: None, r"LlamaForCausalLM has \(no experts\)"),
    ],
)
def test_experts_of_another_form_are_refused(tmp_path, config, change, said):
    tensors = tensors_of(original(MIXTRAL), architecture="llama", one_by_one=True)
    change(tensors)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, config, tensors)


def test_a_model_that_keeps_experts_transposed_is_refused(tmp_path):
    config = GptOssConfig(**SIZES, intermediate_size=32, num_local_experts=3, num_experts_per_tok=2, head_dim=16)
    tensors = tensors_of(original(MIXTRAL), architecture="llama", one_by_one=False)
    with pytest.raises(ConfigError, match=r"the experts of blk\.0 .* are not in a form that GptOssForCausalLM has"):
        opened(tmp_path, config, tensors)

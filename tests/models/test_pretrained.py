"""Published models: names followed as transformers does, each rank its slices, damage said in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.testing.ranks import run_ranks

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "tiny"


def tiny_model(family, kind=AutoModelForCausalLM):
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.from_pretrained(CONFIGS / f"{family}.json"))


def on_ranks(parallel, *, num_ranks, path, config, kind=AutoModelForCausalLM, **options):
    """Loads on ranks; returns the whole weights by their names."""
    return run_ranks(load_whole, parallel, path, config, kind, options, num_ranks=num_ranks)[0]


def load_whole(parallel, path, config, kind, options):
    with rotorch.on_meta():
        module = kind.from_config(config)
    model = rotorch.parallelize(module, parallel).materialize(seed=0).load(str(path), **options)
    whole = {name: model.full_tensor(name).numpy() for name in model.weights}
    model.close()
    return whole


def same(loaded, expected):
    for name, values in loaded.items():
        assert torch.equal(torch.from_numpy(values), expected[name].float()), name


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("llama", "fsdp=2"),
        ("mixtral", "rtp=2"),
        pytest.param("llama", "rtp=2", marks=pytest.mark.slow),
        pytest.param("mixtral", "fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_what_transformers_saves_is_loaded(family, parallel, tmp_path, warm):
    """Of Mixtral every expert is stored by itself, and the model stacks them: gate and up in one tensor."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    stored = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(stored.values())) > 1
    assert family != "mixtral" or any(".experts.0." in name for name in stored)
    same(on_ranks(parallel, num_ranks=2, path=tmp_path, config=model.config), model.state_dict())


def test_a_base_model_is_loaded_into_one_with_a_head(tmp_path, warm):
    base = tiny_model("llama", AutoModel)
    base.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    loaded = on_ranks("rtp=2", num_ranks=2, path=tmp_path, config=base.config, may_lack=["lm_head.weight"])
    loaded.pop("lm_head.weight")
    same({name.removeprefix("model."): values for name, values in loaded.items()}, base.state_dict())


def test_a_head_that_is_not_there_is_missing(tmp_path, warm):
    base = tiny_model("llama", AutoModel)
    base.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"does not fit the model\. missing: lm_head\.weight$"):
        load_alone(tmp_path, base.config, AutoModelForCausalLM)


def load_alone(path, config, kind):
    run_ranks_error = run_ranks(loading_error, path, config, kind, num_ranks=1)[0]
    if run_ranks_error:
        raise ConfigError(run_ranks_error)


def loading_error(path, config, kind):
    with rotorch.on_meta():
        module = kind.from_config(config)
    try:
        rotorch.parallelize(module, "single").load(str(path))
    except ConfigError as error:
        return str(error)
    return None


def test_old_names_are_followed(tmp_path, warm):
    """Norms of BERT were once stored as gamma and beta, and positions along with the weights."""
    config = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = AutoModelForSequenceClassification.from_config(config)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in model.state_dict().items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(old, tmp_path / "model.safetensors")
    kind = AutoModelForSequenceClassification
    same(on_ranks("fsdp=2", num_ranks=2, path=tmp_path, config=config, kind=kind), model.state_dict())


class Norm(nn.Module):
    """A weight and buffers: one that is saved, one that is not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(2), persistent=False)


def test_buffers_are_loaded_too(tmp_path):
    original = Norm()
    for number, tensor in enumerate(original.state_dict().values(), start=2):
        tensor.copy_(torch.full_like(tensor, number))
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    loaded = run_ranks(load_norm, tmp_path, num_ranks=2)
    for rank in loaded:
        assert {name: torch.tensor(values) for name, values in rank.items()}.keys() == original.state_dict().keys()
        for name, values in rank.items():
            assert torch.equal(torch.tensor(values), original.state_dict()[name].float()), name


def load_norm(path):
    model = rotorch.parallelize(Norm(), "ddp=2").load(str(path))
    buffers = {name: b.float().tolist() for name, b in model.module.named_buffers() if name != "mask"}
    return buffers | {name: held.local.tolist() for name, held in model.weights.items()}


def test_a_pickle_is_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, which is not read"):
        rotorch.shard.load.load_directory(str(tmp_path), weights={})

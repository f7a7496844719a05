"""Weight decay acts on matrices and tables, by what a weight is; all layouts agree."""

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rotorch.models.decay import is_decayed
from rotorch.models.trial.tiny import shrunk
from rotorch.parallelize import parallelize
from rotorch.run_config import OptimizerSection
from rotorch.shard.materialize import on_meta
from rotorch.testing.fake import as_rank
from rotorch.train.optim import make_optimizer


def tiny(kind, **settings):
    config = next(shrunk(type(AutoConfig.for_model(kind))))
    for name, value in settings.items():
        setattr(config, name, value)
    with on_meta():
        return AutoModelForCausalLM.from_config(config)


def split(module):
    """Names of what is decayed and what is not, with the numbers of layers left out."""
    found = {True: set(), False: set()}
    for name, parameter in module.named_parameters():
        found[is_decayed(module, name, shape=parameter.shape)].add(re.sub(r"\.\d+\.", ".*.", name))
    assert not found[True] & found[False]
    return found[True], found[False]


OVER_MESSAGES = "rtp=4[transport=send_receive]"  # no other process is there to share memory with
NORMS = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
PROJECTIONS = {f"model.layers.*.self_attn.{x}_proj.weight" for x in "qkvo"}
LLAMA = {"model.embed_tokens.weight", "lm_head.weight", *PROJECTIONS}


@pytest.mark.parametrize(
    ("kind", "decayed"),
    [
        ("llama", LLAMA | {f"model.layers.*.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}),
        (
            "cohere",
            (LLAMA - {"lm_head.weight"}) | {f"model.layers.*.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        ),
        (
            "gpt2",
            {f"transformer.{x}.weight" for x in ("wte", "wpe")}
            | {f"transformer.h.*.{x}.weight" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
        ),
        ("gpt_oss", LLAMA | {f"model.layers.*.mlp.{x}" for x in ("experts.gate_up_proj", "experts.down_proj",
                                                                  "router.weight")}),
        ("mixtral", LLAMA | {f"model.layers.*.mlp.{x}" for x in ("experts.gate_up_proj", "experts.down_proj",
                                                                  "gate.weight")}),
        (
            "mamba",
            {"backbone.embeddings.weight"}
            | {f"backbone.layers.*.mixer.{x}.weight" for x in ("conv1d", "in_proj", "x_proj", "dt_proj", "out_proj")},
        ),
    ],
)  # fmt: skip
def test_what_is_decayed_in_each_family(kind, decayed):
    found, others = split(tiny(kind))
    assert found == decayed
    assert others and all(name.endswith(("bias", "norm.weight", "norm_f.weight", "A_log", ".D", "sinks")) or
                          name.split(".")[-2] in (*NORMS, "ln_1", "ln_2", "ln_f") for name in others)  # fmt: skip


def test_the_families_have_what_dims_would_take_for_matrices():
    for kind, attribute in (("gpt_oss", "gate_up_proj_bias"), ("cohere", "q_norm.weight"), ("mamba", "A_log")):
        module = tiny(kind)
        (shape, *_) = [p.shape for name, p in module.named_parameters() if name.endswith(attribute)]
        assert len(shape) == 2, kind


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.only = nn.Linear(8, 1), nn.Embedding(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.relative_attention_bias, self.positions = nn.Embedding(4, 2), nn.Parameter(torch.zeros(1, 4, 8))
        self.class_token, self.scale = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(2, 4))


def test_tables_tokens_and_layers_of_one_row():
    found, others = split(Odd())
    assert found == {
        "gate.weight", "only.weight", "attention.in_proj_weight", "attention.out_proj.weight", "positions",
    }  # fmt: skip
    assert others == {
        "gate.bias", "attention.in_proj_bias", "attention.out_proj.bias", "attention.bias_k", "attention.bias_v",
        "relative_attention_bias.weight", "class_token", "scale",
    }  # fmt: skip


@pytest.mark.parametrize("parallel", ["ddp=4", "fsdp=4", OVER_MESSAGES, "megatron=4", "summa=2x2", "pp=2,fsdp=2"])
def test_every_rank_of_every_layout_decays_the_same(parallel):
    expected, _ = split(tiny("llama"))
    for rank in (0, 3):
        with as_rank(rank, num_ranks=4):
            model = parallelize(tiny("llama"), parallel, device="cpu")
            decayed, others = make_optimizer(model, settings=OptimizerSection(weight_decay=0.3)).param_groups
            names = {id(held.local_parameter): name for name, held in model.weights.items()}
            assert {re.sub(r"\.\d+\.", ".*.", names[id(p)]) for p in decayed["params"]} == expected
            assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
            model.close()

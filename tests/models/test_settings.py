"""Ranks whose models differ in what is no weight are told so, on all of them."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.settings import settings_of
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:parallelize. ranks were given different values")  # rotary angles
LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", "megatron=2", "pp=2")
ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "pp"])
    llama()


def llama(*, of_config=None, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))
    for key, value in (of_config or {}).items():
        setattr(model.config, key, value)
    return model


def lora(**options):
    import peft

    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options), llama())


class Scaled(nn.Module):
    def __init__(self, of_repr):
        super().__init__()
        self.linear, self.of_repr = nn.Linear(4, 4), of_repr

    def extra_repr(self):
        return f"{self.of_repr()}"

    def forward(self, x):
        return self.linear(x)


class Unprintable(Scaled):
    def __repr__(self):
        raise RuntimeError("no")


def plain(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4))


def of_scale(of_repr, kind=Scaled):
    torch.manual_seed(0)
    return nn.Sequential(kind(of_repr), nn.Linear(4, 4))


def named_differently():
    """A set of names, in the order of this process."""
    names = ["{'left', 'right', 'up'}", "{'up', 'left', 'right'}"]
    return f"{F.gelu} on cuda:{dist.get_rank()}, {object()}, of={names[dist.get_rank()]} (GPU {dist.get_rank()})"


DIFFERENT = {
    "eps": (llama, {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-3}, "config.rms_norm_eps is 1e-06 on rank 0 and 0.001"),
    "act": (llama, {"hidden_act": "silu"}, {"hidden_act": "gelu"}, 'config.hidden_act is "silu" on rank 0 and "gelu"'),
    "rope": (llama, {}, {"rope_parameters": ROPE}, "config.rope_parameters.rope_theta is 10000 on rank 0 and 500 on"),
    "dropout": (llama, {}, {"attention_dropout": 0.25}, "config.attention_dropout is 0 on rank 0 and 0.25 on rank 1"),
    "module": (plain, [nn.Dropout(0.1)], [nn.Dropout(0.5)], 'the module 1 is "Dropout(p=0.1, inplace=False)" on rank'),
    "class": (plain, [nn.GELU()], [nn.ReLU()], 'the module 1 is "GELU(approximate=\'none\')" on rank 0 and "ReLU()"'),
    "lora": (lora, {"lora_alpha": 8}, {"lora_alpha": 16}, "peft_config.default.lora_alpha is 8 on rank 0 and 16 on"),
}
SAME = {
    "path": (llama, {"of_config": {"_name_or_path": "a"}}, {"of_config": {"_name_or_path": "b"}}),
    "version": (llama, {"of_config": {"transformers_version": "5"}}, {"of_config": {"use_cache": False}}),
    "number": (llama, {"attention_dropout": 0}, {"attention_dropout": 0.0}),
    "addresses": (of_scale, [named_differently], [named_differently]),
    "unprintable": (of_scale, [named_differently, Unprintable], [named_differently, Unprintable]),
    "mode": (llama, {}, {}),
}


def build(case):
    make, *given = case
    of_rank = given[dist.get_rank()]
    return make(**of_rank) if isinstance(of_rank, dict) else make(*of_rank)


def refusals(layouts):
    """Refusals on a rank, by case and layout; None where there is none."""
    told = {}
    for name, case in {**DIFFERENT, **SAME}.items():
        for layout in layouts if name in ("eps", "path") else layouts[:1]:
            try:
                model = build(case)
                rotorch.parallelize(model.eval() if dist.get_rank() else model, layout, device="cpu").close()
                told[name, layout] = None
            except ConfigError as error:
                told[name, layout] = str(error)
    return told


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(refusals, ("rtp=2", *(layout for layout in LAYOUTS if layout != "rtp=2")), num_ranks=2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_differ_in_what_is_no_weight_are_refused_on_all_ranks(ranks, name):
    for told in ranks:
        said = told[name, "rtp=2"]
        assert said is not None and DIFFERENT[name][-1] in said and "\n" not in said
        assert "on rank 1" in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_they_are_under_every_layout(ranks, layout):
    for told in ranks:
        assert "config.rms_norm_eps" in (told["eps", layout] or "")
        assert told["path", layout] is None


@pytest.mark.parametrize("name", SAME)
def test_what_may_differ_by_right_is_no_difference(ranks, name):
    assert [told[name, "rtp=2"] for told in ranks] == [None, None]


def test_configurations_of_parts_are_compared_once():
    class Around(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.backbone = base

    found = settings_of(Around(llama(rms_norm_eps=1e-5)))
    assert found["config.rms_norm_eps of backbone"] == 1e-5
    assert len([key for key in found if key.startswith("config.rms_norm_eps")]) == 1


def test_a_module_whose_text_cannot_be_made_is_compared_by_its_class():
    assert settings_of(nn.Sequential(Unprintable(functools.partial(str, 1))))["the module 0"] == "Unprintable(1)"

"""Units of modules that declare no plan: what the rules cut, what they leave whole and why."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rotorch.core.spec import Combine, Cut, UnitKind
from rotorch.models.describe import describe


def cuts(module):
    """{weight: its cut} of all cut weights."""
    return {w.name: w.cut for unit in describe(module).cut_units for w in unit.weights}


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 6, 2)
        self.head = nn.Linear(6, 10)


def test_layers_are_cut_along_their_output():
    spec = describe(Vision())
    assert [(u.name, u.kind, u.combine) for u in spec.cut_units] == [
        ("stem.weight", UnitKind.WEIGHT, Combine.CONCAT),
        ("depthwise.weight", UnitKind.WEIGHT, Combine.CONCAT),
        ("up.weight", UnitKind.WEIGHT, Combine.CONCAT),
        ("head.weight", UnitKind.WEIGHT, Combine.CONCAT),
    ]
    assert cuts(Vision()) == {
        "stem.weight": Cut(0, 8),
        "stem.bias": Cut(0, 8),
        "depthwise.weight": Cut(0, 8),
        "up.weight": Cut(1, 6),
        "up.bias": Cut(0, 6),
        "head.weight": Cut(0, 10),
        "head.bias": Cut(0, 10),
    }
    assert [w.name for w in spec.units[-1].weights] == ["norm.weight", "norm.bias"]
    assert spec.kept_whole == ()


def test_attention_is_cut_between_its_heads():
    layer = nn.TransformerEncoderLayer(12, 3, 20)
    spec = describe(layer)
    unit = next(u for u in spec.units if u.name == "self_attn")
    assert (unit.kind, unit.combine, unit.added_once) == (UnitKind.MODULE, Combine.SUM, ("self_attn.out_proj.bias",))
    assert {w.name.removeprefix("self_attn."): w.cut for w in unit.weights} == {
        "in_proj_weight": Cut(0, 3, 3),
        "in_proj_bias": Cut(0, 3, 3),
        "out_proj.weight": Cut(1, 3),
    }
    assert {"linear1.weight", "linear2.weight"} <= set(cuts(layer))


def test_attention_with_keys_and_values_of_its_own():
    found = cuts(nn.MultiheadAttention(12, 3, kdim=5, vdim=7, add_bias_kv=True))
    assert {name: found[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k")} == {
        "q_proj_weight": Cut(0, 3),
        "k_proj_weight": Cut(0, 3),
        "v_proj_weight": Cut(0, 3),
        "bias_k": Cut(2, 3),
    }


def test_a_linear_layer_with_its_inputs_first():
    from transformers.pytorch_utils import Conv1D

    assert cuts(Conv1D(6, 4)) == {"weight": Cut(1, 6), "bias": Cut(0, 6)}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight


def test_a_tied_weight_goes_round_for_all_its_uses_and_its_bias_stays():
    (unit,) = describe(Tied()).cut_units
    assert (unit.name, unit.uses, unit.reads_in_backward, unit.combine) == ("embed.weight", 2, 1, Combine.SUM)
    assert [w.name for w in unit.weights] == ["embed.weight"]


class OnlyBiasTrained(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4))
        self[0].weight.requires_grad_(False)


def test_a_bias_that_is_trained_alone_stays_whole():
    assert cuts(OnlyBiasTrained()) == {"0.weight": Cut(0, 4)}


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(30, 4))


class OwnAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        (nn.GRU(4, 6), "weight_hh_l0", "no rule cuts a GRU"),
        (Own(), "table", "no rule cuts a Own"),
        (nn.Embedding(9, 4, max_norm=1.0), "weight", "max_norm"),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), "weight", "in groups"),
        (OwnAttention(8, 2), "in_proj_weight", "no rule cuts a OwnAttention"),
        (parametrizations.weight_norm(nn.Linear(4, 6)), "parametrizations.weight.original1", "ParametrizationList"),
    ],
)
def test_what_no_rule_cuts_stays_whole_with_the_reason(module, name, why):
    spec = describe(nn.Sequential(module, nn.Linear(2, 2)))
    kept = {kept.name: kept for kept in spec.kept_whole}
    assert why in kept[f"0.{name}"].why
    assert f"'0.{name}' ({kept[f'0.{name}'].num_bytes:,} bytes)" in spec.summary(most=10)
    assert cuts(nn.Sequential(module, nn.Linear(2, 2))) == {"1.weight": Cut(0, 2), "1.bias": Cut(0, 2)}


def test_weights_of_another_dtype_stay_whole():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4).double())
    assert cuts(module) == {"0.weight": Cut(0, 8), "0.bias": Cut(0, 8)}
    assert describe(module).kept_whole[0].why == "another dtype than most weights"


def test_the_summary_says_how_much_is_cut():
    spec = describe(Vision())
    first, *rest = spec.summary().splitlines()
    assert first.startswith(
        f"Vision: {spec.num_bytes - 64:,} of {spec.num_bytes:,} bytes of weights are cut, in 4 units"
    )
    assert first.endswith("64 are whole on every rank") and not rest

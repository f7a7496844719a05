"""Units and cuts, from what Hugging Face models declare and from a plan of one's own."""

import re

import pytest
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, UnitKind
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config

ATTENTION = {
    "q_proj.weight": Cut(0, 4), "k_proj.weight": Cut(0, 4), "v_proj.weight": Cut(0, 4), "o_proj.weight": Cut(1, 4),
}  # fmt: skip
ATTENTION_WITH_BIAS = ATTENTION | {"q_proj.bias": Cut(0, 4), "k_proj.bias": Cut(0, 4), "v_proj.bias": Cut(0, 4)}
MLP = {"gate_proj.weight": Cut(0, 256), "up_proj.weight": Cut(0, 256), "down_proj.weight": Cut(1, 256)}
LAYER_0 = {
    "llama": {
        "self_attn": (ATTENTION_WITH_BIAS, [], ["o_proj.bias"]),
        "mlp": (MLP | {"gate_proj.bias": Cut(0, 256), "up_proj.bias": Cut(0, 256)}, [], ["down_proj.bias"]),
    },
    "qwen3": {
        "self_attn": (ATTENTION_WITH_BIAS, ["k_norm.weight", "q_norm.weight"], ["o_proj.bias"]),
        "mlp": (MLP, [], []),
    },
    "gemma2": {"self_attn": (ATTENTION_WITH_BIAS, [], ["o_proj.bias"]), "mlp": (MLP, [], [])},
    "gpt_neox": {
        "attention": (
            {"query_key_value.weight": Cut(0, 8), "query_key_value.bias": Cut(0, 8), "dense.weight": Cut(1, 8)},
            [],
            ["dense.bias"],
        ),
        "mlp": (
            {
                "dense_h_to_4h.weight": Cut(0, 512),
                "dense_h_to_4h.bias": Cut(0, 512),
                "dense_4h_to_h.weight": Cut(1, 512),
            },
            [],
            ["dense_4h_to_h.bias"],
        ),
    },
    "olmo2": {"mlp": (MLP, [], [])},
    "mixtral": {
        "self_attn": (ATTENTION, [], []),
        "mlp.experts": ({"gate_up_proj": Cut(1, 128, blocks=2), "down_proj": Cut(2, 128)}, [], []),
    },
}
"""Per family, the MODULE units of the first layer: their cuts, what they need whole, what they add once."""


def spec_of(path):
    with rotorch.on_meta():
        module = causal_lm(load_config(path))
    return module, describe(module)


@pytest.mark.parametrize("family", LAYER_0)
def test_units_of_a_layer(tiny, family):
    module, spec = spec_of(tiny(family))
    prefix = next(name for name, m in module.named_modules() if isinstance(m, nn.ModuleList)) + ".0."
    units = {u.name: u for u in spec.units if u.kind is UnitKind.MODULE and u.name.startswith(prefix)}
    assert {name.removeprefix(prefix) for name in units} == set(LAYER_0[family])
    for name, (cuts, whole, added_once) in LAYER_0[family].items():
        unit = units[prefix + name]
        inside = f"{prefix}{name}."
        assert unit.combine is Combine.SUM
        assert {w.name.removeprefix(inside): w.cut for w in unit.weights} == cuts
        assert [n.removeprefix(inside) for n in unit.replicated] == whole
        assert [n.removeprefix(inside) for n in unit.added_once] == added_once


@pytest.mark.parametrize("family", LAYER_0)
def test_every_parameter_is_in_one_unit_with_its_shape(tiny, family):
    module, spec = spec_of(tiny(family))
    parameters = dict(module.named_parameters())
    names = [w.name for w in spec.weights]
    assert sorted(names) == sorted(parameters)
    assert len(names) == len(set(names))
    assert all(w.shape == tuple(parameters[w.name].shape) and w.itemsize == 4 for w in spec.weights)
    assert spec.num_parameters == sum(p.numel() for p in parameters.values())
    whole = [u for u in spec.units if u.kind is UnitKind.REPLICATED]
    assert len(whole) == 1 and all(w.cut is None for w in whole[0].weights)
    assert all(w.cut is not None for u in spec.cut_units for w in u.weights)
    for unit in spec.cut_units:  # slice k of a unit is a smaller unit: all of its weights have the same groups
        assert len({w.cut.groups for w in unit.weights}) == 1
        assert {*unit.replicated, *unit.added_once} <= {w.name for w in whole[0].weights}


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt_neox", False), ("qwen3", True), ("gemma2", True)])
def test_embedding_and_head(tiny, family, tied):
    module, spec = spec_of(tiny(family))
    alone = [u for u in spec.units if u.kind is UnitKind.WEIGHT]
    table = alone[0]
    rows = module.config.vocab_size
    assert table.combine is Combine.SUM
    assert table.weights[0].cut == Cut(0, rows)
    if tied:
        assert len(alone) == 1
        assert table.weights[0].aliases == ("lm_head.weight",)
        assert (table.uses, table.reads_in_backward) == (2, 1)
    else:
        assert [(u.uses, u.reads_in_backward, u.combine) for u in alone] == [
            (1, 0, Combine.SUM),
            (1, 1, Combine.CONCAT),
        ]
        assert alone[1].name == "lm_head.weight"


def test_what_is_gathered_within_an_attention_is_cut_weight_by_weight(tiny):
    """Olmo2 normalises all heads of q and k together, so its plan gathers the projections."""
    _, spec = spec_of(tiny("olmo2"))
    alone = {u.name: u for u in spec.units if u.name.startswith("model.layers.1.self_attn.")}
    assert sorted(n.rpartition("self_attn.")[2] for n in alone) == [f"{p}_proj.weight" for p in "koqv"]
    for unit in alone.values():
        assert (unit.kind, unit.combine) == (UnitKind.WEIGHT, Combine.CONCAT)
        assert [w.name.rpartition(".")[2] for w in unit.weights] == ["weight", "bias"]
        assert all(w.cut == Cut(0, unit.weights[0].shape[0]) for w in unit.weights)


def test_units_come_in_the_order_of_the_parameters(tiny):
    module, spec = spec_of(tiny("llama"))
    order = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    firsts = [min(order[w.name] for w in u.weights) for u in spec.cut_units]
    assert firsts == sorted(firsts)


# ---- a plain module with a plan of its own ------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=8, inner=12):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)


class Plain(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 20, bias=True)


PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


def test_a_plain_module_with_a_plan():
    spec = describe(Plain(), plan=PLAN)
    found = [(u.name, u.kind, u.combine, {w.name.rpartition(".")[2]: w.cut for w in u.weights}) for u in spec.units[:4]]
    assert spec.name == "Plain"
    assert found[0] == ("embed.weight", UnitKind.WEIGHT, Combine.SUM, {"weight": Cut(0, 20)})
    for number in (0, 1):
        unit = spec.units[1 + number]
        assert (unit.name, unit.kind, unit.combine) == (f"blocks.{number}", UnitKind.MODULE, Combine.SUM)
        assert {w.name.removeprefix(f"blocks.{number}."): w.cut for w in unit.weights} == {
            "up.weight": Cut(0, 12),
            "up.bias": Cut(0, 12),
            "down.weight": Cut(1, 12),
        }
        assert unit.added_once == (f"blocks.{number}.down.bias",)
        assert unit.replicated == (f"blocks.{number}.norm.bias", f"blocks.{number}.norm.weight")
    assert found[3] == ("head.weight", UnitKind.WEIGHT, Combine.CONCAT, {"weight": Cut(0, 20), "bias": Cut(0, 20)})
    assert spec.units[4].kind is UnitKind.REPLICATED


class Declares(Plain):
    tp_plan = PLAN


def test_a_plain_module_may_bring_a_plan_of_its_own():
    """Without a configuration no tiny model shows whether its modules run on slices: weights go one by one."""
    spec = describe(Declares())
    assert {u.kind for u in spec.cut_units} == {UnitKind.WEIGHT}
    assert {u.name for u in spec.cut_units} == {u.name for u in describe(Plain(), plan=PLAN).cut_units} - {
        "blocks.0",
        "blocks.1",
    } | {f"blocks.{number}.{name}.weight" for number in (0, 1) for name in ("up", "down")}


def test_patterns_may_name_parameters():
    spec = describe(Plain(depth=1), plan={"blocks.*.up.weight": "colwise", "blocks.*.down.weight": "rowwise"})
    cuts = {w.name: w.cut for w in spec.cut_units[0].weights}
    assert cuts == {
        "blocks.0.up.weight": Cut(0, 12),
        "blocks.0.up.bias": Cut(0, 12),
        "blocks.0.down.weight": Cut(1, 12),
    }
    assert spec.cut_units[0].added_once == ("blocks.0.down.bias",)  # a bias goes with its weight


def test_a_module_with_an_empty_plan_is_all_replicated():
    spec = describe(Plain(), plan={})
    assert [u.kind for u in spec.units] == [UnitKind.REPLICATED]
    assert spec.cut_units == ()


def test_a_column_without_its_row_is_cut_weight_by_weight():
    spec = describe(Plain(depth=1), plan={"blocks.*.up": "colwise"})
    assert [(u.name, u.kind) for u in spec.cut_units] == [("blocks.0.up.weight", UnitKind.WEIGHT)]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.upp": "colwise"}, "plan: 'blocks.*.upp' matches nothing in Plain"),
        ({"up": "colwise"}, "plan: 'up' matches nothing in Plain"),
        ({"embed": "sideways"}, "plan: role 'sideways' of 'embed' is not supported. Known: "),
    ],
)
def test_mistakes_in_a_plan_are_refused(plan, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        describe(Plain(), plan=plan)


def test_an_unknown_role_that_matches_nothing_is_refused_too():
    with pytest.raises(ConfigError, match="nowhere"):
        describe(Plain(), plan={"nowhere": "sideways"})

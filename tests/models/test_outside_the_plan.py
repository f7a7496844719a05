"""Weights outside of a declared plan: cut by rules, if a tiny model shows that all ranks use them alike."""

import json

import pytest
import torch
import transformers
from transformers.models.phimoe import modeling_phimoe

import rotorch
from rotorch.core.spec import UnitKind
from rotorch.models.describe import describe
from rotorch.models.trial import slices as trial_of_slices
from rotorch.testing.batches import global_batch
from rotorch.testing.conformance import INVARIANTS, examine, make_case
from rotorch.testing.fake import as_rank
from rotorch.testing.traffic import sent_and_said

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "intermediate_size": 48, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def spec_of(config, plan=None):
    with rotorch.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config)
    return describe(model, plan=plan)


def phimoe():
    return transformers.PhimoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2)


def mixtral(width):
    sizes = {**SIZES, **EXPERTS, "hidden_size": width, "intermediate_size": 2 * width}
    return transformers.MixtralConfig(**sizes, num_key_value_heads=2)


def alone(spec):
    return {u.name: u for u in spec.units if u.kind is UnitKind.WEIGHT}


@pytest.fixture
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(trial_of_slices, "_known", {})


def test_attention_that_a_plan_leaves_out_goes_round():
    spec = spec_of(phimoe())
    names = {f"model.layers.{layer}.self_attn.{p}_proj.weight" for layer in range(2) for p in "qkvo"}
    assert names <= set(alone(spec))
    unit = alone(spec)["model.layers.0.self_attn.q_proj.weight"]
    assert (unit.uses, unit.reads_in_backward) == (1, 1)
    assert [w.name.rpartition(".")[2] for w in unit.weights] == ["weight", "bias"][: len(unit.weights)]
    whole = {w.name for u in spec.units if u.kind is UnitKind.REPLICATED for w in u.weights}
    assert all("norm" in name or name.endswith("bias") for name in whole)
    assert spec.kept_whole == ()


def test_what_is_large_and_whole_is_listed_with_the_reason():
    spec = spec_of(mixtral(64))
    assert {kept.name: kept.why for kept in spec.kept_whole} == {
        f"model.layers.{layer}.mlp.gate.weight": "no rule cuts a MixtralTopKRouter" for layer in range(2)
    }
    assert "'model.layers.1.mlp.gate.weight'" in spec.summary()


def test_what_is_small_stays_whole_and_is_not_spoken_of():
    spec = spec_of(mixtral(1024))
    whole = {w.name for u in spec.units if u.kind is UnitKind.REPLICATED for w in u.weights}
    assert "model.layers.0.mlp.gate.weight" in whole and spec.kept_whole == ()


def test_weights_inside_a_module_on_slices_are_made_whole_once_a_call():
    as_described = spec_of(transformers.DeepseekV2Config(**SIZES, **LATENT))
    spec = rotorch.RTP(size=2).units_of(as_described)
    (attention,) = (u for u in spec.units if u.name == "model.layers.0.self_attn")
    inside = {n for n in attention.replicated if "norm" not in n}
    assert attention.kind is UnitKind.MODULE and inside == {
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    }
    assert {w.cut.groups for w in attention.weights} == {4}  # its heads, not the columns of one of its weights
    assert all((alone(spec)[n].uses, alone(spec)[n].reads_in_backward) == (1, 0) for n in inside)
    order = [u.name for u in spec.units]
    assert all(order.index(n) < order.index(attention.name) for n in inside)
    assert sorted(w.name for w in spec.weights) == sorted(w.name for w in as_described.weights)
    # Strategies that do not make weights whole have them whole.
    assert inside.isdisjoint(alone(as_described))
    assert inside <= {kept.name for kept in as_described.kept_whole} - {kept.name for kept in spec.kept_whole}


def test_a_users_own_plan_is_his_word():
    spec = spec_of(phimoe(), plan={"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
                                   "model.layers.*.mlp.experts.down_proj": "rowwise"})  # fmt: skip
    assert {u.name for u in spec.cut_units} == {f"model.layers.{layer}.mlp.experts" for layer in range(2)}
    assert spec.kept_whole == ()


@pytest.mark.usefixtures("_nothing_is_known")
def test_what_depends_on_the_data_stays_whole(monkeypatch):
    forward = modeling_phimoe.PhimoeAttention.forward

    def sometimes(self, hidden_states, *args, **kwargs):
        output, maps = forward(self, hidden_states, *args, **kwargs)
        return (output if hidden_states.shape[1] > 1 else hidden_states), maps

    monkeypatch.setattr(modeling_phimoe.PhimoeAttention, "forward", sometimes)
    assert "model.layers.0.self_attn.o_proj.weight" in alone(spec_of(phimoe()))  # used, though for nothing

    def seldom(self, hidden_states, *args, **kwargs):
        return sometimes(self, hidden_states, *args, **kwargs) if hidden_states.shape[1] > 1 else (hidden_states, None)

    monkeypatch.setattr(trial_of_slices, "_known", {})
    monkeypatch.setattr(modeling_phimoe.PhimoeAttention, "forward", seldom)
    spec = spec_of(phimoe())
    kept = {kept.name: kept.why for kept in spec.kept_whole}
    assert "depends on the data" in kept["model.layers.0.self_attn.o_proj.weight"]
    assert not any("self_attn" in name for name in alone(spec))


@pytest.mark.usefixtures("_nothing_is_known")
def test_without_a_tiny_model_that_runs_it_stays_whole(monkeypatch):
    def broken(self, *args, **kwargs):
        raise ValueError("planted")

    monkeypatch.setattr(modeling_phimoe.PhimoeForCausalLM, "forward", broken)
    spec = spec_of(phimoe())
    kept = {kept.name: kept.why for kept in spec.kept_whole}
    assert "no tiny PhimoeForCausalLM runs" in kept["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.usefixtures("_nothing_is_known")
def test_experts_that_are_taken_one_by_one_stay_whole(monkeypatch):
    """Their plan gives them a role, but where they cannot run on slices ranks ask for different ones of them."""
    monkeypatch.setattr(trial_of_slices, "adds_up", lambda *_: False)
    spec = spec_of(phimoe())
    kept = {kept.name: kept.why for kept in spec.kept_whole}
    assert "depends on the data" in kept["model.layers.0.mlp.experts.gate_up_proj"]
    assert not any("experts" in name for name in alone(spec))


@pytest.mark.slow
def test_all_invariants_of_weights_inside_a_module(warm, tmp_path):
    config = transformers.DeepseekV2Config(**SIZES, **LATENT, attn_implementation="eager", tie_word_embeddings=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    case = make_case(path, directory=tmp_path / "case")
    problems = examine(case, parallel="rtp=2[recompute=slice,transport=send_receive]", scratch=tmp_path / "scratch")
    assert {name: found for name, found in problems.items() if found} == {}
    assert set(problems) == set(INVARIANTS) and torch.is_grad_enabled()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_of_transposed_weights_are_the_layouts_to_the_byte(bias, num_ranks):
    """Falcon multiplies with `weight.T` and adds the bias apart."""
    with rotorch.on_meta():
        model = transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(**SIZES, bias=bias))
    shape = {"num_shares": 1, "num_micro_batches": 1, "num_rows": 2, "num_tokens": 8}
    batch = global_batch(seed=0, step=0, vocab_size=64, **shape)
    with as_rank(1, num_ranks=num_ranks):
        sent, said = sent_and_said(model, f"rtp={num_ranks}[transport=send_receive]", batch=batch)
    assert sent == said and sent

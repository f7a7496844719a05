"""`verify` says yes to what is right and points at what is wrong: most tests plant one mistake in a parallel model."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.parallel_model import ParallelModel
from rotorch.testing import verify as module_under_test
from rotorch.testing.verify import BAR, verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def plant(monkeypatch):
    """Makes every rank call `mistake(model)` on its parallel model; the reference stays as it is."""

    def planter(mistake):
        original = module_under_test.parallelize

        def parallelize(*args, **kwargs):
            model = original(*args, **kwargs)
            mistake(model)
            return model

        monkeypatch.setattr(module_under_test, "parallelize", parallelize)

    return planter


def after_finish(model: ParallelModel, change) -> None:
    """Calls `change()` when gradients are complete."""
    finish = model.sharded.finish

    def wrong_finish():
        finish()
        change()

    model.sharded.finish = wrong_finish


def test_a_right_layout_is_ok_and_the_report_has_the_fields_that_others_read(tiny):
    report = verify(tiny("llama"), parallel="fsdp=2", nproc=2)
    assert report.ok, report
    found = json.loads(json.dumps(report.to_json()))
    assert {k: found[k] for k in ("model", "parallel", "nproc", "dtype", "steps", "first_divergent_module", "ok")} == {
        "model": tiny("llama"),
        "parallel": "fsdp=2",
        "nproc": 2,
        "dtype": "float64",
        "steps": 3,
        "first_divergent_module": None,
        "ok": True,
    }
    assert 0 <= found["max_rel_err_loss"] <= BAR
    assert 0 < found["max_rel_err_grad"] <= BAR
    assert len(found["per_step"]) == 3
    assert found["num_modules_compared"] > 20


def test_one_gradient_scaled_on_one_rank_is_named(tiny, plant):
    def mistake(model):
        def change():
            held = model.weights["model.layers.1.post_attention_layernorm.weight"]
            if dist.get_rank() == 1 and held.local_grad is not None:
                held.local_grad.mul_(1.001)

        after_finish(model, change)

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=1)
    assert not report.ok
    assert report.first_divergent_module == "model.layers.1.post_attention_layernorm"
    assert report.first_divergence.what == "gradient"
    assert report.worst_weights[0][0] == "model.layers.1.post_attention_layernorm.weight"
    assert "a mistake, not rounding" in report.verdict


def test_gradients_averaged_instead_of_summed_are_recognised(tiny, plant):
    def mistake(model):
        model.sharded.loss_scale = 1.0  # torch's DDP averages, from the second step on

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=2)
    assert not report.ok
    assert "0.5 times the reference's" in report.verdict


def on_slices(hook):
    hook.sees_slices = True
    return hook


def test_a_bias_added_twice_is_named(tiny, plant):
    def mistake(model):
        layer = model.module.model.layers[1].self_attn.o_proj
        layer.register_forward_hook(on_slices(lambda module, _, output: output + 0.25))

    plant(mistake)
    report = verify(tiny("llama"), parallel="fsdp=2", steps=1)
    assert not report.ok
    assert report.first_divergent_module == "model.layers.1.self_attn.o_proj"
    assert (report.first_divergence.what, report.first_divergence.step) == ("output", 1)


def test_experts_are_run_in_a_way_that_knows_float64(tiny, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny("mixtral"), output_router_logits=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config.to_json_string())
    assert verify(str(tmp_path / "config.json"), parallel="fsdp=2", steps=1).ok
    assert verify(str(tmp_path), parallel="rtp=2", steps=1).ok


@pytest.mark.parametrize("inside", [pytest.param("mlp", marks=pytest.mark.slow), "mlp.down_proj"])
def test_of_a_unit_that_runs_on_slices_the_unit_is_named(tiny, plant, inside):
    def mistake(model):
        module = model.module.get_submodule(f"model.layers.1.{inside}")
        module.register_forward_hook(on_slices(lambda module, _, output: output * 1.01))

    plant(mistake)
    report = verify(tiny("llama"), parallel="rtp=2[recompute=slice]", steps=1)
    assert not report.ok
    assert report.first_divergent_module == "model.layers.1.mlp"


def test_a_mistake_that_begins_in_a_later_step_is_dated(tiny, plant):
    def mistake(model):
        start, steps = model.sharded.start, []

        def stale():
            start()
            steps.append(1)
            if len(steps) == 2:
                model.weights["model.layers.0.mlp.up_proj.weight"].local.mul_(1.1)

        model.sharded.start = stale

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=2)
    assert (report.first_divergence.step, report.first_divergence.what) == (2, "output")
    assert report.first_divergent_module == "model.layers.0.mlp.up_proj"


def test_an_output_perturbed_on_one_rank_is_named(tiny, plant):
    def mistake(model):
        if dist.get_rank() == 1:
            layer = model.module.model.layers[0].mlp
            layer.register_forward_hook(lambda module, _, output: output * (1 + 1e-6))

    plant(mistake)
    report = verify(tiny("qwen3"), parallel="ddp=2", steps=1)
    assert not report.ok
    assert report.first_divergent_module == "model.layers.0.mlp"
    assert report.max_rel_err_grad > BAR


def test_a_wrong_backward_is_named_where_it_begins(tiny, plant):
    """All gradients before the mistake in forward order are wrong; the last of them is where it is."""

    def mistake(model):
        def double(module, args, output: Tensor):
            output.register_hook(lambda grad: grad * 1.01)

        model.module.model.layers[1].self_attn.register_forward_hook(lambda m, a, out: double(m, a, out[0]))

    plant(mistake)
    report = verify(tiny("llama"), parallel="fsdp=2", steps=1)
    assert report.first_divergence.what == "gradient"
    assert report.first_divergent_module == "model.layers.1.self_attn.o_proj"


def test_a_wrong_step_of_the_optimizer_is_named(tiny, plant):
    """Loss and gradients are right in both steps: weights alone differ after the second."""

    def mistake(model):
        original, steps = torch.optim.AdamW.step, []

        def step(self, *args):
            steps.append(None)
            if len(steps) == 2:
                model.weights["model.layers.0.mlp.up_proj.weight"].local_parameter.grad.mul_(2)
            return original(self, *args)

        torch.optim.AdamW.step = step  # in this rank's process

    plant(mistake)
    report = verify(tiny("llama"), parallel="rtp=2", steps=2)
    assert not report.ok and report.max_rel_err_grad <= BAR
    assert report.first_divergent_module == "model.layers.0.mlp.up_proj"
    assert (report.first_divergence.what, report.first_divergence.step) == ("weight after the optimizer's step", 2)
    assert report.max_rel_err_weights > 1e-4


def test_where_a_true_gradient_is_zero_weights_are_set_aside(tmp_path):
    """A soft-max is blind to the bias of BERT's keys; and it is no model to be trained for the next token."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = {"model_type": "bert", "num_attention_heads": 4, "max_position_embeddings": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertLMHeadModel"]}))
    report = verify(str(tmp_path / "config.json"), parallel="rtp=2")
    assert report.ok and report.max_rel_err_weights < 1e-9, report
    assert report.num_elements_set_aside == 2 * sizes["hidden_size"]
    assert report.note.startswith("rotorch train refuses this model: 'bert' reads in both directions")


def test_a_wrong_initial_weight_is_named(tiny, plant):
    def mistake(model):
        materialize = model.materialize

        def wrong(*, seed):
            materialize(seed=seed)
            model.weights["model.norm.weight"].local.add_(1e-3)
            model.values_changed()

        model.materialize = wrong

    plant(mistake)
    report = verify(tiny("llama"), parallel="fsdp=2", steps=1)
    assert report.first_divergence.what == "initial weight"
    assert (report.first_divergence.step, report.first_divergent_module) == (0, "model.norm")


def test_a_wrong_loss_is_called_so(tiny, plant):
    def mistake(model):
        forward_backward = model.forward_backward
        model.forward_backward = lambda batches: forward_backward(batches) * 1.5

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=1)
    assert report.first_divergent_module == "loss"
    assert report.max_rel_err_loss == pytest.approx(0.5)


def test_float32_somewhere_is_told_from_a_mistake(tiny, plant):
    def mistake(model):
        norm = model.module.model.layers[0].input_layernorm
        norm.register_forward_hook(lambda module, _, output: (output * 2**24).round() / 2**24)

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=1)
    assert report.first_divergent_module == "model.layers.0.input_layernorm"
    assert "float32" in report.verdict


def test_no_gradient_at_all_is_found(tiny, plant):
    def mistake(model):
        def change():
            for held in model.weights.values():
                held.parameter.grad = None

        after_finish(model, change)

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=1)
    assert report.max_rel_err_grad == pytest.approx(1.0)


def test_not_a_number_is_found(tiny, plant):
    def mistake(model):
        def change():
            if dist.get_rank() == 1:
                model.weights["model.norm.weight"].local_grad.mul_(float("nan"))

        after_finish(model, change)

    plant(mistake)
    report = verify(tiny("llama"), parallel="ddp=2", steps=1)
    assert not report.ok
    assert report.max_rel_err_grad == float("inf")
    assert report.first_divergent_module == "model.norm"


@pytest.mark.parametrize("parallel", [pytest.param("single", marks=pytest.mark.slow), "fsdp=2"])
def test_a_directory_is_loaded_on_both_sides(tiny, tmp_path, parallel):
    from rotorch.models.hf import causal_lm, load_config

    torch.manual_seed(0)
    causal_lm(load_config(tiny("qwen3"))).save_pretrained(tmp_path)
    report = verify(str(tmp_path), parallel=parallel, steps=1)
    assert report.ok, report


def test_layers_keeps_the_first_ones(tiny):
    report = verify(tiny("gemma2"), parallel="single", steps=1, layers=1)
    assert report.ok
    assert not any(".layers.1." in name for name, _ in report.worst_weights)


def test_bad_input_is_refused_before_any_rank_starts(tiny, monkeypatch):
    monkeypatch.setattr(module_under_test, "run_ranks", lambda *a, **k: pytest.fail("ranks were started"))
    for keywords, words in (
        ({"parallel": "fsdp=2", "nproc": 3}, "2 ranks, but there are 3"),
        ({"parallel": "fsd=2"}, "did you mean 'fsdp'"),
        ({"parallel": "rtp=4096"}, "Write rtp="),
    ):
        with pytest.raises(ConfigError, match=words):
            verify(tiny("llama"), **keywords)
    with pytest.raises(ConfigError, match="no '/nowhere"):
        verify("/nowhere/config.json", parallel="single")


def test_a_rank_that_raises_is_named(tiny, plant):
    def mistake(model):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("planted")

    plant(mistake)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised.*planted"):
        verify(tiny("llama"), parallel="ddp=2", steps=1)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"layers": 0}, {"micro_batches": -2}, {"seed": -1}])
def test_numbers_that_compare_nothing_are_refused(tiny, wrong):
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong.values()))}: write [01] or more"):
        verify(tiny("llama"), parallel="ddp=2", **wrong)

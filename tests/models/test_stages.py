"""Stages of unmodified models, and where a model is cut into them."""

import pytest
import torch

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.stages import in_stage, of_stages, with_stages
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.models.stages import StagedModule, StageOutput, layer_order
from rotorch.strategies import parse_parallel
from rotorch.testing.verify import verify


def meta(path):
    with rotorch.on_meta():
        return causal_lm(load_config(path)).train()


def test_stages_hold_every_weight_and_a_tied_one_twice(tiny):
    spec = with_stages(describe(meta(tiny("qwen3"))), places=(range(2), range(2, 4), range(4, 6)))
    assert {w.name for w in spec.weights} == {w.name for w in describe(meta(tiny("qwen3"))).weights}
    tied = next(u for u in spec.units if "embed_tokens" in u.name)
    assert tied.stages == (0, 2)
    first, last = (of_stages(spec, mine=lambda stage, k=k: stage == k) for k in (0, 2))
    by_rank = [next(u for u in part.units if "embed_tokens" in u.name) for part in (first, last)]
    assert [(u.uses, u.reads_in_backward) for u in by_rank] == [(1, 0), (1, 1)]
    assert sum(in_stage(u).boundary_width > 0 for u in spec.units) == 3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "mixtral"])
def test_stages_one_after_another_are_the_model(tiny, family):
    torch.manual_seed(0)
    config = load_config(tiny(family))
    module = causal_lm(config).eval()
    order = layer_order(module)
    last = len(order.layers)
    staged = StagedModule(module, order=order, places=(range(2), range(2, 2 * last)))
    batch = {"input_ids": torch.randint(config.vocab_size, (2, 7)), "attention_mask": torch.ones(2, 7)}
    batch["attention_mask"][0, 5:] = 0
    with torch.no_grad():
        whole = module(**batch, use_cache=False).logits
        with staged.stage(0, received=None), pytest.raises(StageOutput) as end:
            module(**batch, use_cache=False)
        with staged.stage(1, received=end.value.hidden_states):
            parts = module(**batch, use_cache=False).logits
        assert torch.equal(parts, whole)
        assert torch.equal(module(**batch, use_cache=False).logits, whole)  # nothing is left behind


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_neox", "mixtral", "olmo2"])
def test_halves_one_after_another_are_the_model_or_refused_with_a_reason(tiny, family):
    torch.manual_seed(0)
    config = load_config(tiny(family))
    config._experts_implementation = "eager"
    module = causal_lm(config).double().eval()
    order = describe(module).order
    if family == "gpt_neox":  # both blocks are given the same input
        assert not order.halves and "gives something else where a layer's attention" in order.not_in_halves
        return
    first, second = order.halves
    assert (first.block, second.block) == ("self_attn", "mlp") and first.outputs == 2 and second.outputs == 0
    assert ("post_attention_layernorm" in first.children) == (family in ("gemma2", "olmo2"))
    places = [range(number, number + 1) for number in range(order.num_places)]
    staged = StagedModule(module, order=order, places=places)
    batch = {"input_ids": torch.randint(config.vocab_size, (2, 7)), "attention_mask": torch.ones(2, 7)}
    batch["attention_mask"][0, 5:] = 0
    received = None
    with torch.no_grad():
        whole = module(**batch, use_cache=False).logits
        for number in range(order.num_places - 1):
            with staged.stage(number, received=received), pytest.raises(StageOutput) as end:
                module(**batch, use_cache=False)
            received = end.value.hidden_states
        with staged.stage(order.num_places - 1, received=received):
            halves = module(**batch, use_cache=False).logits
        assert torch.equal(halves, whole)
        assert torch.equal(module(**batch, use_cache=False).logits, whole)  # nothing is left behind


def halves_of(module):
    order = describe(module).order
    return order.halves, order.not_in_halves


def test_a_dropout_behind_an_attention_is_in_the_half_of_the_attention(tiny):
    """In a trial it does nothing, and in training it would drop zeros, and nothing of the attention."""
    config = load_config(tiny("gpt_neox"))
    config.use_parallel_residual, config.hidden_dropout = False, 0.5
    with rotorch.on_meta():
        (first, second), _ = halves_of(causal_lm(config))
    assert "post_attention_dropout" in first.children and "post_mlp_dropout" in second.children


def test_layers_that_do_something_behind_both_blocks_stay_whole(tiny, monkeypatch):
    config = load_config(tiny("llama"))
    kind = type(causal_lm(config).model.layers[0])
    forward, init = kind.forward, kind.__init__

    def scaled(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * self.scale

    def with_scale(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_buffer("scale", torch.ones(1))  # as it comes; a checkpoint has another

    monkeypatch.setattr(kind, "forward", scaled)
    monkeypatch.setattr(kind, "__init__", with_scale)
    config.rms_norm_eps = 1.5e-5  # no trial is known of it
    with rotorch.on_meta():
        halves, why = halves_of(causal_lm(config))
    assert not halves and "weights or buffers of their own" in why

    monkeypatch.setattr(kind, "__init__", init)

    def dropped(self, *args, **kwargs):
        return torch.nn.functional.dropout(forward(self, *args, **kwargs), p=0.1, training=self.training)

    monkeypatch.setattr(kind, "forward", dropped)
    config.rms_norm_eps = 1.6e-5
    with rotorch.on_meta():
        halves, why = halves_of(causal_lm(config))
    assert not halves and "gives something else where a layer's attention and what follows are apart" in why


@pytest.mark.parametrize("change", ["hook", "checkpointing"])
def test_what_would_act_in_both_stages_of_a_layer_is_refused(tiny, change):
    config = load_config(tiny("llama"))
    module = causal_lm(config)
    staged = StagedModule(module, order=describe(module).order, places=(range(1), range(1, 4)))
    ids = torch.zeros(2, 7, dtype=torch.int64)
    if change == "hook":
        module.model.layers[0].register_forward_hook(lambda *_: None)
        words = "a hook on layer 0 would act in both stages"
    else:
        module.model.layers[0].gradient_checkpointing = True  # as transformers enables it
        words = "gradient checkpointing is enabled on layer 0, of which a stage has one half"
    with pytest.raises(ConfigError, match=words), staged.stage(0, received=None):
        module(ids, use_cache=False)


@pytest.mark.parametrize(
    ("asked", "times", "words"),
    [
        ({"output_hidden_states": True}, 1, "does not have the hidden states of all layers"),
        ({"output_attentions": True}, 1, "does not have the attention weights of all layers"),
        ({}, 2, "the model is run twice for one micro-batch"),
    ],
)
def test_what_a_last_stage_would_answer_wrongly_is_refused(tiny, asked, times, words):
    config = load_config(tiny("llama"))
    module = causal_lm(config).eval()
    staged = StagedModule(module, order=layer_order(module), places=(range(2), range(2, 4)))
    received, ids = torch.zeros(2, 7, config.hidden_size), torch.zeros(2, 7, dtype=torch.int64)
    with staged.stage(1, received=received), pytest.raises(ConfigError, match=words):
        for _ in range(times):
            module(ids, use_cache=False, **asked)
    whole = StagedModule(module, order=layer_order(module), places=(range(4),))
    with whole.stage(0, received=None):  # a pipeline of one stage is the model
        for _ in range(times):
            module(ids, use_cache=False, **asked)


def refusal(parallel, module):
    with pytest.raises(ConfigError) as error:
        rotorch.parallelize(module, parallel, device="cpu")
    return str(error.value)


def test_what_cannot_be_cut_is_refused(tiny):
    assert "3 stages over LlamaForCausalLM, which has 2 layers" in refusal("pp=3", meta(tiny("llama")))
    asked = meta(tiny("llama"))
    asked.config.output_hidden_states = True
    assert "it would return the hidden states of all layers" in refusal("pp=2", asked)
    assert "cannot be cut into stages: it has no pipeline plan" in refusal("pp=2", torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="3 stages over LlamaForCausalLM"):
        parse_parallel("zeropp=3x2")[0].units_of(describe(meta(tiny("llama"))))
    config = load_config(tiny("mixtral"))
    config.output_router_logits = True
    with rotorch.on_meta():
        routed = causal_lm(config)
    assert "the loss of its routers needs those of all layers" in refusal("pp=2", routed)
    with pytest.raises(ConfigError, match=r"the strategy that holds the stages decides .*\[recompute=...\]"):
        parse_parallel("pp=2[recompute=block],rtp=2")
    with pytest.raises(ConfigError, match="a unit of 4 micro-batches, but a step has 2"):
        parse_parallel("pp=2[unit=4]")[0].table(2)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("zeropp=2x1[unit=4]", "a unit of 4 micro-batches, but a step has 3. Write a unit of at most 3"),
        ("zeropp=2x1[chunks=2]", "4 stages over LlamaForCausalLM, which has 2 layers"),
        (
            "zeropp=2x2[inner=rtp,layers=2-1]",
            "3 layers over LlamaForCausalLM, which has 2. Write numbers that add up to 2",
        ),
        ("pp=1[schedule=interleaved_1f1b,chunks=3]", "3 stages over LlamaForCausalLM, which has 2 layers"),
    ],
)
def test_it_is_refused_before_ranks_start(tiny, monkeypatch, parallel, words):
    monkeypatch.setattr("rotorch.testing.verify.run_ranks", None)
    with pytest.raises(ConfigError, match=words):
        verify(tiny("llama"), parallel=parallel, micro_batches=3)

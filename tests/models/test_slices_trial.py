"""Trial of modules on slices: a plan that the model's code does not allow is found before training."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.spec import UnitKind
from rotorch.models.describe import describe
from rotorch.models.trial import slices as trial_of_slices
from rotorch.shard.materialize import on_meta
from rotorch.testing.subjects import tiny_subject


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(trial_of_slices, "_known", {})


def modules_of(model_class, config):
    with on_meta():
        model = model_class(config)
    spec = describe(model)
    return {u.name.split(".")[-1] for u in spec.units if u.kind is UnitKind.MODULE}, spec


def llama():
    return transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)


def test_attention_and_mlp_of_a_llama_run_on_slices():
    found, _ = modules_of(transformers.LlamaForCausalLM, llama())
    assert found == {"self_attn", "mlp"}


@pytest.mark.parametrize("around", [on_meta, lambda: torch.device("meta")])
def test_nothing_is_put_on_meta_by_who_describes_a_model_there(around):
    with around():
        spec = describe(transformers.LlamaForCausalLM(llama()))
    assert {u.name.split(".")[-1] for u in spec.units if u.kind is UnitKind.MODULE} == {"self_attn", "mlp"}


def test_norms_over_all_heads_are_found_by_their_shapes():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with_norm = transformers.CohereConfig(use_qk_norm=True, vocab_size=64, **sizes)
    found, spec = modules_of(transformers.CohereForCausalLM, with_norm)
    assert found == {"mlp"}
    weights = {u.name for u in spec.units if u.kind is UnitKind.WEIGHT}
    assert {f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"} <= weights
    without = transformers.CohereConfig(use_qk_norm=False, vocab_size=64, **sizes)
    assert modules_of(transformers.CohereForCausalLM, without)[0] == {"self_attn", "mlp"}


def test_a_wrong_value_of_the_right_shape_is_found(monkeypatch):
    def normalised(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden / hidden.norm(dim=-1, keepdim=True))  # of all columns, or of a slice's

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", normalised)
    assert modules_of(transformers.LlamaForCausalLM, llama())[0] == {"self_attn"}


def test_code_that_takes_halves_and_no_thirds_is_found(monkeypatch):
    forward = modeling_llama.LlamaMLP.forward

    def in_groups(self, x):
        self.gate_proj(x).unflatten(-1, (-1, 24))  # of 48 columns in a tiny model
        return forward(self, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", in_groups)
    assert modules_of(transformers.LlamaForCausalLM, llama())[0] == {"self_attn"}


def test_a_second_output_that_is_no_map_of_heads_is_not_lost(monkeypatch):
    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, hidden_states, **kwargs: (forward(self, hidden_states, **kwargs)[0], hidden_states[..., 0]),
    )
    assert modules_of(transformers.LlamaForCausalLM, llama())[0] == {"mlp"}


def test_without_a_tiny_model_that_runs_nothing_is_trusted(monkeypatch):
    def broken(self, *args, **kwargs):
        raise ValueError("planted")

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", broken)
    assert modules_of(transformers.LlamaForCausalLM, llama())[0] == set()


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    modules_of(transformers.LlamaForCausalLM, llama())
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_is_tried_once(monkeypatch):
    tried = []
    original = trial_of_slices._run_on_slices
    monkeypatch.setattr(trial_of_slices, "_run_on_slices", lambda *a, **k: tried.append(1) or original(*a, **k))
    modules_of(transformers.LlamaForCausalLM, llama())
    modules_of(transformers.LlamaForCausalLM, llama())
    assert tried == [1]


FORKED = """
import os
import torch
import transformers
from torch import nn
from rotorch.models.describe import describe
from rotorch.shard.materialize import on_meta
from rotorch.testing.subjects import tiny_subject

with on_meta():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    )
describe(model)
assert torch.get_num_threads() > 1
child = os.fork()
if child == 0:
    torch.ones(2048, 2048) @ torch.ones(2048, 2048)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: torch starts no threads")
def test_a_process_that_has_tried_one_can_be_forked():
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "7"


def two_values(config):
    """A llama whose layers hand on more than hidden states, as those of glm_moe_dsa do."""

    class Layer(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, *args, before=None, **kwargs):
            return super().forward(hidden_states, *args, **kwargs), hidden_states

    class Model(modeling_llama.LlamaModel):
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            places = torch.arange(x.shape[1])[None]
            rotary, before = self.rotary_emb(x, position_ids=places), None
            for layer in self.layers:
                x, before = layer(x, position_embeddings=rotary, position_ids=places, before=before)
            return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    class Whole(modeling_llama.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Model(config)
            self.model.layers = nn.ModuleList([Layer(config, n) for n in range(config.num_hidden_layers)])
            self.post_init()

    return Whole(config)


def test_layers_that_hand_on_two_values_make_no_stages():
    with on_meta():
        module, plain = two_values(llama()), transformers.LlamaForCausalLM(llama())
    assert describe(plain).order.refused == ""
    assert describe(module).order.refused == "its layers hand on 2 values, of which stages know the hidden states only"
    with pytest.raises(ConfigError, match=r"pp=2: Whole cannot be cut into stages: its layers hand on 2 values"):
        rotorch.parallelize(module, "pp=2", device="cpu")


def test_layers_that_share_more_than_hidden_states_make_no_stages(monkeypatch):
    inner = modeling_llama.LlamaDecoderLayer.forward

    def forward(self, hidden_states, *args, position_embeddings, **kwargs):
        position_embeddings[0].add_(hidden_states.abs().mean())  # for layers after it
        return inner(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    with on_meta():
        module = transformers.LlamaForCausalLM(llama())
    assert "gives something else in stages" in describe(module).order.refused


def test_layers_that_share_more_only_where_tokens_are_masked_make_no_stages(monkeypatch):
    inner = modeling_llama.LlamaDecoderLayer.forward

    def forward(self, hidden_states, *args, attention_mask, position_embeddings, **kwargs):
        if attention_mask is not None:  # there is none where every token is seen
            position_embeddings[0].add_(hidden_states.abs().mean())
        given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **kwargs}
        return inner(self, hidden_states, *args, **given)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    with on_meta():
        module = transformers.LlamaForCausalLM(llama())
    refused = describe(module).order.refused
    assert "gives something else in stages" in refused and refused.endswith("(where padding is masked)")


def test_a_mask_that_a_model_does_not_take_says_nothing(monkeypatch):
    whole = modeling_llama.LlamaModel.forward

    def forward(self, *args, attention_mask=None, **kwargs):
        assert attention_mask is None
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    with on_meta():
        module = transformers.LlamaForCausalLM(llama())
    assert describe(module).order.refused == ""


def test_a_mask_made_from_token_ids_makes_no_stages():
    module = tiny_subject(T5GemmaModuleConfig).build()
    refused = describe(module).order.refused
    assert "gives something else in stages" in refused and refused.endswith("(where padding is not masked)")

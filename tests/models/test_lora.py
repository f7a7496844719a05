"""LoRA: the same loss and gradients over ranks as in one process, base weights cut, adapters in peft's own format."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.models.lora import adapter_config, adapters_of, add_lora, is_adapter, merged_weight, save_lora
from rotorch.testing.ranks import run_ranks

peft = pytest.importorskip("peft")

LLAMA = Path(__file__).resolve().parents[2] / "configs" / "tiny" / "llama.json"
TARGETS = ["q_proj", "o_proj", "gate_proj", "down_proj"]
IDS = torch.arange(64).view(4, 16)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(LLAMA)).save_pretrained(directory)
    return directory


def tune(published, parallel, out):
    """Loads a base model, takes two steps on adapters; returns losses, gradients, and bytes held of base weights."""
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(LLAMA), dtype=torch.float64)
        module = add_lora(module, rank=2, targets=TARGETS)
    model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=1).load(str(published))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    mine = IDS.chunk(model.num_batch_ranks)[model.batch_rank]
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(float(model.forward_backward({"input_ids": mine, "labels": mine})))
        optimizer.step()
    adapters = [name for name in model.weights if is_adapter(name)]
    grads = {name: model.full_tensor(name, grad=True).numpy() for name in adapters}
    values = {name: model.full_tensor(name) for name in adapters}
    if out is not None and model.mesh.get_rank() == 0:
        save_lora(model.module, out, values=values)
    logits = model.next_token_logits(IDS).numpy()
    base = sum(h.local.nbytes for h in model.weights.values() if ".base_layer." in h.name)
    frozen = {name for name, held in model.weights.items() if not held.weight.trained}
    model.close()
    return losses, grads, base, frozen, logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("parallel", "num_ranks"), [("rtp=2", 2), pytest.param("rtp=4", 4, marks=pytest.mark.slow), ("fsdp=2", 2)]
)
def test_ranks_do_as_one_process(published, tmp_path, warm, parallel, num_ranks):
    losses, grads, whole, _, _ = run_ranks(tune, published, "single", None, num_ranks=1)[0]
    found = run_ranks(tune, published, parallel, tmp_path, num_ranks=num_ranks)
    assert sum(base for _, _, base, _, _ in found) == whole  # nothing twice
    for theirs, their_grads, _, frozen, _ in found:
        assert theirs == pytest.approx(losses, rel=1e-6)  # transformers' loss is float32 at its end
        assert grads.keys() == their_grads.keys() and all(map(is_adapter, grads)) and frozen.isdisjoint(grads)
        for name, grad in grads.items():
            scale = abs(grad).max() or 1.0
            assert abs(their_grads[name] - grad).max() <= 1e-6 * scale, name
    base = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float64)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path)(input_ids=IDS).logits[:, -1].float()
    assert torch.allclose(torch.from_numpy(found[0][4]), expected, atol=1e-5)


def test_a_rank_of_zero_is_refused():
    with pytest.raises(ConfigError, match="lora: rank 0: an adapter needs a positive inner width"):
        add_lora(torch.nn.Linear(2, 2), rank=0, targets=["x"])


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "nowhere"], "target 'nowhere' names no layer of LlamaForCausalLM. Its linear layers are down_proj"),
        (["model.norm"], "names 'model.norm', a LlamaRMSNorm"),
        (["lm_head"], "is the head"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(targets, words):
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(LLAMA))
    with pytest.raises(ConfigError, match="lora: target") as caught:
        add_lora(module, rank=2, targets=targets)
    assert words in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # the latter keeps inputs first
def test_merging_is_what_peft_does(family):
    sizes = (
        {"n_layer": 1, "n_head": 2, "n_embd": 16}
        if family == "gpt2"
        else {"num_hidden_layers": 1, "num_attention_heads": 2}
    )
    config = AutoConfig.for_model(family, vocab_size=32, hidden_size=16, intermediate_size=16, **sizes)
    module = add_lora(AutoModelForCausalLM.from_config(config), rank=2, alpha=3)
    weights = dict(module.named_parameters())
    for name, weight in weights.items():
        if is_adapter(name):
            torch.nn.init.normal_(weight)
    beside = {name: found for name in weights if (found := adapters_of(name)) is not None}
    merged = {
        name: merged_weight(weights[name], weights[a], weights[b], config=adapter_config(module)).detach()
        for name, (a, b) in beside.items()
    }
    for layer in module.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.merge()
    assert len(merged) >= 4
    for name, value in merged.items():
        assert torch.allclose(value, weights[name], atol=1e-6), name


def test_adapters_are_whole_also_in_a_model_without_a_plan():
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_layer=1, n_head=2, n_embd=16)
    spec = describe(add_lora(AutoModelForCausalLM.from_config(config), rank=2))
    assert spec.cut_units and not any(is_adapter(w.name) for u in spec.cut_units for w in u.weights)
    assert not any(is_adapter(kept.name) for kept in spec.kept_whole)  # nothing to warn of
    assert {w.name for w in spec.weights if w.trained} == {w.name for w in spec.weights if is_adapter(w.name)}


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'rotorch\[lora\]'"):
        add_lora(torch.nn.Linear(2, 2), rank=2, targets=["x"])


def test_layers_that_peft_takes_for_experts_are_refused():
    """Of some models with experts peft makes another target than was named: merging would leave that out in silence."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1, first_k_dense_replace=1,
        kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, vocab_size=64,
    )  # fmt: skip
    for targets in (None, ["down_proj"]):
        with pytest.raises(ConfigError, match="takes 'down_proj' for its experts, which are no linear layers"):
            add_lora(DeepseekV2ForCausalLM(config), rank=2, targets=targets)
    model = add_lora(DeepseekV2ForCausalLM(config), rank=2, targets=["q_a_proj", "o_proj"])
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 4


def test_default_targets_of_a_model_with_experts_are_its_linear_layers(tiny):
    from rotorch.models.hf import causal_lm, load_config

    model = add_lora(causal_lm(load_config(tiny("mixtral"))), rank=2)
    adapted = {name.rpartition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert adapted and all(name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in adapted)

"""Cuts of weights where activations are cut along their features, and refusals: by rules and by trial."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.core.spec import Cut, GridCut
from rotorch.models.describe import describe
from rotorch.models.features import _Unknown, sums_of_norm
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.subjects import tiny_subject


def described(path):
    with rotorch.on_meta():
        return describe(causal_lm(load_config(path)), features=True)


def grids(path):
    spec = described(path)
    assert spec.features_stay_whole == ""
    return {w.name.split("layers.1.")[-1]: w.grid for w in spec.weights}


def test_matrices_are_cut_both_ways_and_norms_count_their_sums(tiny):
    llama = grids(tiny("llama"))
    assert llama["self_attn.q_proj.weight"] == GridCut(Cut(1, 128), Cut(0, 4))
    assert llama["self_attn.q_proj.bias"] == GridCut(None, Cut(0, 4))
    assert llama["self_attn.o_proj.weight"] == GridCut(Cut(1, 4), Cut(0, 128))
    assert llama["self_attn.o_proj.bias"] == GridCut(None, Cut(0, 128))
    assert llama["input_layernorm.weight"] == GridCut(None, Cut(0, 128), sums=1)
    assert llama["model.embed_tokens.weight"] == GridCut(Cut(0, 320), Cut(1, 128))
    assert llama["lm_head.weight"] == GridCut(Cut(1, 128), Cut(0, 320))


def test_norms_of_heads_of_all_heads_and_of_layers(tiny):
    assert grids(tiny("qwen3"))["self_attn.q_norm.weight"] == GridCut()
    assert grids(tiny("olmo2"))["self_attn.k_norm.weight"] == GridCut(None, Cut(0, 4), sums=1)
    neox = grids(tiny("gpt_neox"))
    assert neox["input_layernorm.weight"] == GridCut(None, Cut(0, 128), sums=2)
    assert neox["input_layernorm.bias"] == GridCut(None, Cut(0, 128))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("NanoChatConfig", "gives something else on halves of its features"),  # its norms have no weights
        ("OlmoConfig", "does not run on half of its features"),  # the same, by torch's own function
        ("Phi3Config", "does not project to heads of 'model.layers.0.self_attn' or from them"),  # fused
        ("CohereConfig", "has no rule"),
    ],
)
def test_what_is_not_known_is_refused(config, words):
    import transformers

    spec = describe(tiny_subject(getattr(transformers, config)).build(), features=True)
    assert words in spec.features_stay_whole


def test_experts_are_refused_by_name(tiny):
    assert "'model.layers.0.mlp.experts.gate_up_proj'" in described(tiny("mixtral")).features_stay_whole


def test_a_model_that_returns_features_is_refused(tiny):
    with rotorch.on_meta():
        headless = causal_lm(load_config(tiny("llama"))).model
    assert "no language-model head" in describe(headless, features=True).features_stay_whole


def small(kind, **fields):
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    return getattr(transformers, f"{kind}Config")(**sizes, **fields)


def test_images_come_in_by_channels_and_classes_go_out_whole():
    import transformers

    config = small("ViT", image_size=8, patch_size=4, num_channels=1, num_labels=3)
    with rotorch.on_meta():
        spec = describe(transformers.ViTForImageClassification(config), features=True)
    assert spec.features_stay_whole == ""
    grids = {w.name.removeprefix("vit."): w.grid for w in spec.weights}
    assert grids["embeddings.patch_embeddings.projection.weight"] == GridCut(None, Cut(0, 16))
    assert grids["embeddings.position_embeddings"] == GridCut(None, Cut(2, 16))
    assert grids["layers.0.attention.q_proj.weight"] == GridCut(Cut(1, 4), Cut(0, 4))  # between heads
    assert grids["layers.0.mlp.fc1.bias"] == GridCut(None, Cut(0, 24))
    assert grids["classifier.weight"] == GridCut(None, Cut(1, 16), whole_output=True)
    assert grids["classifier.bias"] == GridCut()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("ViTModel", "gives something else on halves of its features"),  # what it returns first is no linear layer's
        ("Dinov2ForImageClassification", "has no rule"),  # its head takes two features side by side
    ],
)
def test_encoders_that_return_features_are_refused(model, words):
    import transformers

    kind = "ViT" if model.startswith("ViT") else "Dinov2"
    with rotorch.on_meta():
        module = getattr(transformers, model)(small(kind, image_size=8, patch_size=4, num_channels=1))
    assert words in describe(module, features=True).features_stay_whole


def test_models_that_drop_whole_samples_are_refused():
    import transformers

    with rotorch.on_meta():
        config = small("Beit", image_size=8, patch_size=4, num_channels=1, drop_path_rate=0.5)
        module = transformers.BeitForImageClassification(config)
    assert "drop_path_rate = 0.5 drops whole samples" in describe(module, features=True).features_stay_whole


def test_nobody_is_asked_who_does_not_cut_features(tiny):
    with rotorch.on_meta():
        spec = describe(causal_lm(load_config(tiny("llama"))))
    assert all(w.grid is None for w in spec.weights)


class Norm(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self._function = function

    def forward(self, x):
        return self._function(x) * self.weight


NORMS = {
    "mean": (lambda x: x - x.mean(-1, keepdim=True), 1),
    "sum of squares": (lambda x: x * torch.rsqrt((x**2).sum(dim=(-1,), keepdim=True)), 1),
    "variance": (lambda x: x / torch.var(x, -1, keepdim=True, correction=0), 2),
    "deviation": (lambda x: x / x.std(-1, True, True), 2),
    "length": (lambda x: x / x.norm(dim=-1, keepdim=True), 1),
    "vector norm": (lambda x: x / torch.linalg.vector_norm(x, dim=x.dim() - 1, keepdim=True), 1),
    "normalize": (lambda x: F.normalize(x, dim=-1), 1),
    "rms_norm": (lambda x: F.rms_norm(x, (12,)), 1),
    "layer_norm": (lambda x: F.layer_norm(x, (12,), None, None, 1e-3), 2),
    "nothing": (lambda x: x.exp(), 0),
    "no sum over features": (lambda x: x - x.mean(0, keepdim=True), 0),
    "by keyword": (lambda x: x - torch.mean(input=x, dim=-1, keepdim=True), 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_sums_over_features_are_completed(name):
    function, num_sums = NORMS[name]
    assert sums_of_norm(Norm(function), size=12) == num_sums


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: x / x.amax(-1, keepdim=True),
        lambda x: x.flip(-1),
        lambda x: x.norm(1, -1, True),
    ],
)
def test_other_functions_of_all_features_are_found_out(function):
    with pytest.raises(_Unknown, match="has no rule"):
        sums_of_norm(Norm(function), size=12)


def test_a_norm_of_torchs_own_is_tried_with_its_weights():
    assert sums_of_norm(nn.LayerNorm(10), size=10) == 2
    assert sums_of_norm(nn.RMSNorm(10), size=10) == 1

"""atp beyond what every strategy is examined for: other orders and chunks, its tie to megatron, bytes on each axis."""

import itertools
import re

import pytest
import torch

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.traffic import Kind, MicroBatch, Phase
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import sent_and_said
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


FAMILIES = ("llama", "gpt_neox", "qwen3", "gemma2", "olmo2")


def cells(layouts, *, quick):
    """Every layout with every family; all but a few are slow: they say of another family what these say."""
    every = itertools.product(layouts, FAMILIES)
    return [cell if cell in quick else pytest.param(*cell, marks=pytest.mark.slow) for cell in every]


ONE_BY_TWO, TWO_BY_ONE = "atp=1x2[order=row_first]", "atp=2x1"


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        pytest.param("atp=2x2", "olmo2", marks=pytest.mark.slow),
        pytest.param("atp=2x2[order=row_first]", "olmo2", marks=pytest.mark.slow),
        pytest.param("atp=2x2[order=row_first]", "gemma2", marks=pytest.mark.slow),
        pytest.param("atp=2x2[chunks=3]", "gpt_neox", marks=pytest.mark.slow),
        ("atp=2x2[chunks=2,order=row_first]", "qwen3"),
        pytest.param("atp=3x1", "olmo2", marks=pytest.mark.slow),  # megatron to the bit: below
        pytest.param("atp=3x2", "llama", marks=pytest.mark.slow),
        pytest.param("ddp=2,atp=2x2", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def batch_for(config, *, step=0):
    vocab_size = config.get_text_config().vocab_size
    return global_batch(
        seed=0, step=step, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=8, vocab_size=vocab_size
    )


def trained(config, parallel):
    """Losses, gradients of the last step and weights after it, of this rank."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(float(model.forward_backward(batch_for(config, step=step))))
        optimizer.step()
    held = {name: (h.local.clone(), h.local_grad.clone()) for name, h in model.weights.items()}
    model.close()
    return losses, held


@pytest.mark.parametrize(
    ("layout", "family"),
    cells([TWO_BY_ONE, ONE_BY_TWO], quick={(TWO_BY_ONE, "llama")}),
)
def test_one_rank_on_the_axis_of_features_is_megatron_to_the_bit(tiny, family, layout):
    config = load_config(tiny(family))
    ours, theirs = (run_ranks(trained, config, parallel, num_ranks=2) for parallel in (layout, "megatron=2"))
    for (losses, held), (expected_losses, expected) in zip(ours, theirs, strict=True):
        assert losses == expected_losses
        assert held.keys() == expected.keys()
        for name in held:
            assert all(map(torch.equal, held[name], expected[name])), name


def metered(config, parallel):
    """Bytes that a step sends, and what the formulas say."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    return sent_and_said(module, parallel, batch=batch_for(config))


@pytest.mark.parametrize(
    ("layout", "family"),
    cells(
        ["atp=1x2", "atp=2x2", "atp=2x2[order=row_first]"],
        quick={("atp=2x2", "gpt_neox"), ("atp=2x2[order=row_first]", "llama")},
    ),
)
def test_bytes_are_the_formulas_to_the_byte(tiny, family, layout):
    ranks = num_ranks(parse_parallel(layout))
    for sent, expected in run_ranks(metered, load_config(tiny(family)), layout, num_ranks=ranks):
        assert sent == expected


@pytest.mark.parametrize(("layout", "num_ranks"), [("atp=4x2", 8), ("atp=4x16", 64)])
def test_bytes_of_many_ranks_are_the_formulas_to_the_byte(tiny, layout, num_ranks):
    for rank in (0, num_ranks - 1):
        with as_rank(rank, num_ranks=num_ranks):
            sent, expected = metered(load_config(tiny("llama")), layout)
        assert sent == expected


def test_a_layer_sends_what_the_paper_says(tiny):
    """12 b s h / d1 over the axis of features and 4 b s h / d2 over the other, of an MLP of 4 h without gates."""
    config = load_config(tiny("gpt_neox"))  # qkv of 3 h, MLP of 4 h
    with rotorch.on_meta():
        spec = describe(causal_lm(config), features=True)
    (strategy,) = parse_parallel("atp=2x4")
    spec = strategy.units_of(spec)
    layer = [u for u in spec.units if u.name.startswith("gpt_neox.layers.0.")]
    batch = MicroBatch(3, 8, itemsize=4)
    transfers = [t for u in layer for t in strategy.activation_transfers(u, batch=batch)]
    hidden_bytes = 3 * 8 * config.hidden_size * 4
    payload = {axis: sum(t.payload_bytes for t in transfers if t.axis == axis) for axis in strategy.axes}
    assert payload == {"atp_1": 4 * hidden_bytes // 4, "atp_2": 12 * hidden_bytes // 2}
    assert {t.kind for t in transfers} == {Kind.ALL_REDUCE}
    assert {t.phase for t in transfers} == {Phase.FORWARD, Phase.BACKWARD}


@pytest.mark.parametrize(
    ("family", "layout", "words"),
    [
        ("llama", "atp=2x3", "128 features of 'model.embed_tokens.weight' do not divide over 3 ranks"),
        ("llama", "atp=8x1", "'model.layers.0.self_attn.q_proj.weight' has 4 groups (heads, columns) for 8 ranks"),
        ("mixtral", "atp=2x2", "activations of MixtralForCausalLM cannot be cut along their features"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(tiny, family, layout, words):
    ranks = num_ranks(parse_parallel(layout))
    with pytest.raises(ConfigError, match=re.escape(words)) as caught, as_rank(0, num_ranks=ranks):
        with rotorch.on_meta():
            module = causal_lm(load_config(tiny(family)))
        rotorch.parallelize(module, layout, device="cpu")
    assert "\n" not in str(caught.value)


def test_what_has_no_roles_is_refused():
    from transformers import ViTConfig, ViTForImageClassification

    with rotorch.on_meta():
        vit = ViTForImageClassification(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ConfigError, match=r"projection\.weight' has no role in a plan"), as_rank(0, num_ranks=4):
        rotorch.parallelize(vit, "atp=2x2", device="cpu")

"""megatron beyond what every strategy is examined for: more ranks than heads, bytes of activations, ranks that share a
batch drawing alike, partly synchronised activations."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import Combine, Cut, Unit, UnitKind, Weight
from rotorch.core.traffic import Kind, MicroBatch, Phase
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.batches import global_batch
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import sent_and_said
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "layout",
    ["megatron=2", pytest.param("megatron=4", marks=SLOW), pytest.param("ddp=2,megatron=2", marks=SLOW)],
)
def test_norms_over_all_heads(tiny, layout):
    """OLMo-2's attention does not run on slices: its weights are cut one by one."""
    report = verify(tiny("olmo2"), parallel=layout, layers=2, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def test_experts(tiny):
    report = verify(tiny("mixtral"), parallel="megatron=2", layers=1, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def test_ranks_without_heads_wait(tiny):
    """Four key/value heads over five ranks, and a vocabulary of 320 rows: 64 each."""
    report = verify(tiny("llama"), parallel="megatron=5", layers=1, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def batch_for(config, *, num_rows=2, num_tokens=8, step=0):
    return global_batch(
        seed=0,
        step=step,
        num_shares=1,
        num_micro_batches=1,
        num_rows=num_rows,
        num_tokens=num_tokens,
        vocab_size=config.get_text_config().vocab_size,
    )


def metered(config, parallel):
    """Bytes that a step sends, and what the formulas say."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    return sent_and_said(module, parallel, batch=batch_for(config))


FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox", "olmo2")


@pytest.mark.parametrize(  # of the rest the next test has one rank, which sends what each does
    ("num_ranks", "family"),
    [
        (2, "llama"),
        *(pytest.param(n, f, marks=SLOW) for n in (2, 4) for f in FAMILIES if (n, f) != (2, "llama")),
    ],
)
def test_bytes_are_the_formulas_to_the_byte(tiny, family, num_ranks):
    layout = f"megatron={num_ranks}[transport=messages]"
    for sent, expected in run_ranks(metered, load_config(tiny(family)), layout, num_ranks=num_ranks):
        assert sent == expected


@pytest.mark.parametrize(
    ("num_ranks", "family"), [(64, "llama"), (64, "gpt_neox"), *((4, family) for family in FAMILIES)]
)
def test_bytes_of_many_ranks_are_the_formulas_to_the_byte(tiny, family, num_ranks):
    for rank in (0, num_ranks - 1):
        with as_rank(rank, num_ranks=num_ranks):
            sent, expected = metered(load_config(tiny(family)), f"megatron={num_ranks}")
        assert sent == expected


def test_a_decoder_layer_sends_four_activations(tiny):
    """Two sums in forward and two in backward, of batch x sequence x hidden (Megatron-LM, section 3)."""
    config = load_config(tiny("llama"))
    with rotorch.on_meta():
        spec = describe(causal_lm(config))
    (strategy,) = parse_parallel("megatron=4")
    layer = [u for u in spec.units if u.name.startswith("model.layers.0.")]
    batch = rotorch.core.traffic.MicroBatch(2, 8, itemsize=4)
    transfers = [t for u in layer for t in strategy.activation_transfers(u, batch=batch)]
    assert [t.phase for t in transfers] == [Phase.FORWARD, Phase.BACKWARD] * 2
    assert {(t.kind, t.payload_bytes) for t in transfers} == {(Kind.ALL_REDUCE, 2 * 8 * config.hidden_size * 4)}


class Classifier(nn.Module):
    """Patches, attention by torch's own module, a norm between, dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(1, 12, kernel_size=2, stride=2)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, dropout=dropout)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.dropout = nn.Dropout(dropout)
        self.end = nn.LayerNorm(12)  # whole on every rank, and after the dropout
        self.classes = nn.Linear(12, 5)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h)[0]
        h = h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))
        return self.classes(self.end(h.mean(1)))


def class_loss(module, batch, num_targets):
    return F.cross_entropy(module(batch["x"]), batch["labels"], reduction="sum") / num_targets


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (6,), generator=generator)}


def classified(layout, dropout=0.0, num_steps=1):
    torch.manual_seed(0)
    model = rotorch.parallelize(Classifier(dropout).double(), layout, device="cpu", loss=class_loss)
    torch.manual_seed(100 + torch.distributed.get_rank())  # ranks draw differently, as in a run
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        losses.append(float(model.forward_backward(images(), accumulate=True)))
        optimizer.step()
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    whole = {n: h.local.clone() for n, h in model.weights.items() if h.num_holders > 1}
    model.close()
    return losses, grads, whole


@pytest.mark.parametrize(
    "layout", [*(pytest.param(each, marks=SLOW) for each in ("megatron=2", "megatron=3")), "megatron=4"]
)
def test_a_plain_module_is_exact(layout):
    torch.manual_seed(0)
    module = Classifier().double()
    loss = class_loss(module, images(), 6)
    loss.backward()
    for losses, grads, _ in run_ranks(classified, layout, num_ranks=int(layout[-1])):
        assert losses[0] == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, parameter in module.named_parameters():
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-10, atol=1e-12), name


def test_ranks_that_share_a_batch_drop_alike():
    """Outside of what is cut; else their losses and their copies of norms would part."""
    first, second = run_ranks(classified, "megatron=2", 0.5, 4, num_ranks=2)
    assert first[0] == second[0]
    assert len(set(first[0])) == 4
    assert first[2].keys() == second[2].keys() >= {"norm.weight", "end.weight"}
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


class Residual(nn.Module):
    """Adds its input inside of what a plan cuts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Scaled(nn.Module):
    """Scales its bias, too, by 1 at first; a bias is added behind the sum over slices."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(12, 20), nn.Linear(20, 12), nn.Parameter(torch.ones(12))

    def forward(self, x):
        return self.scale * self.down(F.gelu(self.up(x)))


class DropsOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(12, 20), nn.Linear(20, 12), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.down(F.gelu(self.up(x))))


def pass_of_a_wrong_plan(make, layout):
    module = nn.Sequential(make()).double()
    plan = {"0.up": "colwise", "0.down": "rowwise"}
    model = rotorch.parallelize(module, layout, device="cpu", plan=plan, loss=lambda m, b, n: m(b["x"]).sum() / n)
    model.forward_backward({"x": torch.ones(2, 12, dtype=torch.float64), "labels": torch.zeros(2, dtype=torch.int64)})


@pytest.mark.parametrize("layout", ["megatron=2", "rtp=2[transport=send_receive]", "rtp=2,megatron=2"])
@pytest.mark.parametrize("make", [Residual, Scaled])
def test_a_plan_whose_outputs_do_not_add_up_is_refused(make, layout):
    with pytest.raises(RankFailure, match="'0' cannot be cut as the plan says"):
        run_ranks(pass_of_a_wrong_plan, make, layout, num_ranks=num_ranks(parse_parallel(layout)))


def test_dropout_behind_a_bias_is_not_taken_for_more_than_a_sum():
    assert run_ranks(pass_of_a_wrong_plan, DropsOut, "megatron=2", num_ranks=2) == [None, None]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("megatron=400", "megatron: 400 ranks over LlamaForCausalLM, whose finest cut has 320 groups"),
        ("megatron=2[sync_fraction=0]", "sync_fraction: Input should be greater than 0, got '0'"),
        ("megatron=2[sync_fraction=1.5]", "sync_fraction: Input should be less than or equal to 1, got '1.5'"),
    ],
)
def test_mistakes_are_one_clear_line(tiny, layout, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught, as_rank(0, num_ranks=400):
        rotorch.parallelize(causal_lm(load_config(tiny("llama"))), layout, device="cpu")
    assert "\n" not in str(caught.value)


# ---- sync_fraction: another model, so there is no one process to be equal to ---------------------------------------

SYNCED = "megatron=2[sync_fraction=0.25,transport=messages]"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def losses_along(config, layout, scale):
    """The loss, its gradient along a direction in the space of all weights, and its change along it."""
    with rotorch.on_meta():
        module = causal_lm(config).double().train()
    model = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
    batch = batch_for(config)
    with exact_arithmetic():
        loss = float(model.forward_backward(batch))
    slope, start = 0.0, {}
    for name in model.weights:
        generator = torch.Generator().manual_seed(len(name))
        held = model.weights[name]
        whole = torch.randn(held.weight.shape, generator=generator, dtype=torch.float64)
        slope += float((model.full_tensor(name, grad=True) * whole).sum())
        start[name] = held.local.clone(), whole
    found = []
    for sign in (1, -1):
        for name, (local, whole) in start.items():
            held = model.weights[name]
            for chunk in held.chunks:
                chunk.of_local(held.local).copy_(chunk.of_local(local) + sign * scale * chunk.of_whole(whole))
        model.values_changed()
        with exact_arithmetic():
            found.append(float(model.forward_backward(batch, accumulate=True)))
    model.close()
    return loss, slope, (found[0] - found[1]) / (2 * scale)


@pytest.mark.parametrize("layout", ["megatron=2", SYNCED, "megatron=4[sync_fraction=0.5]"])
def test_gradients_are_the_derivative_of_what_forward_computes(layout):
    config = config_from_dict(LLAMA, source="test")
    rows = run_ranks(losses_along, config, layout, 1e-6, num_ranks=int(layout[9]))
    for loss, slope, change in rows:
        assert loss == rows[0][0]
        assert slope == pytest.approx(change, rel=1e-6)


def test_partly_synchronised_is_another_model_and_says_so(tiny, caplog):
    config = load_config(tiny("llama"))
    whole, some = (
        run_ranks(metered, config, layout, num_ranks=2) for layout in ("megatron=2[transport=messages]", SYNCED)
    )
    assert all(sent == expected for sent, expected in [*whole, *some])
    assert some[0][0][Kind.ALL_REDUCE] < 0.5 * whole[0][0][Kind.ALL_REDUCE]
    with pytest.raises(ConfigError, match=re.escape(f"verify: {SYNCED} is another model than one process computes")):
        verify(tiny("llama"), parallel=SYNCED)
    with caplog.at_level(logging.WARNING), as_rank(0, num_ranks=2), rotorch.on_meta():
        rotorch.parallelize(causal_lm(load_config(tiny("llama"))), SYNCED, device="cpu")
    assert caplog.text.count(f"{SYNCED} trains another model than one process does: of the channels") == 1


@pytest.mark.parametrize(("layout", "num_ranks"), [("megatron=3", 3), ("rtp=2,megatron=3", 6)])
@pytest.mark.parametrize("rank", [0, 1])
def test_heads_that_do_not_divide_evenly_are_said_once_by_one_rank(tiny, caplog, rank, layout, num_ranks):
    with caplog.at_level(logging.WARNING), as_rank(rank, num_ranks=num_ranks), rotorch.on_meta():
        rotorch.parallelize(causal_lm(load_config(tiny("llama"))), layout, device="cpu")
    said = "has 4 groups (heads) for 3 ranks: some compute while others wait"
    assert caplog.text.count(said) == (1 if rank == 0 else 0)


def test_all_channels_synchronised_is_the_model(tiny):
    assert str(parse_parallel("megatron=2[sync_fraction=1]")[0]) == "megatron=2"
    assert verify(tiny("llama"), parallel="megatron=2[sync_fraction=1.0]", layers=1, steps=1).ok


@pytest.mark.parametrize(("family", "words"), [("olmo2", "q_proj.weight' is cut alone")])
def test_what_has_no_row_wise_output_cannot_be_partly_synchronised(tiny, family, words):
    with pytest.raises(ConfigError, match=words), as_rank(0, num_ranks=2), rotorch.on_meta():
        rotorch.parallelize(causal_lm(load_config(tiny(family))), SYNCED, device="cpu")


def test_a_linear_layer_sends_the_same_whichever_way_its_weight_lies():
    (strategy,) = parse_parallel("megatron=3")

    def sent(shape, dim):
        cut = Cut(dim, shape[dim])
        weights = (Weight("w.weight", shape, 4, cut), Weight("w.bias", (shape[dim],), 4, Cut(0, shape[dim])))
        unit = Unit("w.weight", UnitKind.WEIGHT, Combine.CONCAT, weights)
        return strategy.activation_transfers(unit, batch=MicroBatch(2, 16))

    assert sent((40, 12), 0) == sent((12, 40), 1) != sent((12, 40), 0)

"""rtp around megatron: exact whatever a model is made of, and with a slice of a part per rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV2Config

import rotorch
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import Cut, UnitKind, Weight
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import tiny_subject
from rotorch.testing.verify import verify, verify_subject

pytestmark = pytest.mark.usefixtures("warm")

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("rtp=2[recompute=slice],megatron=2[transport=messages]", "gpt_neox"),  # heads fused in one matrix
        ("ddp=2,rtp=2,megatron=2", "olmo2"),  # an attention that is cut weight by weight
        # Four groups of heads: one rank of three has two to rotate.
        pytest.param("rtp=2,megatron=3", "llama", marks=SLOW),
        pytest.param("rtp=3,megatron=2", "gemma2", marks=SLOW),  # soft caps behind the head, whose slices are uneven
        # A tied head, its logits kept.
        pytest.param("rtp=2[transport=send_receive,recompute=none],megatron=2", "qwen3", marks=SLOW),
        pytest.param("rtp=2,megatron=2", "mixtral", marks=SLOW),  # experts: DeepSeek's, below
        pytest.param("rtp=2,megatron=5", "llama", marks=SLOW),  # a rank without heads
        pytest.param("rtp=2[transport=send_receive,buffering=in_place],megatron=2", "llama", marks=SLOW),
        pytest.param("rtp=2[recompute=all_but_attention],megatron=2", "qwen3", marks=SLOW),
        pytest.param("rtp=4[transport=send_receive,visits=2],megatron=2", "gpt_neox", marks=SLOW),
        pytest.param("rtp=1,megatron=2", "llama", marks=SLOW),
        pytest.param("rtp=2,megatron=1", "qwen3", marks=SLOW),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def test_a_rank_without_heads_takes_part(tiny):
    """Four groups of heads on five ranks that share a batch, of which two rings have the same."""
    report = verify(tiny("llama"), parallel="rtp=1,megatron=5", layers=1, steps=1, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def held(config, layout):
    """Bytes of this rank's weights, gradients and moments after two steps, and its slots."""
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), layout, device="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(2 * 12).view(2, 12)
    for _ in range(2):
        optimizer.zero_grad()
        model.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
    weights = sum(held.local.nbytes for held in model.weights.values())
    gradients = sum(held.local_grad.nbytes for held in model.weights.values())
    moments = sum(state["exp_avg"].to_local().nbytes for state in optimizer.state.values())
    slots = sum(slot.nbytes for slot in model.sharded.slots())
    model.close()
    return weights, gradients, moments, slots


MESSAGES = "rtp=2[transport=send_receive],megatron=2[transport=messages]"


def test_a_rank_holds_a_slice_of_its_part_and_no_more(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers = 2
    with rotorch.on_meta():
        spec = describe(causal_lm(config))
    cut = sum(unit.num_bytes for unit in spec.cut_units)
    quarter = cut // 4 + spec.num_bytes - cut
    largest = max(unit.num_bytes for unit in spec.cut_units) // 4
    for weights, gradients, moments, slots in run_ranks(held, config, MESSAGES, num_ranks=4):
        assert weights == gradients == moments == quarter
        assert slots == 4 * largest  # two for weights, two for gradients


class Classifier(nn.Module):
    """Patches, attention by torch's own module, a norm between, dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(1, 12, kernel_size=2, stride=2)
        self.attention = nn.MultiheadAttention(12, 6, batch_first=True, dropout=dropout)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.dropout = nn.Dropout(dropout)
        self.end = nn.LayerNorm(12)
        self.classes = nn.Linear(12, 5)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h)[0]
        h = h + self.dropout(self.down(F.gelu(self.up(self.norm(h)))))
        return self.classes(self.end(h.mean(1))) + self.classes.weight.square().mean()


def class_loss(module, batch, num_targets):
    return F.cross_entropy(module(batch["x"]), batch["labels"], reduction="sum") / num_targets


def images(share):
    generator = torch.Generator().manual_seed(share)
    x = torch.randn(6, 1, 4, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (6,), generator=generator)}


def classified(layout, dropout=0.0, num_steps=1):
    """Losses, gradients, whole weights in the end, and the number of this rank's share."""
    torch.manual_seed(0)
    model = rotorch.parallelize(Classifier(dropout).double(), layout, device="cpu", loss=class_loss)
    torch.manual_seed(100 + torch.distributed.get_rank())  # ranks draw differently, as in a run
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        losses.append(float(model.forward_backward(images(model.batch_rank), accumulate=True)))
        optimizer.step()
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    whole = {n: h.local.clone() for n, h in model.weights.items() if h.num_holders > 1}
    share = model.batch_rank
    model.close()
    return losses, grads, whole, share


@pytest.mark.parametrize("layout", ["rtp=2,megatron=2", "rtp=3[transport=send_receive],megatron=2"])
def test_a_plain_module_is_exact(layout):
    """A convolution, heads of torch's own attention, and a weight that is also used by a function without slices."""
    torch.manual_seed(0)
    module, (ring, _) = Classifier().double(), parse_parallel(layout)
    loss = sum(class_loss(module, images(share), 6 * ring.size) for share in range(ring.size))
    loss.backward()
    for losses, grads, _, _ in run_ranks(classified, layout, num_ranks=num_ranks(parse_parallel(layout))):
        assert losses[0] == pytest.approx(float(loss.detach()), rel=1e-12)
        for name, parameter in module.named_parameters():
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-10, atol=1e-12), name


class Narrow(nn.Module):
    """A convolution of four channels."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, 4, kernel_size=2, stride=2), nn.LayerNorm(4)
        self.up, self.down, self.classes = nn.Linear(4, 20), nn.Linear(20, 4), nn.Linear(4, 5)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        return self.classes((h + self.down(F.gelu(self.up(self.norm(h))))).mean(1))


def narrow(layout):
    torch.manual_seed(0)
    model = rotorch.parallelize(Narrow().double(), layout, device="cpu", loss=class_loss)
    model.forward_backward(images(0))
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return grads


def test_a_rank_without_channels_recomputes_no_more_than_others():
    """Five ranks: what is empty on the last one is no norm between units, and all ranks make the same sums."""
    torch.manual_seed(0)
    module = Narrow().double()
    class_loss(module, images(0), 6).backward()
    for grads in run_ranks(narrow, "rtp=1[recompute=slice],megatron=5", num_ranks=5):
        for name, parameter in module.named_parameters():
            assert torch.allclose(grads[name], parameter.grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("layout", ["rtp=2,megatron=2", pytest.param("rtp=2[recompute=slice],megatron=2", marks=SLOW)])
def test_ranks_that_share_a_batch_drop_alike(layout):
    """Outside of what is cut; else their copies of norms would part."""
    found = run_ranks(classified, layout, 0.5, 4, num_ranks=4)
    assert [share for *_, share in found] == [0, 0, 1, 1]
    assert len({tuple(losses) for losses, *_ in found}) == 1
    for _, _, whole, _ in found[1:]:
        assert whole.keys() == found[0][2].keys() >= {"norm.weight", "end.weight"}
        assert all(torch.equal(whole[name], found[0][2][name]) for name in whole)


def written(config, layout):
    """Tokens that a model writes, with and without a cache of keys and values."""
    torch.manual_seed(0)
    model = causal_lm(config).double()
    if layout is not None:
        model = rotorch.parallelize(model, layout, device="cpu")
    ids = torch.arange(10).view(2, 5)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    found = [model.generate(ids, use_cache=cache, **options).tolist() for cache in (True, False)]
    if layout is not None:
        model.close()
    return found


def test_a_model_writes_what_one_process_writes(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers = 2
    expected = written(config, None)
    assert run_ranks(written, config, "rtp=2,megatron=2", num_ranks=4) == [expected] * 4


def logits_and_gradients(config, layout):
    """Logits that a loss of one's own looks at, and the gradient of the head."""
    torch.manual_seed(0)
    model = causal_lm(config).double()
    if layout is not None:
        model = rotorch.parallelize(model, layout, device="cpu")
    logits = model(input_ids=torch.arange(12).view(2, 6)).logits
    logits.square().mean().backward()
    if layout is None:
        return logits.detach(), model.lm_head.weight.grad
    found = logits.detach().clone(), model.full_tensor("lm_head.weight", grad=True)
    model.close()
    return found


def test_logits_are_there_for_losses_of_ones_own(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers = 1
    logits, gradient = logits_and_gradients(config, None)
    for mine, its in run_ranks(logits_and_gradients, config, MESSAGES, num_ranks=4):
        torch.testing.assert_close(mine, logits, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(its, gradient, rtol=1e-10, atol=1e-12)


def watched(config):
    model = rotorch.parallelize(causal_lm(config), "rtp=1,megatron=2", device="cpu")
    model.get_submodule("model.layers.0.mlp.up_proj").register_forward_hook(lambda *_: None)
    model.forward_backward({"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)})


def test_a_hook_that_would_see_a_part_is_refused(tiny):
    """Also on a ring of one rank, on which a part comes whole."""
    with pytest.raises(RankFailure, match=r"rtp: a hook on 'model\.layers\.0\.mlp\.up_proj' would see a slice"):
        run_ranks(watched, load_config(tiny("llama")), num_ranks=2)


def test_a_slice_of_a_weight_may_be_cut_again():
    weight = Weight("w", (14, 3), 4, Cut(0, groups=7))
    parts = [weight.slice(num_slices=2, index=k) for k in range(2)]
    assert [(p.shape, p.cut) for p in parts] == [((8, 3), Cut(0, 4)), ((6, 3), Cut(0, 3))]
    assert [parts[1].slice_shape(num_slices=2, index=k) for k in range(2)] == [(4, 3), (2, 3)]
    empty = weight.slice(num_slices=8, index=7)
    assert empty.shape == (0, 3)
    assert empty.cut is None


def test_weights_inside_of_modules_on_slices_stay_whole():
    """A ring alone cuts them, and makes them whole for each call; ranks that share a batch have them whole."""
    subject = tiny_subject(DeepseekV2Config)
    report = verify_subject(subject, name="deepseek_v2", parallel="rtp=2,megatron=2", steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    spec = describe(subject.build())
    inside = {w.name for unit in spec.inside for w in unit.weights}
    assert inside
    ring, within = parse_parallel("rtp=2,megatron=2")
    cut, whole = ring.units_of(spec), within.units_of(ring.units_of(spec))
    assert inside <= {w.name for unit in cut.cut_units for w in unit.weights}
    kept = [w for unit in whole.units if unit.kind is UnitKind.REPLICATED for w in unit.weights if w.name in inside]
    assert {w.name for w in kept} == inside
    assert all(w.cut is None and w.beside_slices for w in kept)
    assert {w.name for w in whole.weights} == {w.name for w in spec.weights}
    assert {each.name for each in whole.kept_whole} >= inside


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("rtp=2[context=2],megatron=2", "has no context, memory or experts of its own. Write rtp=2,megatron=2"),
        ("rtp=2[experts=whole],megatron=2", "has no context, memory or experts of its own. Write rtp=2,megatron=2"),
        ("osdp=2[memory=1GiB],megatron=2", "has no context, memory or experts of its own. Write rtp=2,megatron=2"),
        (
            "rtp=2,megatron=2[sequence_parallel=true]",
            "Write rtp=2,megatron=2, or fsdp=2,megatron=2[sequence_parallel=true]",
        ),
        (
            "rtp=2,megatron=2[sync_fraction=0.5]",
            "outputs differ. Write rtp=2,megatron=2, or fsdp=2,megatron=2[sync_fraction=0.5]",
        ),
        ("rtp=2,rtp=2", "'rtp=2,rtp=2' cannot be composed"),
    ],
)
def test_what_has_no_meaning_together_is_refused(layout, message):
    with pytest.raises(ConfigError) as caught:
        parse_parallel(layout)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

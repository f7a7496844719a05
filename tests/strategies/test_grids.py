"""Blocks on grids of ranks: bytes at sizes that no machine here has, what is refused and how, what is named."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from on_grids import llama, sent
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, GridCut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import Kind, MicroBatch
from rotorch.models.hf import causal_lm, config_from_dict, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import micro_batch_of
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parallel", ["tesseract=2x2x2", "tesseract=4x4x4", "tesseract=8x8x1", "summa=8x8"])
def test_bytes_of_blocks_are_the_layouts_to_the_byte(tiny, parallel, tied):
    total = num_ranks(parse_parallel(parallel))
    for rank in (0, total // 2 + 1):
        # 330 rows of vocabulary divide by neither 4 nor 8
        module = llama(tiny, num_key_value_heads=8, vocab_size=330, tie_word_embeddings=tied)
        found, said = sent(module, parallel, rank=rank)
        assert found == said, rank
        assert found[Kind.BROADCAST] > 0 < found[Kind.REDUCE]


def slots_held(config, parallel, num_tokens):
    """Bytes of this rank's slots after a step, and what the Layout of the model says."""
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), parallel, device="cpu").materialize(seed=0)
    ids = torch.arange(2 * num_tokens).view(2, num_tokens)
    batch = {"input_ids": ids, "labels": ids}
    model.forward_backward(batch)
    held, rank = sum(slot.nbytes for slot in model.sharded.slots()), torch.distributed.get_rank()
    said = model.strategies[0].layout_of(model.spec, batch=micro_batch_of(model, batch), position=rank)
    model.close()
    return held, said.slots_bytes


@pytest.mark.parametrize(
    ("parallel", "changes", "num_tokens"),
    [
        ("summa=2x2", {"vocab_size": 331, "tie_word_embeddings": True}, 160),  # activations are largest
        ("summa=2x2", {"num_hidden_layers": 1}, 8),  # blocks of weights
        ("megatron=2", {"num_hidden_layers": 1}, 60),
    ],
)
def test_slots_in_shared_memory_are_the_layouts_to_the_byte(tiny, parallel, changes, num_tokens):
    values = {**json.loads(Path(tiny("llama")).read_text()), "num_hidden_layers": 2, **changes}
    config = config_from_dict(values, source="test")
    ranks = num_ranks(parse_parallel(parallel))
    for held, said in run_ranks(
        slots_held, config, f"{parallel}[transport=shared_memory]", num_tokens, num_ranks=ranks
    ):
        assert held == said > 0


@pytest.mark.parametrize(("parallel", "copies"), [("summa=2x2", 1 + 2), ("summa=3x3", 2 + 3), ("summa=1x1", 0)])
def test_blocks_in_flight_are_the_largest_layers(parallel, copies):
    """Copies of others' blocks and parts of sums over messages, in shared memory two parts ([Note: in flight])."""
    size = int(parallel[-1])
    units = []
    for name, rows in (("small", 12), ("large", 36)):
        weight = Weight(name, (rows, 18), 4, grid=GridCut(rows=Cut(1, 18), columns=Cut(0, rows)))
        units.append(Unit(name, UnitKind.MODULE, Combine.SUM, (weight,)))
    spec = ModelSpec("spec", tuple(units))
    one = 4 * (36 // size) * (18 // size) + 4 * 2 * 5 * (18 // size)  # a block of the weight, one of its inputs
    for transport in ("messages", "shared_memory"):
        (strategy,) = parse_parallel(f"{parallel}[transport={transport}]")
        layout = strategy.layout_of(spec, batch=MicroBatch(2, 5))
        expected = copies if transport == "messages" else min(copies, 2)
        assert layout.transient_bytes - layout.slots_bytes == expected * one


def test_depth_adds_sums_of_gradients_and_nothing_else(tiny):
    def per_kind(parallel):
        return sent(llama(tiny, num_key_value_heads=8), parallel, rank=0)[0]

    flat, deep = per_kind("tesseract=2x2x1"), per_kind("tesseract=2x2x4")
    for kind in (Kind.BROADCAST, Kind.REDUCE):
        assert flat[kind] == deep[kind]  # for as many tokens; of a global batch a rank has a fourth of them
    assert flat[Kind.ALL_REDUCE] < deep[Kind.ALL_REDUCE]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_vocabulary_that_does_not_divide(tiny, tmp_path, tied):
    values = {**json.loads(Path(tiny("llama")).read_text()), "vocab_size": 331, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(values))
    report = verify(str(tmp_path / "config.json"), parallel="summa=2x2", layers=1, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("olmo2", "summa=2x2"),
        *[
            pytest.param(model, parallel, marks=pytest.mark.slow)
            for model in ("qwen3", "gemma2", "gpt_neox", "olmo2")
            for parallel in ("tesseract=2x2x2", "summa=2x2[transport=messages]")
        ],
    ],
)
def test_float64_parity_of_what_the_table_of_layouts_leaves_out(tiny, model, parallel):
    report = verify(tiny(model), parallel=parallel, layers=2, steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.num_modules_compared > 10


REFUSED = [
    ("llama", "summa=8x8", "'model.layers.0.self_attn.q_proj.weight' [128, 128]: its 4 heads are not a multiple of 8"),
    ("llama", "tesseract=3x3x1", "its 128 features are not a multiple of 3. Write a grid whose sides divide 128"),
    ("mixtral", "summa=2x2", "'model.layers.0.mlp.experts.gate_up_proj' is used by no linear layer. Write rtp or fsdp"),
]


@pytest.mark.parametrize(("model", "parallel", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(tiny, model, parallel, words):
    with rotorch.on_meta():
        module = causal_lm(load_config(tiny(model)))
    with pytest.raises(ConfigError, match=re.escape(words)) as caught, as_rank(0, num_ranks=64):
        rotorch.parallelize(module, parallel, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_module_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match=r"Sequential cannot be cut along their features.*known to run on slices"):
        rotorch.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), "summa=1x1", device="cpu")


class Mixer(nn.Module):
    """Whole patches in, whole classes out, and between them features: a plain module, by a plan of the user's own."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(6, 12)
        self.places = nn.Parameter(torch.randn(5, 12))
        self.norm = nn.LayerNorm(12)
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.classes = nn.Linear(12, 3)

    def forward(self, x):
        h = self.patches(x) + self.places
        h = h + self.mlp(self.norm(h))
        return self.classes(h.mean(1))


PLAN = {"patches": "colwise", "mlp.0": "colwise", "mlp.2": "rowwise", "classes": "colwise_gather_output"}


def mixed(layout):
    torch.manual_seed(0)

    def loss(module, batch, num_targets):
        return F.cross_entropy(module(batch["x"]), batch["labels"], reduction="sum") / num_targets

    model = rotorch.parallelize(Mixer().double(), layout, device="cpu", plan=PLAN, loss=loss)
    x, labels = torch.randn(8, 5, 6, dtype=torch.float64), torch.randint(3, (8,))
    rows = slice(model.batch_rank, None, model.num_batch_ranks)
    found = float(model.forward_backward({"x": x[rows], "labels": labels[rows]}))
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return found, grads


@pytest.mark.parametrize("layout", ["summa=2x2", "tesseract=2x2x1[transport=messages]"])
def test_a_plain_module_with_a_plan_is_exact(layout):
    (loss, expected), *_ = run_ranks(mixed, "single", num_ranks=1)
    for found, grads in run_ranks(mixed, layout, num_ranks=4):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-10, atol=1e-12), name


class AddsItsBiasApart(Mixer):
    def forward(self, x):
        h = self.patches(x) + self.places
        h = h + self.mlp(self.norm(h))
        return h.mean(1) @ self.classes.weight.T + self.classes.bias


def refused_apart(layout):
    def loss(module, batch, num_targets):
        return module(batch["x"]).sum() / num_targets

    model = rotorch.parallelize(AddsItsBiasApart().double(), layout, device="cpu", plan=PLAN, loss=loss)
    batch = {"x": torch.randn(8, 5, 6, dtype=torch.float64), "labels": torch.zeros(8, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=r"'classes\.weight' is used without its layer's bias: if that is added"):
        model.forward_backward(batch)


def test_whole_outputs_whose_bias_is_added_apart_are_refused():
    run_ranks(refused_apart, "summa=2x2", num_ranks=4)


def test_compiled_blocks_are_refused(tiny):
    with pytest.raises(ConfigError, match="tesseract=1x1x1: blocks are sent in the middle of layers"):
        rotorch.parallelize(llama(tiny), "tesseract=1x1x1", device="cpu", compile=True)


def test_a_step_that_broke_off_leaves_the_gradients_that_were_there(tiny):
    model = rotorch.parallelize(llama(tiny, num_hidden_layers=1), "tesseract=1x1x1", device="cpu").materialize(seed=0)
    ids = torch.arange(12).view(1, 12)
    batch = {"input_ids": ids, "labels": ids}
    model.forward_backward(batch)
    held = model.weights["model.norm.weight"]
    once = held.local_grad.clone()
    with pytest.raises(IndexError):
        model.forward_backward({"input_ids": ids + 10**6, "labels": ids}, accumulate=True)
    assert torch.equal(held.local_grad, once)
    model.evaluate(batch)
    assert torch.equal(held.local_grad, once)
    model.forward_backward(batch, accumulate=True)
    assert torch.allclose(held.local_grad, 2 * once)
    model.close()


def drawn_and_predicted(config):
    """Positions that an embedding's dropout has dropped on this rank; and uses of a prediction by one rank alone."""
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, "summa=2x2", device="cpu").materialize(seed=0)
    torch.manual_seed(7)  # as users do on all ranks
    ids = torch.arange(24).view(2, 12)
    dropped = []
    hook = module.gpt_neox.emb_dropout.register_forward_hook(lambda _, __, output: dropped.append(output == 0))
    model.forward_backward({"input_ids": ids, "labels": ids})
    hook.remove()
    logits = model.predict({"input_ids": ids}).logits
    best = logits.argmax(-1).shape if torch.distributed.get_rank() == 0 else None
    model.close()
    return dropped[0], best, logits.requires_grad


def test_ranks_drop_out_apart_and_use_what_they_predict_alone(tiny):
    config = load_config(tiny("gpt_neox"))
    config.hidden_dropout = 0.5
    by_rank = run_ranks(drawn_and_predicted, config, num_ranks=4)
    masks = [mask for mask, _, _ in by_rank]
    assert all(0.3 < mask.float().mean() < 0.7 for mask in masks)
    assert all(not torch.equal(one, other) for k, one in enumerate(masks) for other in masks[:k])
    assert by_rank[0][1] == (2, 12) and not any(wants for _, _, wants in by_rank)

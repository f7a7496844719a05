"""fsdp around megatron, in stages, too: exact whatever a model and its user do, with a part of a slice per rank."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("fsdp=3,megatron=2", "gpt_neox"),  # fused heads, whose rows are cut unevenly, and biases of few rows
        ("fsdp=2[reshard=false],megatron=2[sequence_parallel=true]", "qwen3"),  # tied weights
        ("ddp=2,fsdp=2,megatron=2", "mixtral"),
        pytest.param("fsdp=2,megatron=3", "llama", marks=pytest.mark.slow),  # four groups of heads on three ranks
        pytest.param("fsdp=2[recompute=block],megatron=2", "gemma2", marks=pytest.mark.slow),  # blocks: below
        pytest.param("fsdp=2[recompute=block,reshard=false],megatron=2", "mixtral", marks=pytest.mark.slow),
        pytest.param("fsdp=2,megatron=2[transport=messages]", "olmo2", marks=pytest.mark.slow),
        pytest.param("fsdp=4,megatron=2", "gpt_neox", marks=pytest.mark.slow),
        pytest.param("pp=2[unit=1],fsdp=2[reshard=false],megatron=2", "qwen3", marks=pytest.mark.slow),
        pytest.param("pp=2[schedule=zb_h1],fsdp=3,megatron=2", "gpt_neox", marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2[recompute=block],megatron=2", "mixtral", marks=pytest.mark.slow),
        pytest.param("ddp=2,pp=2,fsdp=2,megatron=2", "llama", marks=pytest.mark.slow),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def held(config):
    """Bytes of this rank's weights, gradients, moments, and of the slices of a pass, after two steps."""
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), "fsdp=2,megatron=2", device="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(2 * 12).view(2, 12)
    for _ in range(2):
        optimizer.zero_grad()
        model.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
    model.evaluate({"input_ids": ids, "labels": ids})
    weights = sum(held.local.untyped_storage().nbytes() for held in model.weights.values())
    gradients = sum(held.local_grad.nbytes for held in model.weights.values())
    moments = sum(state["exp_avg"].to_local().nbytes for state in optimizer.state.values())
    slices = sum(held.leaf.untyped_storage().nbytes() for held in model.weights.values())
    model.close()
    return weights, gradients, moments, slices


def test_a_rank_holds_its_rows_at_rest_and_no_slice(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers = 2
    with rotorch.on_meta():
        spec = describe(causal_lm(config))
    cut = sum(unit.num_bytes for unit in spec.cut_units)
    quarter = cut // 4 + (spec.num_bytes - cut) // 2
    for weights, gradients, moments, slices in run_ranks(held, config, num_ranks=4):
        assert weights == gradients == moments == quarter
        assert slices == 0


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks of which a caller chooses some, and a matrix around them."""

    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(12) for _ in range(num_blocks))
        self.end = nn.Linear(12, 5)

    def forward(self, x, blocks=None, freed=False, again=None):
        for number in range(len(self.blocks)) if blocks is None else blocks:
            given, block = x.detach() if freed else x, self.blocks[number]
            if again is None:
                x = x + block(given)
            else:
                with set_checkpoint_early_stop(False):
                    x = x + checkpoint(block, given, use_reentrant=again == "reentrant")
        return self.end(x)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WAYS = {
    "a block is left out": [{"blocks": [0, 2]}],
    "a block is called twice": [{"blocks": [0, 1, 1, 2]}],
    "no gradient goes through": [{"freed": True}],
    "two calls and one backward": [{}, {"blocks": [2, 0]}],
    "the last block alone": [{"blocks": [2]}],
    "blocks are computed again": [{"again": "as it is now"}],
    "blocks are computed again, as it was once": [{"again": "reentrant"}],
}


def gradients_of(way, layout):
    """Gradients by name of two passes of one way, in a loop of one's own; None where there is none."""
    torch.manual_seed(0)
    model = Chain(3).double()
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)  # as the old checkpoint wants it
    if layout is not None:
        model = rotorch.parallelize(model, layout, device="cpu", plan=PLAN)
    for _ in range(2):
        sum(model(x, **kwargs).square().mean() for kwargs in WAYS[way]).backward()
    if layout is None:
        return {name: parameter.grad for name, parameter in model.named_parameters()}
    weights = model.named_parameters()
    found = {name: None if p.grad is None else model.full_tensor(name, grad=True) for name, p in weights}
    model.close()
    return found


def of_all_ways(layout):
    return {way: gradients_of(way, layout) for way in WAYS}


def test_blocks_may_run_in_any_order_and_number():
    expected = of_all_ways(None)
    for found in run_ranks(of_all_ways, "fsdp=2,megatron=2", num_ranks=4):
        for way, gradients in found.items():
            for name, gradient in gradients.items():
                wanted = expected[way][name]
                assert (gradient is None) == (wanted is None), (way, name)
                if gradient is not None:
                    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def messages(num_blocks):
    """Gathers and reduce-scatters of a step, of forward alone, and of a model without blocks."""
    torch.manual_seed(0)
    model = rotorch.parallelize(Chain(num_blocks).double(), "fsdp=2,megatron=2", device="cpu", plan=PLAN)
    x = torch.randn(4, 12, dtype=torch.float64)
    found = []
    for learns in (True, True, False):
        with Meter() as meter, torch.set_grad_enabled(learns):
            loss = model(x).square().mean()
            if learns:
                loss.backward()
        found.append({str(kind): number for kind, number in meter.num_messages.items() if kind != "all_reduce"})
    model.close()
    return found[1:]  # ranks exchange some things once


@pytest.mark.parametrize("num_blocks", [3, 1])
def test_a_block_comes_once_per_pass_in_one_message(num_blocks):
    for step, forward in run_ranks(messages, num_blocks, num_ranks=4):
        # What lies around blocks comes for each of the two passes of a call, and so do blocks.
        assert step == {"all_gather": 2 * num_blocks + 2, "reduce_scatter": num_blocks + 1}
        assert forward == {"all_gather": num_blocks + 1}


def mean_square(module, batch, num_targets):
    return module(batch["x"]).square().mean() / num_targets


def messages_of_micro_batches():
    """Gathers and reduce-scatters of a step of two micro-batches, whose inputs need no gradient."""
    torch.manual_seed(0)
    module = Chain(2).double()
    model = rotorch.parallelize(module, "fsdp=2,megatron=2", device="cpu", plan=PLAN, loss=mean_square)
    batch = {"x": torch.randn(4, 12, dtype=torch.float64), "labels": torch.zeros(4, dtype=torch.int64)}
    for _ in range(2):
        with Meter() as meter:
            model.forward_backward([batch, batch], accumulate=True)
    model.close()
    return {str(kind): number for kind, number in meter.num_messages.items() if kind != "all_reduce"}


def test_blocks_come_for_every_micro_batch_and_what_lies_around_them_once():
    for found in run_ranks(messages_of_micro_batches, num_ranks=4):
        assert found == {"all_gather": 2 * 2 * 2 + 1, "reduce_scatter": 2 * 2 + 1}


@dataclass
class Stream:
    hidden: torch.Tensor


class Blocks(nn.Module):
    """Three blocks behind a matrix, and several ways to use them."""

    def __init__(self, nested):
        super().__init__()
        self.begin = nn.Linear(12, 12)
        blocks = [Layer(12) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in (blocks[:2], blocks[2:])) if nested else None
        self.row = None if nested else nn.ModuleList(OnStreams() for _ in range(3))

    def forward(self, x, fails=False, penalty=False):
        x = self.begin(x)
        if self.row is None:
            for pair in self.blocks:
                for block in pair:
                    x = x + block(x)
            return x
        stream = Stream(x)
        for number, block in enumerate(self.row):
            if fails and number == 1:
                raise ValueError("a fault")
            stream = block(stream)
        return stream.hidden + (self.row[0].mlp.down.weight.square().sum() if penalty else 0.0)


class OnStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Layer(12)

    def forward(self, stream):
        return Stream(stream.hidden + self.mlp(stream.hidden))


def plan_of(nested):
    block = "blocks.*.*" if nested else "row.*.mlp"
    return {f"{block}.up": "colwise", f"{block}.down": "rowwise"}


def gradients_beside_a_fault(layout, nested, fails):
    """Gradients of a pass, between whose forward and backward another pass may fail while a block comes ahead."""
    torch.manual_seed(0)
    model = Blocks(nested).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    if layout is not None:
        model = rotorch.parallelize(model, layout, device="cpu", plan=plan_of(nested))
    loss = model(x).square().mean()
    if fails:
        with pytest.raises(ValueError, match="a fault"):
            model(x, fails=True)
    loss.backward()
    if layout is None:
        return {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: model.full_tensor(name, grad=True) for name in model.weights}


@pytest.mark.parametrize("layout", ["fsdp=2,megatron=2", "fsdp=2[recompute=block],megatron=2"])
@pytest.mark.parametrize("nested", [False, True], ids=["streams", "lists of lists"])
def test_blocks_may_take_and_return_anything(nested, layout):
    expected = gradients_beside_a_fault(None, nested, False)
    for found in run_ranks(gradients_beside_a_fault, layout, nested, False, num_ranks=4):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


def test_a_graph_from_before_a_broken_pass_gives_no_wrong_gradients():
    """Its tensors lie where a message of the broken pass may still write to."""
    with pytest.raises(RankFailure, match="modified by an inplace operation"):
        run_ranks(gradients_beside_a_fault, "fsdp=2,megatron=2", False, True, num_ranks=4)


def pass_with_a_penalty():
    torch.manual_seed(0)
    module = Blocks(nested=False).double()
    model = rotorch.parallelize(module, "fsdp=2,megatron=2", device="cpu", plan=plan_of(nested=False))
    with pytest.raises(ConfigError, match=r"fsdp: the model uses a weight of a block outside of the block"):
        model(torch.randn(4, 12, dtype=torch.float64), penalty=True)


def test_a_weight_that_is_used_outside_of_its_block_is_refused():
    run_ranks(pass_with_a_penalty, num_ranks=4)


@pytest.mark.parametrize("option", ["context=2", "memory=2GiB", "experts=whole"])
def test_options_that_say_nothing_around_another_strategy_are_refused(option):
    with pytest.raises(ConfigError, match=r"fsdp around megatron shares .* Write fsdp=2,megatron=2$"):
        parse_parallel(f"fsdp=2[{option}],megatron=2")

"""Passes with weights in bfloat16 and no autocast: as exact as FSDP2's own policy, gradients and sums in float32."""

import statistics
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.operations import Operations
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

ROTATED = (
    "rtp=2",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,visits=1]",
    "rtp=2[recompute=none,transport=send_receive]",
    "rtp=2[recompute=slice,buffering=in_place,transport=send_receive]",
)
SUMMED = ("megatron=2", "megatron=2[sequence_parallel=true]", "atp=1x2", "tesseract=1x1x2[zero=true]")
ON_FOUR = (
    "pp=2,fsdp=2",
    "zeropp=2x2",
    "pp=2[schedule=zb_h1],megatron=2",
    "rtp=2,megatron=2",
    "summa=2x2",
)
"""Weights that are gathered for a stage or a block, lent to another stage, or whose gradients are put off; a grid."""
MORE_ON_FOUR = ("zeropp=2x1,rtp=2", "fsdp=2,megatron=2", "summa=2x2[transport=messages]", "ddp=4,rtp=1")
"""Of the same parts; test_param_dtype_layouts.py has what they send."""
BF16 = torch.bfloat16


def model_of(path, layout, *, num_layers=None, **precision):
    torch.manual_seed(0)
    config = load_config(path)
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    return rotorch.parallelize(causal_lm(config), layout, device="cpu", **precision)


def micro_batches(model):
    """This rank's rows of four, one in each micro-batch."""
    ids = torch.randint(0, 300, (4, 48), generator=torch.Generator().manual_seed(1))
    each = 4 // model.num_batch_ranks
    mine = ids[model.batch_rank * each : (model.batch_rank + 1) * each]
    return [{"input_ids": row[None], "labels": row[None]} for row in mine]


def gradients(model):
    return {name: model.full_tensor(name, grad=True) for name in model.weights}


def losses_and_gradients(path, layouts, **precision):
    """By layout: the loss and whole gradients of a step, and those of a loop that calls the model itself."""
    found = {}
    for layout in layouts:
        model = model_of(path, layout, **precision)
        loss = float(model.forward_backward(micro_batches(model)))
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        of_step = gradients(model)
        clear(model)
        for batch in micro_batches(model):
            output = model(**batch)
            (output.loss / len(micro_batches(model))).backward()
        found[layout] = loss, of_step, gradients(model)
        model.close()
    return found


def errors(mine, exact):
    return {name: float((mine[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_gradients_are_as_exact_as_those_of_fsdp2s_policy(tiny, family):
    path = tiny(family)
    exact_loss, exact, _ = run_ranks(losses_and_gradients, path, ("single",), num_ranks=1)[0]["single"]
    (alone,) = run_ranks(one_process, path, num_ranks=1)
    by_rank = run_ranks(of_two_ranks, path, num_ranks=2, timeout_s=400)
    for found in by_rank:
        policy_loss, policy, _ = found["fsdp=2"]  # torch's fully_shard with its MixedPrecisionPolicy
        for loss, grads, of_loop in (alone["single"], found["ddp=2"], found["fsdp=2"]):
            assert loss == policy_loss  # the same operations; gradients are summed in float32, in another order
            # FSDP2 rounds the sum of a tied weight's two uses once more, to bfloat16.
            assert max(errors(grads, policy).values()) < (2.0**-8 if family == "qwen3" else 1e-5)
            assert max(errors(of_loop, policy).values()) < 1e-2  # the loop's loss is a mean, in other roundings
        rounding = errors(policy, exact)
        assert 1e-4 < statistics.median(rounding.values()) < 0.05
        for layout in (*ROTATED, *SUMMED):
            loss, grads, of_loop = found[layout]
            assert loss == pytest.approx(exact_loss, rel=2e-3)
            for mine in (errors(grads, exact), errors(of_loop, exact)):
                assert statistics.median(mine.values()) < 1.25 * statistics.median(rounding.values()), layout
                assert max(mine.values()) < 1.5 * max(rounding.values()), layout


def of_a_step(path, layouts, **precision):
    """By layout: the loss and whole gradients of a step."""
    found = {}
    for layout in layouts:
        model = model_of(path, layout, **precision)
        loss = float(model.forward_backward(micro_batches(model)))
        found[layout] = loss, gradients(model)
        model.close()
    return found


def on_four_ranks(path, layouts):
    return of_a_step(path, layouts, param_dtype=BF16)


def check_on_four_ranks(path, layouts):
    ((exact_loss, exact),) = (found["single"] for found in run_ranks(of_a_step, path, ("single",), num_ranks=1))
    (alone,) = run_ranks(one_process, path, num_ranks=1)
    policy_loss, policy, _ = alone["single"]
    rounding = errors(policy, exact)
    for found in run_ranks(on_four_ranks, path, layouts, num_ranks=4, timeout_s=400):
        for layout, (loss, grads) in found.items():
            mine = errors(grads, exact)
            assert loss == pytest.approx(exact_loss, rel=2e-3), layout
            assert statistics.median(mine.values()) < 1.25 * statistics.median(rounding.values()), layout
            assert max(mine.values()) < 1.5 * max(rounding.values()), layout
        for layout in {"pp=2,fsdp=2", "zeropp=2x2"} & found.keys():  # the same operations, on other ranks
            assert found[layout][0] == policy_loss
            assert max(errors(found[layout][1], policy).values()) < 1e-5


def test_compositions_are_as_exact(tiny):
    check_on_four_ranks(tiny("qwen3"), ON_FOUR)  # an embedding that the last stage borrows


@pytest.mark.slow
def test_further_compositions_are_as_exact(tiny):
    check_on_four_ranks(tiny("qwen3"), MORE_ON_FOUR)


def one_process(path):
    return losses_and_gradients(path, ("single",), param_dtype=BF16)


def of_two_ranks(path):
    return losses_and_gradients(path, ("ddp=2", "fsdp=2", *ROTATED, *SUMMED), param_dtype=BF16)


def sums_of_micro_batches(path):
    """The gradient of 64 equal micro-batches against that of one, and dtypes within a pass."""
    model = model_of(path, "single", num_layers=1, param_dtype=BF16)
    seen = set()
    for module in (model.model.layers[0], model.model.norm):
        module.register_forward_hook(lambda _, __, out: seen.add((out[0] if isinstance(out, tuple) else out).dtype))
    batch = micro_batches(model)[0]
    model.forward_backward(batch)
    once = gradients(model)
    clear(model)
    model.forward_backward([batch] * 64)
    return errors(gradients(model), once), seen


def clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def losses_of_steps(path, layout):
    """Losses of three steps of gradient descent, with copies in bfloat16."""
    model = model_of(path, layout, param_dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for _ in range(3):
        found.append(float(model.forward_backward(micro_batches(model))))
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return found


def test_experts_that_stay_in_stages_are_those_of_the_last_step(tiny):
    """Whole experts have copies that nothing gathers: each step writes them anew."""
    path = tiny("mixtral")
    (expected,) = run_ranks(losses_of_steps, path, "single", num_ranks=1)
    assert expected[0] - expected[2] > 0.05
    for found in run_ranks(losses_of_steps, path, "pp=2,ep=2", num_ranks=4):
        assert found == pytest.approx(expected, rel=2e-3)


def test_micro_batches_add_up_in_float32_and_the_stream_is_half(tiny):
    """In bfloat16 the last of 64 equal additions would round to 1/4 of itself; by 64, a power of two, all is exact."""
    ((differences, seen),) = run_ranks(sums_of_micro_batches, tiny("llama"), num_ranks=1)
    assert max(differences.values()) < 1e-5
    assert seen == {BF16}


def bits_of_a_sum(path, layout, *, checkpointed=False):
    """By name: the share of a gradient of one micro-batch that bfloat16 could not hold."""
    model = model_of(path, layout, num_layers=1, param_dtype=BF16)
    if checkpointed:
        for block in model.model.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model.forward_backward(micro_batches(model)[0], accumulate=True)
    return {name: float((grad != grad.to(BF16)).float().mean()) for name, grad in gradients(model).items()}


@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("summa=2x2", 4), ("tesseract=1x1x2", 2), ("tesseract=1x1x2[zero=true]", 2)]
)
def test_parts_of_gradients_are_summed_in_float32_over_a_grid(tiny, layout, num_ranks):
    for shares in run_ranks(bits_of_a_sum, tiny("llama"), layout, num_ranks=num_ranks):
        assert min(share for name, share in shares.items() if "embed" not in name) > 0.3
        # Of tokens that occur twice; 0.0094 in bfloat16.
        assert max(share for name, share in shares.items() if "embed" in name) > 0.012


def test_a_grid_sums_in_float32_under_a_checkpoint_which_gives_backward_other_tensors_than_leaves(tiny):
    (shares,) = run_ranks(partial(bits_of_a_sum, checkpointed=True), tiny("llama"), "summa=1x1", num_ranks=1)
    biases = [share for name, share in shares.items() if name.endswith("bias")]
    assert biases and min(biases) > 0.3  # summed over tokens, by the grid


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.down(torch.relu(self.up(x))).float(), labels.float())}


def floating_inputs(layout):
    torch.manual_seed(0)
    model = rotorch.parallelize(Regression(), layout, device="cpu", param_dtype=BF16)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(model.batch_rank))
    return float(model.forward_backward({"x": x, "labels": x[:, :1]}))


def test_floating_point_inputs_have_the_dtype_of_the_weights():
    losses = [run_ranks(floating_inputs, layout, num_ranks=2)[0] for layout in ("fsdp=2", "ddp=2", "rtp=2")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)


def casts(path, layout, precision):
    """Casts of a step, of two layers less those of one."""
    counts = []
    for num_layers in (1, 2):
        model = model_of(path, layout, num_layers=num_layers, **precision)
        batch = micro_batches(model)[0]
        for _ in range(2):
            model.forward_backward(batch, accumulate=True)
        with Operations() as operations:
            model.forward_backward(batch, accumulate=True)
        counts.append(operations.num_casts)
        model.close()
    return counts[1] - counts[0]


def casts_of_both(path):
    layout = "rtp=2[transport=send_receive]"
    return casts(path, layout, {"autocast_dtype": BF16}), casts(path, layout, {"param_dtype": BF16})


def test_a_visit_converts_no_activation(tiny):
    """Casts that are left: of each own slice, of gradients into float32 buffers, and of norms as models write them."""
    for under_autocast, plain in run_ranks(casts_of_both, tiny("llama"), num_ranks=2):
        of_weights = 2 * 10  # gradients, in two visits
        of_norms = 2 * (4 + 2)  # forward and backward, in and out; the weight, and its gradient
        own_slices = 2 * 3  # of two units: in forward, and in backward to be sent and to be computed with
        assert plain <= of_weights + of_norms + own_slices < under_autocast


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("single", {"param_dtype": torch.float16}, r"param_dtype=torch.float16: write torch.bfloat16"),
        ("single", {"param_dtype": BF16, "autocast_dtype": BF16}, "Write one of them"),
    ],
)
def test_what_cannot_is_refused_by_name(tiny, layout, options, message):
    with pytest.raises(ConfigError, match=message):
        model_of(tiny("llama"), layout, **options)

"""Models under rtp on a GPU that ranks share: exact in float64, within rounding in bfloat16, the same dropout again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rotorch
from rotorch.models.hf import causal_lm
from rotorch.testing.parity import my_micro_batches, parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config
from rotorch.testing.verify import BAR, verify

SYMMETRIC = "transport=symmetric_memory"


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        (f"rtp=2[{SYMMETRIC}]", "llama"),
        (f"rtp=2[recompute=slice,{SYMMETRIC}]", "llama"),
        (f"rtp=2[recompute=none,{SYMMETRIC}]", "gemma2"),
        (f"rtp=3[{SYMMETRIC}]", "qwen3"),
        (f"rtp=4[visits=2,{SYMMETRIC}]", "llama"),  # groups whose sums hop before their ranks share them out
        ("rtp=2", "mixtral"),
        (f"ddp=2,rtp=2[{SYMMETRIC}]", "llama"),
        ("single", "llama"),
    ],
)
def test_float64_parity(warm, tiny, parallel, model):
    report = verify(tiny(model), parallel=parallel, layers=2, device="cuda", timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert max(report.max_rel_err_loss, report.max_rel_err_grad) <= BAR


# ------------------------------------------------------------- bfloat16

NUM_STEPS = 5
# Two to the minus eight is bfloat16's rounding. A loss is a mean over tokens of a few layers' products, each rounded:
# rotation adds n partial sums where one process adds none, so a few roundings more. Four of them, after five steps.
BFLOAT16_BOUND = 4 * 2.0**-8


def losses(config, parallel, arguments):
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, parallel, device="cuda", **arguments).materialize(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    found = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = my_micro_batches(model, parity_batch(step=step, vocab_size=config.vocab_size))
        batches = [{name: rows.cuda() for name, rows in batch.items()} for batch in batches]
        found.append(float(model.forward_backward(batches)))
        optimizer.step()
    model.close()
    return found


@pytest.mark.parametrize("precision", ["param_dtype", "autocast_dtype"])
@pytest.mark.parametrize("options", ["recompute=none", "recompute=slice", "visits=1", "hops=bfloat16"])
def test_bfloat16_is_within_rounding_of_float32(warm, tiny, options, precision):
    config, layout = plain_config(tiny("llama")), f"rtp=2[{options},{SYMMETRIC}]"
    (expected,) = run_ranks(losses, config, "single", {}, num_ranks=1)
    for found in run_ranks(losses, config, layout, {precision: torch.bfloat16}, num_ranks=2):
        assert found == pytest.approx(expected, rel=BFLOAT16_BOUND)
    for found in run_ranks(losses, config, layout, {}, num_ranks=2):
        assert found == pytest.approx(expected, rel=1e-4 if "hops" not in options else BFLOAT16_BOUND)


# ------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("options", ["recompute=none", "recompute=slice", "visits=1"])
def test_recorded_passes_give_the_losses_of_others(warm, tiny, options):
    """Five steps: the first warms up, the second records, and the others replay."""
    config, layout = plain_config(tiny("llama")), f"rtp=2[{options},{SYMMETRIC}]"
    plain, recorded = (
        run_ranks(losses, config, layout, {"param_dtype": torch.bfloat16, "compile": mode}, num_ranks=2, timeout_s=600)
        for mode in (False, "reduce-overhead")
    )
    for ours, theirs in zip(recorded, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=BFLOAT16_BOUND)


# ------------------------------------------------------------- dropout


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(F.dropout(F.relu(self.up(x)), 0.5))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Dropped()

    def forward(self, x):
        return self.mlp(x)


def loss(module, batch, num_targets):
    return module(batch["x"]).square().sum()


def gradients(recompute):
    """Of a first step with dropout, which draws on the GPU's generator; and what is drawn there afterwards."""
    torch.manual_seed(1)
    net = Net()
    for number, weight in enumerate(net.parameters()):
        weight.data.copy_(torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight) * (number + 1))
    model = rotorch.parallelize(
        net, f"rtp=2[recompute={recompute},{SYMMETRIC}]", plan={"mlp.up": "colwise", "mlp.down": "rowwise"},
        device="cuda", loss=loss,
    )  # fmt: skip
    torch.cuda.manual_seed(7)
    batch = {"x": torch.linspace(0.0, 1.0, 8 * 16, device="cuda").view(8, 16), "labels": torch.zeros(8, 2)}
    model.forward_backward(batch)
    found = [model.full_tensor(name, grad=True).cpu() for name in model.weights]
    model.close()
    return found, float(torch.rand((), device="cuda"))


def test_recomputed_slices_draw_the_same_dropout():
    kept, again = (run_ranks(gradients, recompute, num_ranks=2) for recompute in ("none", "slice"))
    for (ours, drawn), (theirs, drawn_again) in zip(kept, again, strict=True):
        assert drawn == drawn_again  # recomputing has not moved the generator on
        for a, b in zip(ours, theirs, strict=True):
            assert a.abs().sum() > 0
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)

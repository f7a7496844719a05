"""Training through the command line: the same losses under every layout, after a resume, and what it writes down."""

import json
import math

import pytest
import torch
from commands import rotorch, write_run

from rotorch.optim import AdamW
from rotorch.parallelize import parallelize
from rotorch.run_config import OptimizerSection
from rotorch.testing.ranks import run_ranks
from rotorch.train.metrics import read_metrics
from rotorch.train.optim import clip_gradients, learning_rate, make_optimizer, schedule_numbers, squared_norm_share


@pytest.fixture
def run_toml(tmp_path, warm):
    return write_run(tmp_path)


def losses(directory):
    return [line["loss"] for line in read_metrics(directory)]


def test_learning_rate_warms_up_and_falls_to_its_floor():
    settings = OptimizerSection(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, settings=settings, steps=20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    constant = OptimizerSection(lr=1.0, schedule="constant")
    assert learning_rate(20, settings=constant, steps=20) == 1.0


def test_learning_rates_fall_in_a_line_from_the_peak_or_over_the_last_steps():
    linear = OptimizerSection(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.0)
    assert [learning_rate(step, settings=linear, steps=6) for step in range(1, 7)] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    late = OptimizerSection(lr=1.0, warmup_steps=1, schedule="wsd", decay_fraction=0.4, min_lr_ratio=0.5)
    rates = [learning_rate(step, settings=late, steps=10) for step in range(1, 11)]
    assert rates[:6] == [1.0] * 6 and rates[6:] == pytest.approx([0.875, 0.75, 0.625, 0.5])
    assert schedule_numbers(late, steps=10)["decay_fraction"] == 0.4
    early = OptimizerSection(lr=1.0, warmup_steps=9, schedule="wsd", decay_fraction=1.0)  # never before the peak
    assert learning_rate(9, settings=early, steps=10) == 1.0


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6))


PLAN = {"0": "colwise_gather_output", "2": "colwise_gather_output"}


def squares(model, batch, num_targets):
    return model(batch["x"]).square().sum() / num_targets


def clipped_gradients(parallel):
    model = parallelize(module(), parallel, device="cpu", plan=PLAN, loss=squares)
    model.forward_backward({"x": torch.ones(2, 6) * (model.batch_rank + 1), "labels": torch.ones(2, 3)})
    share = torch.tensor([squared_norm_share(model)])
    if model.mesh.size() > 1:
        torch.distributed.all_reduce(share)
    norm = math.sqrt(float(share))
    clip_gradients(model, norm=norm, clip_norm=norm / 4)
    return norm, {name: model.full_tensor(name, grad=True) for name in model.weights}


@pytest.mark.parametrize("parallel", ["ddp=2", "fsdp=2", "rtp=2", "ddp=2,rtp=2"])
def test_the_norm_is_that_of_the_whole_model(parallel):
    num_ranks = 4 if "," in parallel else 2
    reference = module()
    outputs = [reference(torch.ones(2, 6) * (rank + 1)).square().sum() for rank in range(num_ranks)]
    (sum(outputs) / (4 * num_ranks)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    for norm, gradients in run_ranks(clipped_gradients, parallel, num_ranks=num_ranks):
        assert norm == pytest.approx(float(expected), rel=1e-5)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad / 4, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lies", ["as it is", "transposed"])
def test_the_update_copies_no_gradient_however_a_slice_lies(lies):
    """Torch's own fused update clones gradients that lie transposed."""

    def made(numbers):
        return numbers.t().contiguous().t() if lies == "transposed" else numbers.clone()

    values, bias = torch.randn(6, 8), torch.randn(5)
    ours = [torch.nn.Parameter(made(values)), torch.nn.Parameter(bias.clone())]
    theirs = [torch.nn.Parameter(values.clone()), torch.nn.Parameter(bias.clone())]
    optimizer = AdamW(ours, lr=0.1, weight_decay=0.3, fused=True)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3, foreach=False)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn_like(other)
            one.grad = made(other.grad) if one.dim() == 2 else other.grad.clone()
        with torch.profiler.profile() as profile:
            optimizer.step()
        reference.step()
        assert "aten::clone" not in {event.key for event in profile.key_averages()}
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
        state, known = optimizer.state[one], reference.state[other]
        torch.testing.assert_close(state["exp_avg"], known["exp_avg"])
        assert state["exp_avg"].shape == one.shape  # as checkpoints have it


def decays():
    model = parallelize(module(), "single", device="cpu", plan={}, loss=squares)
    optimizer = make_optimizer(model, settings=OptimizerSection(weight_decay=0.3))
    return [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in optimizer.param_groups]


def test_decay_is_on_matrices_only():
    assert run_ranks(decays, num_ranks=1) == [[(0.3, [2, 2]), (0.0, [1, 1, 1, 1])]]


@pytest.mark.parametrize(
    "layouts",
    [
        ("ddp=2",),
        # test_mixture.py and test_evaluations.py have those of rtp=2, test_train_lora.py of fsdp=2.
        pytest.param(("fsdp=2", "rtp=2"), marks=pytest.mark.slow),
    ],
)
def test_the_same_seed_gives_the_same_losses_under_every_layout(run_toml, tmp_path, layouts):
    runs = {"single": 4, **dict.fromkeys(layouts, 2)}
    for layout, micro_batch in runs.items():
        arguments = [f"train.micro_batch={micro_batch}", "train.global_batch=4", f"train.out={tmp_path / layout}"]
        done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", layout, *arguments)
        assert done.code == 0, done.stderr
    reference = losses(tmp_path / "single")
    assert len(reference) == 6 and reference[-1] < reference[0] - 0.2
    for layout in runs:
        assert losses(tmp_path / layout) == pytest.approx(reference, rel=1e-5), layout


@pytest.mark.slow  # test_train_lora.py compares two micro-batches of one rank with one of each of two ranks
def test_accumulation_changes_nothing_but_the_memory(run_toml, tmp_path):
    for micro_batch in (4, 2):
        done = rotorch(tmp_path / "log", "train", run_toml, f"train.micro_batch={micro_batch}", "train.global_batch=4",
                       f"train.out={tmp_path / str(micro_batch)}")  # fmt: skip
        assert done.code == 0, done.stderr
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "4"), rel=1e-5)


def test_a_resumed_run_reaches_the_same_losses_bit_for_bit(run_toml, tmp_path):
    layout = "rtp=2[transport=send_receive]"  # over shared memory last bits depend on which rank comes first
    whole = rotorch(tmp_path / "log", "train", run_toml, "--parallel", layout, f"train.out={tmp_path / 'whole'}")
    assert whole.code == 0, whole.stderr
    parts = ["train", run_toml, "--parallel", layout, "train.checkpoint_every=2", f"train.out={tmp_path / 'parts'}"]
    first = rotorch(tmp_path / "log", *parts, "optimizer.schedule=cosine", "train.steps=6")
    assert first.code == 0, first.stderr
    for step in (5, 6):  # as a run looks that was killed in step 5, after the checkpoint of step 4
        for left in (tmp_path / "parts" / "checkpoints").glob(f"step-*{step}"):
            left.rename(tmp_path / left.name)
    resumed = rotorch(tmp_path / "log", *parts, "--resume")
    assert resumed.code == 0, resumed.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [line["step"] for line in read_metrics(tmp_path / "parts")] == [1, 2, 3, 4, 5, 6]


def test_what_a_run_writes_and_prints(run_toml, tmp_path):
    summary = tmp_path / "summary.json"
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2", "train.eval_every=3", "sample.length=8",
                   "train.tensorboard=true", "--json", summary)  # fmt: skip
    assert (done.code, done.stderr) == (0, "")
    lines = read_metrics(tmp_path / "run")
    fields = {"step", "loss", "tokens", "tokens_per_s", "grad_norm", "lr", "peak_bytes"}
    assert len(lines) == 6 and all(fields <= line.keys() for line in lines)
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [3, 6]
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    numbers = json.loads(summary.read_text())
    assert numbers["held_out_bits_per_byte"] == lines[-1]["held_out_bits_per_byte"]
    assert numbers["resident_bytes_per_rank"] < 0.6 * numbers["resident_bytes_one_process"]
    assert numbers["sample"].startswith("def ")
    tail = done.stdout[-600:]
    assert f"{numbers['held_out_bits_per_byte']:.4f} bits per byte" in tail
    assert "one process would need" in tail and numbers["checkpoint"] in tail
    bits = lines[-1]["held_out_loss"] / math.log(2)  # tokens are bytes
    assert lines[-1]["held_out_bits_per_byte"] == pytest.approx(bits)

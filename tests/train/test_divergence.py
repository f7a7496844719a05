"""Numbers that go wrong: noticed in their step, traced to where they began; what becomes of the run then."""

import math
import os
import re

import pytest
import torch
from commands import rotorch, write_run
from failures import seen
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.parallelize import parallelize
from rotorch.run_config import RunConfig, TrainSection
from rotorch.testing.ranks import run_ranks
from rotorch.train import loop
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.saving import check
from rotorch.train.checks.divergence import DivergenceGuard
from rotorch.train.checks.nonfinite import first_nonfinite
from rotorch.train.checks.preflight import check_roll_back
from rotorch.train.checks.replicas import check_replicas, check_unchanged
from rotorch.train.metrics import read_metrics
from rotorch.train.state import TrainState
from rotorch.train.step import StepResult


@pytest.fixture
def run_toml(tmp_path, warm):
    return write_run(tmp_path)


@pytest.fixture
def poison(monkeypatch):
    """MLPs give NaN on one rank for what a run reads in some steps."""

    def install(*, steps, rank=0):
        read, forward, now = loop.read_batches, LlamaMLP.forward, {"step": 0}

        def reading(*args, step, **kwargs):
            now["step"] = step
            return read(*args, step=step, **kwargs)

        def poisoned(self, x):
            is_bad = now["step"] in steps and int(os.environ.get("RANK", "0")) == rank
            return forward(self, x) * (math.nan if is_bad else 1.0)

        monkeypatch.setattr(loop, "read_batches", reading)
        monkeypatch.setattr(LlamaMLP, "forward", poisoned)

    return install


@pytest.mark.parametrize("layout", ["rtp=2", pytest.param("ddp=2", marks=pytest.mark.slow)])
def test_stopping_names_the_module_and_leaves_checkpoints_alone(run_toml, tmp_path, poison, layout):
    poison(steps={4}, rank=1)
    settings = ["--parallel", layout, "train.checkpoint_every=2", "train.max_restarts=2"]
    done = rotorch(tmp_path / "log", "train", run_toml, *settings)
    assert done.code == 3
    assert re.search(
        r"in step 4, examining its numbers: the loss is nan and the gradient norm nan; first not finite is the output "
        r"of 'model\.layers\.0\.mlp' \(\w*LlamaMLP\w*\) on rank 1\. Nothing was updated, and earlier checkpoints are "
        r"untouched\. .* write train\.on_nonfinite=skip or roll_back",
        done.stderr,
    ), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    seen(
        "The loss is not finite",
        done.stderr,
        instead={
            r"\(rank \d was [^)]*\)": "(rank 1 was in step 4, examining its numbers)",
            r"^rotorch: rank \d": "rotorch: rank 0",
        },
    )
    assert check(latest(tmp_path / "run")).step == 2
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_a_pipeline_names_the_module_of_the_first_stage(run_toml, tmp_path, poison):
    poison(steps={2}, rank=0)
    settings = ["model.config.num_hidden_layers=4", "train.accumulation=2", "train.check_every=1"]
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "pp=2", *settings)
    assert done.code == 3
    assert re.search(r"in step 2, .*the output of 'model\.layers\.0\.mlp' \(\w*LlamaMLP\w*\) on rank 0", done.stderr)


def test_skipping_leaves_the_batch_out(run_toml, tmp_path, poison):
    poison(steps={4, 6}, rank=1)
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "ddp=2", "train.on_nonfinite=skip")
    assert (done.code, done.stderr) == (0, "")
    lines = read_metrics(tmp_path / "run")
    assert [line["loss"] is None for line in lines] == [False, False, False, True, False, True]
    assert [line.get("skipped", False) for line in lines] == [False, False, False, True, False, True]
    assert lines[4]["tokens"] == lines[2]["tokens"] + lines[0]["tokens"]
    assert "step 4 is skipped: the loss is nan" in done.stdout and "'model.layers.0.mlp'" in done.stdout
    seen("A batch is skipped", next(line for line in done.stdout.splitlines() if "is skipped" in line))
    assert check(latest(tmp_path / "run")).step == 6


def test_rolling_back_reads_on_behind_what_was_wrong(run_toml, tmp_path, poison, monkeypatch):
    read = loop.read_batches
    options = ["train", run_toml, "train.checkpoint_every=2", "train.on_nonfinite=roll_back", "train.check_every=2"]
    with monkeypatch.context() as patch:  # what the run should come to: steps 3 to 6 read what steps 5 to 8 would
        patch.setattr(loop, "read_batches", lambda *a, step, **k: read(*a, step=step + (2 if step > 2 else 0), **k))
        assert rotorch(tmp_path / "log", *options, f"train.out={tmp_path / 'other'}").code == 0
    poison(steps={4})
    done = rotorch(tmp_path / "log", *options)
    assert (done.code, done.stderr) == (0, "")
    assert "to read on behind what steps 3 to 4 read" in done.stdout
    seen("The run goes back", next(line for line in done.stdout.splitlines() if "read on behind" in line))
    ours, other = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "other")
    assert [(line["step"], line["loss"], line["tokens"]) for line in ours] == [
        (line["step"], line["loss"], line["tokens"]) for line in other
    ]
    assert check(latest(tmp_path / "run")).data["steps_read_ahead"] == 2


# ---------------------------------------------------------------- what is decided


def result(loss, norm=1.0):
    return StepResult(loss=loss, grad_norm=norm, peak_bytes=(0,), stop=False, updated=False)


def test_a_spike_is_many_times_the_median():
    guard = DivergenceGuard(TrainSection(steps=1, checkpoint_every=1, spike_factor=3.0))
    for loss in (9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        guard.done(loss)
    assert guard.highest_loss == math.inf  # too few to tell
    guard.done(2.0)
    assert guard.highest_loss == 6.0
    assert "the loss is 7, more than train.spike_factor = 3 times 2" in guard.describe(result(7.0))
    assert guard.action(result(7.0), what="it") == "roll_back"
    assert DivergenceGuard(TrainSection(steps=1)).highest_loss == math.inf


def test_what_a_spike_is_judged_by_outlives_a_restart(run_toml, tmp_path):
    options = ["train", run_toml, "train.spike_factor=3", "train.checkpoint_every=4"]
    assert rotorch(tmp_path / "log", *options, "train.steps=4").code == 0
    assert rotorch(tmp_path / "log", *options, "--resume").code == 0
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert check(latest(tmp_path / "run")).data["recent_losses"] == losses and len(losses) == 6
    guard = DivergenceGuard(TrainSection(steps=1, spike_factor=3.0), losses=[2.0] * 8)
    assert guard.highest_loss == 6.0


def test_a_run_does_not_go_on_like_that_for_ever():
    guard = DivergenceGuard(TrainSection(steps=1, on_nonfinite="skip"))
    for _ in range(10):
        assert guard.action(result(math.nan), what="it") == "skip"
    with pytest.raises(RankFailure, match="after 10 steps in a row that were skipped"):
        guard.action(result(2.0, norm=math.inf), what="it")
    guard = DivergenceGuard(TrainSection(steps=1, on_nonfinite="roll_back"))
    for _ in range(2):
        for _ in range(3):
            assert guard.action(result(math.nan), what="it") == "roll_back"
        guard.saved()
    for _ in range(3):
        guard.action(result(math.nan), what="it")
    with pytest.raises(RankFailure, match="after going back 3 times without coming to a new checkpoint"):
        guard.action(result(math.nan), what="it")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_nonfinite": "roll_back"}, "on_nonfinite = 'roll_back' goes back to checkpoints, and there are none"),
        ({"spike_factor": 3.0}, "train.spike_factor = 3 goes back to checkpoints, and there are none"),
        ({"spike_factor": 0.5, "checkpoint_every": 1}, "train.spike_factor = 0.5: most losses are above that"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    config = RunConfig(model={"config": {}}, train=TrainSection(steps=1, **settings))
    with pytest.raises(ConfigError) as caught:
        check_roll_back(config)
    assert message in str(caught.value)


# ---------------------------------------------------------------- where it began

PLAN = {"0": "colwise_gather_output", "2": "colwise_gather_output"}


def squares(model, batch, num_targets):
    return model(batch["x"]).square().sum() / num_targets


def roots(model, batch, num_targets):
    return model(batch["x"]).square().sqrt().sum() / num_targets  # at 0 it has no slope


def build(parallel, loss=squares):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6))
    return parallelize(module, parallel, device="cpu", plan=PLAN, loss=loss)


def batch(model):
    return {"x": torch.ones(2, 6) * (model.batch_rank + 1), "labels": torch.ones(2, 3)}


def where_it_began(parallel):
    """Tells of a weight, an input, a gradient, and of nothing at all."""
    told = []
    model = build(parallel)
    model.forward_backward(batch(model))
    told.append(first_nonfinite(model, [batch(model)]))
    spoilt = batch(model)
    spoilt["x"][0, 0] = math.inf if model.batch_rank == model.num_batch_ranks - 1 else 1.0
    told.append(first_nonfinite(model, [batch(model), spoilt]))
    if model.weights["2.bias"].local.numel():
        model.weights["2.bias"].local.view(-1)[0] = math.nan
    told.append(first_nonfinite(model, [batch(model)]))
    model.close()
    model = build(parallel, loss=roots)
    with torch.no_grad():
        model.weights["2.weight"].local.zero_()
        model.weights["2.bias"].local.zero_()
    model.values_changed()
    model.forward_backward(batch(model), accumulate=True)
    told.append(first_nonfinite(model, [batch(model)]))
    model.close()
    return told


@pytest.mark.parametrize(("parallel", "num_ranks"), [("single", 1), ("rtp=2", 2), ("fsdp=2", 2)])
def test_where_it_began(parallel, num_ranks):
    told = run_ranks(where_it_began, parallel, num_ranks=num_ranks)
    assert told == [told[0]] * num_ranks  # all ranks say the same
    nothing, output, weight, gradient = told[0]
    assert nothing.startswith("not found: in a second pass")
    assert re.fullmatch(rf"the output of '0' \(\w*Linear\w*\) on rank {num_ranks - 1}", output)
    assert re.fullmatch(r"the weight '2\.bias' itself, on rank 0", weight)
    assert gradient == "the gradient of '2.bias', while all outputs of a second pass are finite"


def where_in_a_layer(parallel):
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = parallelize(LlamaForCausalLM(config), parallel, device="cpu")
    ids = {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}
    model.forward_backward(ids)
    model.weights["model.layers.1.mlp.up_proj.weight"].local.fill_(1e38)
    model.values_changed()
    return first_nonfinite(model, [ids])


@pytest.mark.parametrize("parallel", ["rtp=2[transport=send_receive]", "megatron=2"])
def test_it_is_found_inside_of_a_layer_that_is_cut(parallel):
    for told in run_ranks(where_in_a_layer, parallel, num_ranks=2):
        assert re.fullmatch(r"the output of 'model\.layers\.1\.mlp\.\w+' .* on rank 0", told), told


# ---------------------------------------------------------------- replicas


def flip(model, optimizer, what, name):
    """Flips a bit of what this rank holds of a weight, or of its second moment."""
    held = model.weights[name]
    tensor = held.local if what == "weight" else optimizer.state[held.local_parameter]["exp_avg_sq"]
    tensor.view(-1).view(torch.int32)[2] ^= 1


def compare(parallel, what, name, over):
    """Trains two steps, comparing over ranks and time, flips a bit on rank 1, and compares again."""
    model = build(parallel)
    optimizer = torch.optim.AdamW([held.local_parameter for held in model.weights.values()], lr=0.1)
    state, sums = TrainState(model=model, optimizer=optimizer), None
    for _ in range(2):
        optimizer.zero_grad()
        model.forward_backward(batch(model))
        if sums is not None:
            check_unchanged(state, sums)
        optimizer.step()
        sums = check_replicas(state)
    if model.mesh.get_rank() == 1:
        flip(model, optimizer, what, name)
    try:
        if over == "ranks":
            check_replicas(state)
        else:
            model.forward_backward(batch(model), accumulate=True)
            check_unchanged(state, sums)
    except RankFailure as error:
        return str(error)
    finally:
        model.close()


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "what", "message"),
    [
        ("rtp=2", 2, "weight", "the weight '1.weight' differs between ranks 0, 1: replicas"),
        ("ddp=3", 3, "weight", "the weight '1.weight' on rank 1 differs from that on the 2 other ranks that hold it"),
        ("ddp=3", 3, "moment", "the optimizer's state of '1.weight' on rank 1 differs from that on the 2 other ranks"),
        (
            *("ddp=2,rtp=2", 4, "weight"),
            "the weight '1.weight' on rank 1 differs from that on the 3 other ranks that hold it",
        ),
    ],
)
def test_a_flipped_bit_of_a_replica_is_found(parallel, num_ranks, what, message):
    told = run_ranks(compare, parallel, what, "1.weight", "ranks", num_ranks=num_ranks)
    assert told == [told[0]] * num_ranks
    assert message in told[0]
    if (parallel, what) == ("ddp=3", "weight"):
        seen("Ranks hold different weights", f"rotorch: rank 0 failed in step 40, examining its numbers: {told[0]}")


@pytest.mark.parametrize("what", ["weight", "moment"])
@pytest.mark.parametrize("parallel", ["rtp=2", "fsdp=2"])
def test_a_flipped_bit_of_what_one_rank_alone_holds_is_found(parallel, what):
    told = run_ranks(compare, parallel, what, "0.weight", "time", num_ranks=2)
    assert told == [told[0]] * 2
    named = {"weight": "the weight", "moment": "the optimizer's state of"}[what]
    assert told[0].startswith(f"{named} '0.weight' on rank 1 has changed since the update of step 0, and nothing did")


def test_a_run_looks_at_what_lies_between_two_updates(run_toml, tmp_path, monkeypatch):
    read = loop.read_batches

    def reading(windows, model, *, step, sizes):
        if step == 4 and model.mesh.get_rank() == 1:
            model.weights["model.layers.0.mlp.up_proj.weight"].local.view(torch.int32)[2, 1] ^= 1
        return read(windows, model, step=step, sizes=sizes)

    monkeypatch.setattr(loop, "read_batches", reading)
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "fsdp=2", "train.check_every=3")
    assert done.code == 3
    assert "the weight 'model.layers.0.mlp.up_proj.weight' on rank 1 has changed since the update of step 3" in (
        done.stderr
    )
    varies = {
        r"\(rank \d was [^)]*\)": "(rank 1 was in step 4, examining its numbers)",
        r"^rotorch: rank \d": "rotorch: rank 0",
    }
    seen("A weight has changed between two updates", done.stderr, instead=varies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        "rtp=2[buffering=in_place]",
        "megatron=2",
        "ddp=2,fsdp=2",
        "tesseract=2x2x1",
        "atp=2x2",
        "ddp=2,megatron=2",
    ],
)
def test_replicas_stay_the_same_under_every_layout(run_toml, tmp_path, parallel):
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", parallel, "train.check_every=1")
    assert (done.code, done.stderr) == (0, "")

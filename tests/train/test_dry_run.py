"""The forecast of bytes that a run reads and holds: given before it starts, and true of what it then reads."""

import json
import os
import re
import signal

import pytest
from commands import rotorch, write_run
from stores import Objects, url_of

from rotorch.core.errors import ConfigError
from rotorch.core.quantities import format_bytes
from rotorch.run_config import load_run_config
from rotorch.train.checkpoint import storage
from rotorch.train.checks import dry_run
from rotorch.train.checks.preflight import check_run
from rotorch.train.metrics import read_metrics


@pytest.fixture
def run_toml(tmp_path, warm):
    return write_run(tmp_path)


def test_each_rank_reads_what_was_said(run_toml, tmp_path, monkeypatch):
    assert rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2", "train.steps=2").code == 0
    read_box = storage._read_box

    def counted(stream, chunk, dtype, *, into, **kwargs):
        with (tmp_path / f"read-{os.environ['RANK']}").open("a") as counts:
            counts.write(f"{into.numel() * dtype.itemsize}\n")
        read_box(stream, chunk, dtype, into=into, **kwargs)

    monkeypatch.setattr(storage, "_read_box", counted)
    for steps, layout, micro_batch in ((3, "rtp=2", 2), (4, "single", 4)):  # as many ranks as wrote it, and others
        settings = ["--parallel", layout, f"train.steps={steps}", f"train.micro_batch={micro_batch}", "--resume"]
        said = tmp_path / "said.json"
        done = rotorch(tmp_path / "log", "train", run_toml, *settings, "--dry-run", "--json", said)
        assert (done.code, done.stderr) == (0, "")
        assert "fits: " in done.stdout and "nothing was started" in done.stdout
        assert re.search(r"weight decay: on 10\.\d k of 10\.6 k trained parameters", done.stdout)
        assert len(read_metrics(tmp_path / "run")) == steps - 1
        assert rotorch(tmp_path / "log", "train", run_toml, *settings).code == 0
        told, about = json.loads(said.read_text()), json.loads((tmp_path / "run" / "run.json").read_text())
        # The norms of one layer and of the end are not decayed.
        assert told["num_trained_parameters"] - told["num_decayed_parameters"] == 3 * 16
        assert about["num_decayed_parameters"] == told["num_decayed_parameters"]
        for plan in told["ranks"]:
            counts = tmp_path / f"read-{plan['rank']}"
            assert plan["reads_bytes"] == sum(map(int, counts.read_text().split())), (layout, plan["rank"])
            counts.unlink()


def test_what_does_not_fit(run_toml, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "available_bytes", lambda: 100 << 10)
    said = tmp_path / "said.json"
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2", "--dry-run", "--json", said)
    assert (done.code, done.stderr) == (1, "")
    ranks = json.loads(said.read_text())["ranks"]
    assert all(plan["activations_bytes"] > 40 << 10 for plan in ranks)
    needed = format_bytes(sum(plan["host_bytes"] for plan in ranks))
    assert f"does not fit: {needed} of this machine, which has 100 KiB left" in done.stdout
    assert "at the highest moment of a step rank 0 has weights 20.8 KiB, " in done.stdout
    assert "reads" not in done.stdout and not (tmp_path / "run").exists()


def test_nothing_is_written_to_a_store(run_toml, tmp_path, monkeypatch):
    bucket = tmp_path / "bucket"
    settings = ["train", run_toml, f"train.checkpoint_dir={url_of(bucket)}"]
    assert rotorch(tmp_path / "log", *settings, "train.steps=2").code == 0
    there = sorted(bucket.rglob("*"))
    monkeypatch.setattr(Objects, "kill_at", 1)  # at the first thing that is written or removed
    done = rotorch(tmp_path / "log", *settings, "train.steps=3", "--resume", "--dry-run")
    assert (done.code, done.stderr) == (0, "") and "resume  step 2" in done.stdout
    assert "passes compute in" not in done.stdout
    done = rotorch(tmp_path / "log", *settings, "train.steps=3", "train.precision=bfloat16", "--resume", "--dry-run")
    assert "resume  passes compute in bfloat16 from here on; before it was float32\n" in done.stdout
    assert sorted(bucket.rglob("*")) == there
    assert rotorch(tmp_path / "log", *settings, "train.steps=3", "--resume").code == -signal.SIGKILL


def test_a_copy_that_is_saved_behind_the_run_counts(run_toml, tmp_path):
    said = tmp_path / "said.json"
    settings = ["--parallel", "rtp=2", "train.async_save=true", "--dry-run", "--json", said]
    done = rotorch(tmp_path / "log", "train", run_toml, *settings)
    assert done.code == 0 and "copy to save" in done.stdout
    for plan in json.loads(said.read_text())["ranks"]:
        assert plan["copies_bytes"] == plan["weights_bytes"] + plan["optimizer_bytes"] > 0
        assert plan["host_bytes"] == plan["needed_bytes"] + plan["copies_bytes"]


def test_it_is_said_how_layers_are_shared_out_among_stages(run_toml, tmp_path):
    said = tmp_path / "said.json"
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "pp=1", "--dry-run", "--json", said)
    assert (done.code, done.stderr) == (0, "")
    assert "stages: layers=1, by operations 100 % of a step" in done.stdout
    assert json.loads(said.read_text())["stages"] == {"layers": "1", "parts_of_operations": [1.0]}


def test_what_passes_keep_is_counted_for_the_stages_of_each_rank(run_toml, tmp_path):
    said = tmp_path / "said.json"
    settings = ["--parallel", "ddp=2,pp=2", "model.config.num_hidden_layers=2", "train.steps=2", "--json", said]
    done = rotorch(tmp_path / "log", "train", run_toml, *settings, "--dry-run")
    assert (done.code, done.stderr) == (0, "")
    first, second, *replica = json.loads(said.read_text())["highest"]
    assert replica == [first, second] and "logits" in second and "logits" not in first


def test_passes_that_are_not_counted_say_why(run_toml, tmp_path):
    said = tmp_path / "said.json"
    done = rotorch(tmp_path / "log", "train", run_toml, "train.compile=true", "--dry-run", "--json", said)
    assert (done.code, done.stderr) == (0, "")
    assert "not counted: activations and temporaries: compiled passes keep other tensors" in done.stdout
    assert all(plan["activations_bytes"] is None for plan in json.loads(said.read_text())["ranks"])


def test_a_limit_of_memory_says_how_layers_are_shared_out(run_toml, tmp_path):
    done = rotorch(tmp_path / "log", "train", run_toml, "--dry-run", "--parallel", "pp=1[rank_memory=1GiB]")
    assert (done.code, done.stderr) == (0, "")
    assert "ranks   1, pp=1[layers=1]" in done.stdout and "stages: layers=1" in done.stdout
    too_little = load_run_config(run_toml, overrides=["parallel.layout=pp=1[rank_memory=1KiB]"])
    no_cut = re.escape("pp=1[rank_memory=1KiB]: no cut of 1 layers into 1 stages keeps each within 1.00 KiB")
    with pytest.raises(ConfigError, match=no_cut):
        check_run(too_little, only_plan=True)


def test_state_of_other_optimizers_is_counted_by_what_they_keep(run_toml, tmp_path):
    said, counted = tmp_path / "said.json", {}
    for name in ("adamw", "lion", "sgd", "muon"):
        settings = ["--dry-run", "--json", said, f"optimizer.name={name}"]
        done = rotorch(tmp_path / "log", "train", run_toml, *settings)
        assert (done.code, done.stderr) == (0, "")
        told = json.loads(said.read_text())
        counted[name] = told["ranks"][0]["optimizer_bytes"]
        assert ("optimizer: at least so much" in done.stdout) == told["optimizer_at_least"] == (name == "muon")
        gradients = told["ranks"][0]["gradients_bytes"]
    assert counted["adamw"] > 2 * gradients
    assert counted == {**counted, "lion": gradients, "sgd": 0, "muon": gradients}

"""`rotorch train` with another optimizer than AdamW: from the run's file to a resumed run under another layout."""

import json
from pathlib import Path

import pytest
from commands import rotorch, write_run

from rotorch.train.metrics import read_metrics


class Watch:
    """A callback, named by its import path in a run's file."""

    def __init__(self, run):
        self.path = Path(run.directory) / "watched.txt"

    def on_step(self, record):
        with self.path.open("a") as file:
            file.write(f"{record.step}\n")


def losses(directory):
    return [line["loss"] for line in read_metrics(directory)]


@pytest.mark.parametrize("name", ["muon", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_run_goes_on_under_another_layout(tmp_path, warm, name):
    run_toml = write_run(tmp_path)
    with run_toml.open("a") as file:
        file.write('[[optimizer.groups]]\nmatch = "*embed_tokens*"\nlr = 1e-3\n')
    settings = [f"optimizer.name={name}", "train.checkpoint_every=3", "train.global_batch=4"]
    settings.append(f'train.callbacks=["{__name__}.Watch"]')
    whole = rotorch(
        tmp_path / "log", "train", run_toml, *settings, "--parallel", "single", "train.micro_batch=4",
        f"train.out={tmp_path / 'whole'}",
    )  # fmt: skip
    assert whole.code == 0, whole.stderr
    out = f"train.out={tmp_path / 'parts'}"
    first = rotorch(tmp_path / "log", "train", run_toml, *settings, "--parallel", "rtp=3", out, "train.micro_batch=1")
    assert first.code == 2 and "global_batch" in first.stderr
    first = rotorch(tmp_path / "log", "train", run_toml, *settings, "--parallel", "rtp=2", out)
    assert first.code == 0, first.stderr
    (tmp_path / "parts" / "checkpoints" / "step-00000006").rename(tmp_path / "gone")
    resumed = rotorch(tmp_path / "log", "train", run_toml, *settings, "--parallel", "fsdp=2", out, "--resume")
    assert resumed.code == 0, resumed.stderr
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=3e-4)
    assert (tmp_path / "parts" / "watched.txt").read_text().split() == [*"123456", *"456"]
    shown = rotorch(tmp_path / "log", "inspect", tmp_path / "parts", "--json", tmp_path / "shown.json")
    assert shown.code == 0 and json.loads((tmp_path / "shown.json").read_text())["step"] == 6


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, warm):
    run_toml = write_run(tmp_path)
    for setting, said in {
        "optimizer.name=adam": "optimizer.name = 'adam' is unknown",
        "optimizer.arguments.momentum=0.9": "adamw takes no 'momentum'",
        'train.callbacks=["no_such.Callback"]': "cannot be imported",
        'train.loggers=["neptune"]': "train.loggers",
    }.items():
        done = rotorch(tmp_path / "log", "train", run_toml, setting)
        assert done.code == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()

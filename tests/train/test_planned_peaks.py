"""Planned peaks of ranks stand beside measured ones when a run has ended."""

import json
import os
import re

import pytest
import torch
from commands import rotorch, write_run

from rotorch.core.quantities import format_bytes
from rotorch.testing.ranks import run_ranks
from rotorch.train import run
from rotorch.train.checks import planned_peaks
from rotorch.train.checks.memory import PeakMeter, forget_peak
from rotorch.train.checks.planned_peaks import PlannedPeaks
from rotorch.train.events import EVENTS


@pytest.fixture
def at_once(monkeypatch):
    """Every run is long enough to be counted."""
    monkeypatch.setattr(run, "LEAST_S", 0.0)


def ended(run_directory):
    lines = (run_directory / EVENTS).read_text().splitlines()
    return next(event for event in map(json.loads, lines) if event["event"] == "ended")


MARKS = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel sets no mark back here")


@MARKS
@pytest.mark.parametrize("layout", ["rtp=2", "pp=2"])
def test_a_run_ends_with_its_plan_beside_what_its_ranks_took(tmp_path, warm, at_once, layout):
    run_toml, said, summary = write_run(tmp_path), tmp_path / "said.json", tmp_path / "summary.json"
    settings = [f"--parallel={layout}", "train.steps=2", "model.config.num_hidden_layers=2"]
    assert rotorch(tmp_path / "log", "train", run_toml, *settings, "--dry-run", "--json", said).code == 0
    done = rotorch(tmp_path / "log", "train", run_toml, *settings, "--json", summary)
    assert (done.code, done.stderr) == (0, "")
    counted = [sum(rank.values()) for rank in json.loads(said.read_text())["highest"]]
    found = json.loads(summary.read_text())["planned"]
    assert found["planned_bytes"] == pytest.approx(counted, abs=8) and not found["on_gpus"]
    assert len(found["measured_bytes"]) == 2 and found == ended(tmp_path / "run")["planned"]
    # A process takes the tensors of a step beside what it had, and less than it has as a whole.
    peaks = ended(tmp_path / "run")["peaks"]
    for planned, measured, whole in zip(found["planned_bytes"], found["measured_bytes"], peaks, strict=True):
        assert planned < measured < whole
    planned = format_bytes(max(found["planned_bytes"]))
    assert re.search(
        rf"^planned     {re.escape(planned)} of tensors at the highest moment of a step; the process took [\d.]+ MiB "
        r"more than before there was a model$",
        done.stdout,
        re.MULTILINE,
    ), done.stdout


def test_passes_that_cannot_be_counted_are_said_to_be(tmp_path, warm, at_once, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such operator")

    monkeypatch.setattr(planned_peaks, "counted_ranks", broken)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=single", "train.steps=2")
    assert (done.code, done.stderr) == (0, "")
    assert "planned     not counted: ValueError: no such operator\n" in done.stdout


def test_a_short_run_is_not_counted(tmp_path, warm):
    summary = tmp_path / "summary.json"
    done = rotorch(
        tmp_path / "log", "train", write_run(tmp_path), "--parallel=single", "train.steps=2", "--json", summary
    )
    assert (done.code, done.stderr) == (0, "")
    assert "planned " not in done.stdout and json.loads(summary.read_text())["planned"] is None
    assert "planned" not in ended(tmp_path / "run")


def test_a_gpus_tensors_are_compared_with_planned_ones():
    on_gpus = PlannedPeaks((1 << 30, 2 << 30), (1 << 30, 3 << 30), on_gpus=True)
    assert str(on_gpus) == "2.00 GiB of tensors at the highest moment of a step; measured 3.00 GiB (+50.0%)"


def test_without_a_measure_only_the_plan_is_said():
    assert str(PlannedPeaks((1 << 30,), (), on_gpus=False)) == "1.00 GiB of tensors at the highest moment of a step"


def freed_before():
    numbers = torch.ones(16 << 20)  # 64 MiB
    del numbers
    before = forget_peak()
    return PeakMeter(torch.device("cpu")).peak_bytes() - before


@MARKS
def test_what_a_process_had_taken_before_does_not_count():
    (grown,) = run_ranks(freed_before, num_ranks=1)
    assert grown < 32 << 20

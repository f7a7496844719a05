"""The scripts that time products and models on grids of ranks: rows are right, and records say what was measured."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(name, *arguments):
        module = __import__(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        return module.main()

    return run


def test_products_are_those_of_one_process(script, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "colossalai" else find(name))
    file = tmp_path / "products.json"
    sizes = ["--hidden", "16", "--sequence", "4", "--batch", "2"]
    assert script("grids", "--depth", "1", "--rounds", "2", *sizes, "--json", str(file)) == 0
    shared, messages, theirs = json.loads(file.read_text())["rows"]
    assert max(row["error"] for row in (shared, messages, theirs)) < 1e-5
    assert shared["sent_bytes_per_rank"] == 0 < messages["sent_bytes_per_rank"]
    assert shared["weight_bytes_per_rank"] == theirs["weight_bytes_per_rank"] == 4 * 2 * 16 * 64 // 4
    assert len(shared["forward_s_all"]) == len(theirs["backward_s_all"]) == 2


def test_models_have_one_loss_and_their_times_are_recorded(script, tmp_path, warm):
    file = tmp_path / "models.json"
    layouts = ["--parallel", "summa=2x2", "--parallel", "ddp=2,megatron=2"]
    few = ["--rounds", "1", "--batch", "4", "--tokens", "8"]
    assert script("grid_models", *layouts, *few, "--json", str(file)) == 0
    grid, replicas = json.loads(file.read_text())["rows"]
    assert grid["loss"] == pytest.approx(replicas["loss"], rel=1e-5)
    assert grid["step_s_median"] > grid["forward_s_median"] > 0
    assert set(replicas["first_is_faster_by"]) == {"forward_s", "backward_s", "step_s"}
    assert grid["sent_bytes_per_rank"] < replicas["sent_bytes_per_rank"]

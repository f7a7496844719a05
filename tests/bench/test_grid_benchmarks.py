"""The scripts that time products and models on grids of ranks: rows are right, and records say what was measured."""

import json
import sys
from pathlib import Path

import pytest
import torch
from bench_cases import assert_origin

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
    peers = ("colossalai", "megatron")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in peers else find(name))
    file = tmp_path / "products.json"
    sizes = ["--hidden", "16", "--sequence", "4", "--batch", "2"]
    assert script("grids", "--depth", "1", "--rounds", "2", *sizes, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    assert_origin(record)
    shared, messages, theirs = record["rows"]
    assert max(row["error"] for row in (shared, messages, theirs)) < 1e-5
    assert shared["sent_bytes_per_rank"] == 0 < messages["sent_bytes_per_rank"]
    assert shared["weight_bytes_per_rank"] == theirs["weight_bytes_per_rank"] == 4 * 2 * 16 * 64 // 4
    assert len(shared["forward_s_all"]) == len(theirs["backward_s_all"]) == 2


def test_megatron_core_is_held_to_one_process(script, tmp_path):
    pytest.importorskip("megatron.core.tensor_parallel")
    file = tmp_path / "products.json"
    sizes = ["--hidden", "32", "--sequence", "8", "--batch", "4"]
    assert script("grids", "--depth", "1", "--rounds", "1", *sizes, "--json", str(file)) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    whole, cut = (rows[f"megatron-core tensor parallel 4{more}"] for more in ("", ", sequence parallel"))
    assert whole["right"] and cut["right"]
    assert whole["sent_bytes_per_rank"] == rows["torch tensor parallel 4"]["sent_bytes_per_rank"] > 0


def test_a_row_with_wrong_gradients_is_marked_and_fails_the_run(script, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    peers = ("colossalai", "megatron")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in peers else find(name))
    file = tmp_path / "products.json"
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import grids

    monkeypatch.setattr(grids, "whole_gradients", lambda shape: tuple(torch.ones_like(w) for w in shape.whole()[1:3]))
    sizes = ["--hidden", "8", "--sequence", "2", "--batch", "2"]
    assert script("grids", "--depth", "1", "--rounds", "1", *sizes, "--json", str(file)) == 1
    assert not any(row["right"] or row["known_wrong"] for row in json.loads(file.read_text())["rows"])


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


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import grid_table

    return grid_table


def test_the_paper_s_formulas_are_what_blocks_send(table):
    for row in table.paper_rows(size=64):
        p, q, d = row["p"], row["q"], row["d"]
        if row["kind"] == "1-D":
            assert row["sent"] == row["paper"] == 2 * (p - 1) / p
        else:
            assert row["sent"] == pytest.approx(3 * (q - 1) * (d + 1) / (d * q) / q, rel=1e-12)
            assert row["paper"] == pytest.approx(q * row["sent"], rel=1e-12)
            assert row["gradients_over_depth"] == pytest.approx(2 * (d - 1) / (d * q * q), rel=1e-12)


def test_a_table_has_the_layouts_bytes_by_axis_and_what_was_counted(table, warm):
    import rotorch
    from rotorch.models.describe import describe
    from rotorch.models.hf import causal_lm, config_from_dict

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 16}
    model = {**table.MODEL, **sizes, "num_hidden_layers": 1}
    with rotorch.on_meta():
        spec = describe(causal_lm(config_from_dict(model, source="test")), features=True)
    rows = [
        table.row_of(spec, parallel, model=model, rows=16, tokens=8)
        for parallel in ("megatron=16", "tesseract=2x2x4", "atp=4x4")  # one process as one of them
    ]
    for row in rows:
        said, found = row["messages"]["layout"], row["messages"]["measured"]
        assert said["sent"] == found["sent"], row["parallel"]
        assert said["weights"] == found["weights"] < found["peak"]
    assert {name.split()[1] for name in rows[1]["messages"]["measured"]["sent"]} == {"depth", "row", "col"}
    atp = table.atp_rows(spec, ["atp=2x4"])
    assert (atp[0]["first"], atp[0]["second"]) == (4 / 4, 12 / 2)
    record = {"shape": model, "rows": 16, "tokens": 8, "layouts": rows, "paper": table.paper_rows(), "atp": atp}
    text = table.to_markdown(record)
    assert text.count("| = |") >= 3 + sum(len(row["messages"]["layout"]["sent"]) for row in rows)

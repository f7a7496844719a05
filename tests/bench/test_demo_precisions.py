"""Held-out loss of the demo in each precision: the committed record, and the program that makes it."""

import importlib
import json
import statistics
from pathlib import Path

import pytest

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "demo-precisions.json"


def test_bfloat16_trains_the_demo_as_far_as_float32():
    record = json.loads(RECORD.read_text())
    full, half = (
        [row for row in record["rows"] if row["precision"] == precision] for precision in ("float32", "bfloat16")
    )
    assert [row["seed"] for row in full] == [row["seed"] for row in half] == [0, 1, 2]
    assert {row["steps"] for row in record["rows"]} == {300}
    means = [statistics.mean(row["held_out_bits_per_byte"] for row in rows) for rows in (full, half)]
    assert means[1] == pytest.approx(means[0], abs=0.02)


@pytest.mark.slow
def test_the_program_runs_each_and_writes_them_down(benchmarks, tmp_path, monkeypatch, capsys):
    program = importlib.import_module("demo_precisions")
    out = tmp_path / "results" / "record.json"
    assert program.main(["--steps", "21", "--only", "float32", "--seeds", "3", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["seed"] == 3 and row["steps"] == 21 and 2 < row["held_out_bits_per_byte"] < 8
    assert "float32, seed 3: " in capsys.readouterr().out

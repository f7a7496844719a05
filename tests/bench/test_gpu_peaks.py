"""Peaks of a rank beside FSDP2, and with one long sequence: the programs on a tiny model, and their records."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_peaks(benchmarks):
    return importlib.import_module("gpu_peaks")


@pytest.fixture
def long_peaks(benchmarks):
    return importlib.import_module("long_peaks")


def test_a_row_is_measured_in_this_process(gpu_peaks, capsys):
    parallel = f"rtp={gpu_peaks.NUM_RANKS}[transport=send_receive,recompute=slice]"
    arguments = ["--tiny", "--layers", "2", "--tokens", "64", "--row", parallel, "block"]
    assert gpu_peaks.main(arguments) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["parallel"] == parallel and 0 < row["activations_bytes"] < row["peak_bytes"]
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_rows_are_compared_with_the_smaller_peer(gpu_peaks, tmp_path):
    out = tmp_path / "peaks.json"
    assert gpu_peaks.main(["--tiny", "--layers", "2", "--tokens", "64", "--only", "none", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    least = min(row["peak_bytes"] for row in rows if row["parallel"].startswith("fsdp2"))
    assert len(rows) == 4
    assert all(row["of_fsdp2"] == pytest.approx(row["peak_bytes"] / least) for row in rows)


def test_the_page_has_the_figures_of_the_records():
    page = (ROOT / "docs/speed.md").read_text()
    records = [
        json.loads((ROOT / f"benchmarks/results/gpu/peaks-{tokens}.json").read_text()) for tokens in (2048, 8192)
    ]
    assert all(record["model"]["num_hidden_layers"] == 32 for record in records)
    for rows in zip(*(record["rows"] for record in records), strict=True):
        assert " | ".join(f"{row['peak_bytes'] / 1e9:.1f} ({row['of_fsdp2']:.2f})" for row in rows) in page
    shares = [row["of_fsdp2"] for record in records for row in record["rows"] if row["parallel"].startswith("rtp")]
    assert len(shares) == 8 and max(shares) < 1.0


@pytest.mark.slow
def test_a_long_sequence_takes_less_where_ranks_share_it(long_peaks, tmp_path):
    out = tmp_path / "peaks.json"
    assert long_peaks.main(["--tiny", "--layers", "2", "--tokens", "512", "--json", str(out)]) == 0
    rows = {row["parallel"]: row["peak_bytes"] for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(long_peaks.ROWS)
    state = long_peaks.state_bytes(long_peaks.TINY, layers=2)
    assert all(state < peak < 1.5 * rows[long_peaks.TENSOR_PARALLEL] for peak in rows.values())


def test_a_long_sequence_takes_as_little_beside_tensor_parallelism_as_the_paper_says(long_peaks):
    """TSP's paper has 38.8 GB beside 85; and the page has the record's figures."""
    page = (ROOT / "docs/long_context.md").read_text()
    record = json.loads((ROOT / "benchmarks/results/gpu/peaks-long.json").read_text())
    assert record["model"] == {**long_peaks.LLAMA_2_7B, "num_hidden_layers": 32}
    rows = {row["parallel"]: row for row in record["rows"]}
    assert {row["tokens"] for row in record["rows"]} == {131072} and list(rows) == list(long_peaks.ROWS)
    beside = rows[long_peaks.TENSOR_PARALLEL]["peak_bytes"]
    for name, row in rows.items():
        assert f"| `{name}` | {row['peak_bytes'] / 1e9:.1f} GB | {row['peak_bytes'] / beside:.2f} |" in page
    assert all(rows[name]["peak_bytes"] / beside <= 38.8 / 85 for name in rows if name.startswith("tsp"))

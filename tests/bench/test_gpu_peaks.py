"""Peaks of a rank beside FSDP2 with chunked cross entropy: the program on a tiny model, and its committed record."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu_peaks(monkeypatch, warm):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_peaks

    yield gpu_peaks
    torch.set_num_threads(threads)


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

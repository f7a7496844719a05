"""CAAT-Net's experiment: bytes by fraction, the summary over seeds, the command of a run, and the record."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import caat_net  # noqa: E402


def test_a_fraction_of_the_channels_is_a_fraction_of_the_bytes_of_sums():
    """Below 1 gradients of the nine norms, which see other channels on each rank, are summed once a step."""
    whole, half, quarter = (sum(caat_net.sent_bytes(fraction).values()) for fraction in (1.0, 0.5, 0.25))
    norms = 9 * 256 * 4 * 2 * 3 // 4  # of 256 channels, over four ranks
    assert whole - (half - norms) == 2 * (half - quarter)
    assert 0.25 < quarter / whole < 0.35 and 0.5 < half / whole < 0.6


def test_the_summary_has_mean_and_range_of_each_fraction():
    rows = [
        {"fraction": fraction, "held_out_bits_per_byte": bits + 0.1 * seed}
        for fraction, bits in ((1.0, 2.0), (0.5, 3.0))
        for seed in (-1, 0, 1)
    ]
    first, second = caat_net.summary(rows)
    assert (first["mean_bits_per_byte"], second["seeds"]) == (pytest.approx(2.0), 3)
    assert (second["least_bits_per_byte"], second["most_bits_per_byte"]) == (pytest.approx(2.9), pytest.approx(3.1))


def test_a_run_that_fails_ends_all_with_its_words(monkeypatch):
    def run(command, **_):
        assert command[1:4] == ["-m", "rotorch", "train"] and "train.seed=3" in command
        return subprocess.CompletedProcess(command, 2, "", "rotorch: no room\n")

    monkeypatch.setattr(caat_net.subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"megatron=4\[sync_fraction=0.5\], seed 3: rotorch: no room"):
        caat_net.trained(0.5, seed=3)


RECORD = json.loads(caat_net.OUT.read_text())


def test_the_record_has_every_fraction_with_every_seed():
    assert {(row["fraction"], row["seed"]) for row in RECORD["rows"]} == {
        (fraction, seed) for fraction in caat_net.FRACTIONS for seed in caat_net.SEEDS
    }
    assert RECORD["summary"] == caat_net.summary(RECORD["rows"]) and RECORD["settings"] == caat_net.SETTINGS


def test_fewer_summed_channels_have_a_lower_loss():
    """docs/papers.md says so."""
    losses = {row["fraction"]: row["mean_bits_per_byte"] for row in RECORD["summary"]}
    assert losses[0.25] < losses[0.5] < losses[1.0]

"""The record of the largest micro-batch in a fixed memory: what was claimed of it, and how it is searched."""

import json
import sys
from pathlib import Path

import pytest

from rotorch.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import dawnpiper  # noqa: E402


def test_chosen_cuts_take_larger_micro_batches_than_equal_layers_in_the_same_memory():
    record = json.loads(dawnpiper.OUT.read_text("utf-8"))
    assert record["model"] == dawnpiper.MODEL and len(record["rows"]) == len(dawnpiper.LIMITS) * len(dawnpiper.ROWS)
    by_limit = {limit: [r for r in record["rows"] if r["limit_bytes"] == limit] for limit in dawnpiper.LIMITS}
    for limit, (equal, again, whole, halves) in by_limit.items():
        assert all(max(row["peaks"]) <= limit for row in (equal, again, whole, halves))
        assert halves["rows"] >= whole["rows"] >= again["rows"] >= equal["rows"]
        assert ".5" in halves["layout"] and ".5" not in whole["layout"]
    equal, *_, halves = by_limit[512 << 20]
    assert halves["rows"] >= 1.5 * equal["rows"]


def test_the_largest_micro_batch_is_found_by_halving(monkeypatch):
    tried = []

    def layout_of(text, *, rows, limit):
        if rows > 40:
            raise ConfigError("no cut")
        return text, None

    def measured(layout, *, rows):
        tried.append(rows)
        return [10 * rows, 5 * rows]

    monkeypatch.setattr(dawnpiper, "layout_of", layout_of)
    monkeypatch.setattr(dawnpiper, "measured", measured)
    monkeypatch.setattr(dawnpiper, "slowest", lambda *_: 1.0)
    found = dawnpiper.largest("pp=4", limit=270)
    assert (found["rows"], found["peaks"], found["max_by_min"]) == (27, [270, 135], pytest.approx(2))
    assert max(tried) <= 40 and len(tried) <= 6

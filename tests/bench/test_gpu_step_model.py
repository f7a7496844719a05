"""The first-order model of a step on GPUs, for a tiny model: rows that compare, and the figures that they rest on."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def record(monkeypatch, tmp_path, warm):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_step_model

    out = tmp_path / "model.json"
    assert gpu_step_model.main(["--tiny", "--tokens", "64", "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_rows_are_compared_with_fsdp_and_the_record_has_what_they_rest_on(record):
    rows = {(row["parallel"], row["links"]): row for row in record["rows"]}
    assert len(rows) == 12
    for links in ("mixed", "bfloat16"):
        peer = rows["fsdp=8", links]
        assert peer["of_fsdp"] == 1.0
        for (_, of), row in rows.items():
            if of == links:
                assert row["of_fsdp"] == pytest.approx(peer["step_s"] / row["step_s"])
    for name, _ in rows:  # half of the bytes never take longer, and a tiny model's time is the host's
        assert rows[name, "bfloat16"]["step_s"] <= 1.01 * rows[name, "mixed"]["step_s"]
    assert record["assumptions"]["flops_per_s"] == pytest.approx(0.68 * 989.4e12)
    assert {"machine", "versions", "commit", "command"} <= record.keys()

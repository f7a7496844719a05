"""The benchmark of first values, on a tiny model."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_record_has_every_number_of_threads_and_where_it_comes_from(monkeypatch, tmp_path, warm):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_values

    out = tmp_path / "values.json"
    monkeypatch.setattr(first_values.os, "sched_getaffinity", lambda _: {0, 1})
    assert first_values.main(["--tiny", "--rounds", "3", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["threads"] for row in record["rows"]] == [1, 2]
    assert all(len(row["s_all"]) == 3 and row["ns_per_element"] > 0 for row in record["rows"])
    shapes = record["model"]
    keys = shapes["num_key_value_heads"] / shapes["num_attention_heads"]
    of_layers = shapes["hidden_size"] * (3 * shapes["intermediate_size"] + 2 * (1 + keys) * shapes["hidden_size"])
    whole = shapes["num_hidden_layers"] * of_layers + 2 * shapes["vocab_size"] * shapes["hidden_size"]
    assert abs(record["elements"] / (whole / record["ranks"]) - 1) < 0.02  # and norms
    assert {"machine", "versions", "commit", "command", "date"} <= record.keys()

"""The counts that stand in for a GPU, on a tiny model: the fields of a record, and rows that differ where they must."""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ("ops", "casts", "copies", "elementwise_bytes", "lane_calls", "host_s")


@pytest.fixture(scope="module")
def record(tmp_path_factory, warm):
    """One run for all tests."""
    out, threads = tmp_path_factory.mktemp("counts") / "counts.json", torch.get_num_threads()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        import gpu_counts

        monkeypatch.setattr(gpu_counts, "SHAPES", gpu_counts.TINY)
        monkeypatch.setattr(gpu_counts, "DEPTHS", (1, 2))
        try:
            assert gpu_counts.main(["--json", str(out), "--tokens", "16", "--rounds", "1"]) == 0
        finally:
            torch.set_num_threads(threads)
    assert not torch.distributed.is_initialized()
    return json.loads(out.read_text())


def grouped(visits):
    return f"rtp=8[transport=send_receive,visits={visits}]"


@pytest.mark.slow
def test_operators_of_a_layer_fall_with_its_visits(record):
    ops = {row["parallel"]: row["ops_per_layer"] for row in record["rows"] if row["mode"] == "bfloat16"}
    eight, four, two, one = (ops[grouped(visits)] for visits in (8, 4, 2, 1))
    assert ops["rtp=8[transport=send_receive]"] > eight > four > two > one
    assert eight <= 2.5 * ops["single"]
    eight, four = (ops[f"rtp=8[transport=symmetric_memory,visits={visits}]"] for visits in (8, 4))
    assert ops["rtp=8[transport=symmetric_memory]"] > eight > four


@pytest.mark.slow
def test_a_record_has_every_row_with_every_count(record):
    assert {"machine", "versions", "commit", "command", "tokens", "sync_calls_per_step"} <= record.keys()
    rows = {(row["parallel"], row["mode"]): row for row in record["rows"]}
    assert {parallel for parallel, _ in rows} == {
        *("single", "fsdp2", "rtp=8[transport=send_receive]", "rtp=8[transport=symmetric_memory]"),
        *(grouped(visits) for visits in (8, 4, 2, 1)),
        *(f"rtp=8[transport=symmetric_memory,visits={visits}]" for visits in (8, 4)),
    }
    for parallel in {parallel for parallel, mode in rows if mode == "autocast_bfloat16"}:
        under_autocast, plain = rows[parallel, "autocast_bfloat16"], rows[parallel, "bfloat16"]
        for name in ("ops", "casts", "elementwise_bytes"):
            assert plain[f"{name}_per_layer"] < under_autocast[f"{name}_per_layer"], (parallel, name)
    for (parallel, mode), row in rows.items():
        assert {f"{name}_per_layer" for name in COUNTS} <= row.keys(), parallel
        assert row["ops_per_layer"] > 50 and row["elementwise_bytes_per_layer"] > 0, (parallel, mode)
        assert (row["lane_calls_per_layer"] > 0) == ("symmetric" in parallel)
        assert sum(row["sync_calls"].values()) <= record["sync_calls_per_step"] or parallel == "fsdp2"


@pytest.mark.parametrize("parallel", ["fsdp2", "rtp=8[transport=send_receive]"])
def test_host_time_is_measured_of_passes_in_wider_numbers(benchmarks, parallel):
    counts, seen = importlib.import_module("gpu_counts"), set()
    with counts.in_group_of(parallel):
        contender = counts.Contender(parallel, "bfloat16", shapes=counts.TINY, layers=1, tokens=8, wider=True)
        layer = contender._module.model.layers[0]
        layer.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
        contender.fill()
        contender.forward_backward()
    assert seen == {torch.float32}
    assert {parameter.dtype for parameter in contender._module.parameters()} == {torch.float64}


def test_the_committed_record_is_within_what_was_asked():
    """Over symmetric memory, in as many visits as by default between GPUs, and in half as many."""
    record = json.loads((ROOT / "benchmarks/results/gpu/counts.json").read_text())
    rows = {row["parallel"]: row for row in record["rows"] if row["mode"] == "bfloat16"}

    def of(name, row, beside):
        return row[f"{name}_per_layer"] / rows[beside][f"{name}_per_layer"]

    def moved(row):
        return row["casts_per_layer"] + row["copies_per_layer"]

    for row in (rows[f"rtp=8[transport=symmetric_memory,visits={g}]"] for g in (4, 8)):
        assert of("ops", row, "single") <= 2.5
        assert of("elementwise_bytes", row, "fsdp2") <= 1.15
        assert moved(row) <= 1.2 * moved(rows["fsdp2"])
        assert of("host_s", row, "fsdp2") <= 2.5

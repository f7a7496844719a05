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
    assert len(rows) == 18
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


def test_the_page_has_the_figures_of_the_record():
    record = json.loads((ROOT / "benchmarks/results/gpu/step-model.json").read_text())
    rows = {(row["parallel"], row["tokens"]): row for row in record["rows"] if row["links"] == "mixed"}
    page = (ROOT / "docs/speed.md").read_text()
    over = "rtp=8[recompute=none,transport={},visits={}]".format
    shown = {"`fsdp=8`": "fsdp=8"}
    shown |= {f"`rtp=8[visits={g}]`": over("symmetric_memory", g) for g in (8, 4, 2, 1)}
    shown |= {f"`visits={g}`, by messages": over("send_receive", g) for g in (8, 4, 2, 1)}
    for head, layout in shown.items():
        cells = [rows[layout, tokens] for tokens in (2048, 4096, 8192)]
        line = " | ".join(f"{1e3 * row['step_s']:.0f} ({row['of_fsdp']:.3f})" for row in cells)
        assert f"| {head} | {line} |" in page
    shares = [[rows[over("symmetric_memory", g), t]["of_fsdp"] for t in (2048, 4096, 8192)] for g in (8, 4)]
    page = page.replace("\n", " ")
    (_, at_4k, at_8k), (_, fewer_at_4k, fewer_at_8k) = shares
    assert min(at_4k, at_8k, fewer_at_4k, fewer_at_8k) >= 0.95
    assert f"reaches it at both ({at_4k:.3f} and {at_8k:.3f})" in page
    assert f"slots twice as large ({fewer_at_4k:.3f} and {fewer_at_8k:.3f})" in page
    peer, default = (
        [rows[layout, tokens] for tokens in (4096, 8192)] for layout in ("fsdp=8", over("symmetric_memory", 8))
    )
    assert f"{1e3 * peer[0]['copies_s']:.0f} ms of FSDP2's steps are copies" in page
    assert f"{1e3 * default[0]['copies_s']:.0f} ms of the default's are sums" in page
    without = [
        (a["step_s"] - a["copies_s"]) / (b["step_s"] - b["copies_s"]) for a, b in zip(peer, default, strict=True)
    ]
    assert "0.{:.0f} of FSDP2 at 4,096 tokens, and at 0.{:.0f} at 8,192".format(*(1e3 * of for of in without)) in page
    counted = {
        row["parallel"]: row["elementwise_bytes_per_layer"] * record["model"]["num_hidden_layers"]
        for row in json.loads((ROOT / "benchmarks/results/gpu/counts.json").read_text())["rows"]
        if row["mode"] == "bfloat16"
    }
    less = [
        1e3 * (counted["fsdp2"] - counted[f"rtp=8[transport={t},visits=8]"]) / record["assumptions"]["bytes_per_s"]
        for t in ("symmetric_memory", "send_receive")
    ]
    assert "{:.0f} ms less than FSDP2's by default, and {:.0f} ms less by messages".format(*less) in page

"""Tesseract's experiment: formulas against Layouts, phases of a step, ratios and crossings, the record."""

import json
import sys
from pathlib import Path

import pytest

from rotorch.bench.contender import build
from rotorch.bench.rank import StepTime
from rotorch.core.traffic import MicroBatch
from rotorch.models.describe import describe
from rotorch.planner.prediction import predict
from rotorch.shard.materialize import on_meta
from rotorch.strategies import batch_ranks, parse_parallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import tesseract  # noqa: E402

FORMULAS = {
    tesseract.ONE_D: lambda tokens: tesseract.one_d_bytes(num_ranks=8, tokens=tokens),
    tesseract.TWO_D: lambda tokens: tesseract.grid_bytes(side=2, depth=2, tokens=tokens),  # replicas are a depth
    tesseract.TWO_AND_A_HALF_D: lambda tokens: tesseract.grid_bytes(side=2, depth=2, tokens=tokens),
}


def test_formulas_cross_where_the_page_says():
    """7 T D of 1-D are 21 / 8 T D + 12 D^2 of 2.5-D."""
    assert tesseract.crossing_by_formula() == pytest.approx(12 / (7 - 21 / 8))


def test_phases_are_those_of_the_slowest_rank_and_the_first_step_is_not_timed():
    def rank(late):
        first = [StepTime(0, 9, 9, 1.0, 5)] * tesseract.WARM_UP_STEPS
        return [*first, StepTime(20, 29 + late, 40, 1.0, 23 + late)]

    assert tesseract.phases_of([rank(0), rank(2)]) == {
        "forward_s_all": [5], "backward_s_all": [6], "step_s_all": [11]
    }  # fmt: skip


def rows(*figures):
    """Rows of 1-D and 2.5-D: (tokens per feature, seconds of 1-D, of 2.5-D)."""
    for size, *seconds in figures:
        for name, step_s in zip((tesseract.ONE_D, tesseract.TWO_AND_A_HALF_D), seconds, strict=True):
            same = dict.fromkeys(("forward_s", "backward_s", "step_s", "sent_bytes", "wire_bytes"), step_s)
            yield {"parallel": name, "tokens_per_feature": size, "ratio": 1.0, **same}


def test_ratios_and_crossings_are_of_rows_of_one_size():
    found = list(rows((1.0, 4.0, 6.0), (2.0, 8.0, 4.0)))
    first, second = tesseract.ratios(found)
    assert (first["against"], first["tokens_per_feature"], second["faster_by"]["step_s"]) == (tesseract.ONE_D, 1.0, 2.0)
    assert tesseract.crossings(found)["step_s"] == pytest.approx(1 + 1 / 3)
    wrong = [{**row, "invalid": "loss"} for row in found]
    assert tesseract.ratios(wrong) == []


def test_it_is_skipped_with_the_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tesseract, "why_no_hosts", lambda: "there is no tc")
    assert tesseract.main(["--record", str(tmp_path / "record.json")]) == 0
    assert "tesseract: skipped: there is no tc" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_a_wrong_row_is_said(monkeypatch, tmp_path):
    def strong():
        yield from rows((1.0, 4.0, 6.0), (2.0, 8.0, 4.0))

    def weak():
        yield {"parallel": tesseract.ONE_D, "invalid": "loss"}

    monkeypatch.setattr(tesseract, "why_no_hosts", lambda: "")
    monkeypatch.setattr(tesseract, "PARTS", {"strong": strong, "weak": weak})
    file = tmp_path / "record.json"
    assert tesseract.main(["--record", str(file)]) == 1
    record = json.loads(file.read_text())
    assert len(record["strong"]) == 4 and len(record["ratios"]) == 2 and len(record["weak"]) == 1
    assert {"commit", "date", "versions", "machine", "command", "load_average_after"} <= record.keys()


@pytest.mark.parametrize("parallel", FORMULAS)
def test_formulas_are_what_layouts_send_and_little_less(parallel):
    """Layouts have norms, the embedding and the head beside what the formulas count."""
    task = tesseract.task_of(num_ranks=8, tokens=5 * tesseract.WIDTH)
    with on_meta():
        spec = describe(build(task), features=True)
    strategies = parse_parallel(parallel)
    batch = MicroBatch(8 // batch_ranks(strategies), task.sequence_length)
    sent = sum(predict(spec, strategies=strategies, rank=0, batch=batch).sent_bytes.values())
    assert 1 <= sent / FORMULAS[parallel](5 * tesseract.WIDTH) < 1.3


RECORD = json.loads(tesseract.OUT.read_text())


def test_the_record_has_every_row_and_right_losses():
    places = [(name, size, ratio) for size, of in tesseract.SIZES.items() for name in tesseract.STRONG for ratio in of]
    assert [(row["parallel"], row["tokens_per_feature"], row["ratio"]) for row in RECORD["strong"]] == places
    assert [(row["hosts"], row["parallel"]) for row in RECORD["weak"]] == [
        (hosts, name) for hosts, names in tesseract.WEAK.items() for name in names
    ]
    assert not any("invalid" in row for part in tesseract.PARTS for row in RECORD[part])
    assert RECORD["crossings"] == tesseract.crossings(RECORD["strong"])
    assert RECORD["ratios"] == tesseract.ratios(RECORD["strong"])


def test_words_of_the_page_are_true_of_the_record():
    """docs/papers.md; whoever measures anew rewrites those that became wrong."""
    found = [row for row in RECORD["ratios"] if row["against"] == tesseract.ONE_D]
    forward = [row["faster_by"]["forward_s"] for row in found]
    steps = [row["faster_by"]["step_s"] for row in found if row["tokens_per_feature"] >= 5]
    said = [f"{ratio:.2f}" for ratio in (min(forward), max(forward), min(steps), max(steps))]
    words = "Forward is {} to {} times as fast, a whole step with five tokens per feature or more {} to {} times"
    assert words.format(*said) in (ROOT / "docs" / "papers.md").read_text()
    assert RECORD["crossings"]["step_s"] < RECORD["crossings"]["sent_bytes"]
    weak = {(row["hosts"], row["parallel"][:4]): row["step_s"] for row in RECORD["weak"]}
    assert round(weak[8, "mega"] / weak[4, "mega"], 1) == 1.5  # half as long again
    assert round(100 * (weak[8, "tess"] / weak[4, "tess"] - 1)) == 6
    slow_links = next(row for row in found if (row["tokens_per_feature"], row["ratio"]) == (5, 0.5))
    assert round(slow_links["faster_by"]["backward_s"], 1) == 1.0  # as slow as 1-D's

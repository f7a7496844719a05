"""The benchmark of saving: what it measures of both sides, and the table of it in docs/checkpoints.md."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "checkpoints.md"
RESULT = ROOT / "benchmarks" / "results" / "saving-135m-4ranks.json"


@pytest.fixture
def saving(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import saving

    return saving


@pytest.mark.slow  # a trial of the script on a small model; what it measures is tested where it is
def test_both_sides_are_measured(saving, tmp_path, monkeypatch, warm):
    file = tmp_path / "saving.json"
    few = ["--layers", "1", "--tokens", "4", "--rounds", "1", "--parallel", "fsdp=2", "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["saving.py", *few, "--json", str(file)])
    assert saving.main() == 0
    found = json.loads(file.read_text())
    ours, theirs = found["rows"]
    assert ours["written_bytes"] == pytest.approx(3 * 4 * found["num_parameters"], rel=0.01)
    assert theirs["written_bytes"] == pytest.approx(ours["written_bytes"], rel=0.01)
    assert ours["save_extra_bytes_per_rank"] < 64 << 20  # a buffer
    assert ours["async_extra_bytes_per_rank"] > ours["written_bytes"] / 2.5  # a copy of what a rank has
    assert min(ours["save_s_median"], theirs["save_s_median"], found["step_s_median"], found["copy_s_median"]) > 0


def test_the_page_has_its_figures(saving, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "train"))
    import checkpoint_page

    text = saving.table(json.loads(RESULT.read_text()))
    checkpoint_page.write("saving", text)
    assert checkpoint_page.section("saving") == text, "docs/checkpoints.md: run make checkpoints"


def test_the_words_beside_them_are_true():
    ours, theirs = json.loads(RESULT.read_text())["rows"]
    assert ours["async_call_beyond_copy_of_step"] < 0.05
    for what in ("async_call_s_median", "async_step_longer_of_step"):
        assert ours[what] < theirs[what], what
    said = re.search(r"a save takes ([\d.]+) times as long as DCP's", PAGE.read_text())
    assert said[1] == f"{ours['save_s_median'] / theirs['save_s_median']:.2f}"

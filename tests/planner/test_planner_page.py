"""Figures of docs/planner.md, held to the records that they are quoted from."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "planner.md").read_text("utf-8").replace("\n", " ")


def record(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def percent(value):
    return f"{100 * value:.1f} %"


@pytest.mark.parametrize(
    ("begins", "found"),
    [
        ("| 720 of 2 and 4 GPUs |", lambda r: r["errors"]["single_2_4gpus.csv"]),
        ("| 54 of 64 to 512 GPUs |", lambda r: r["errors"]["multi_half.csv"]),
        ("| half of the 720, at random |", lambda r: r["left_out"]["file 1"]),
        ("| half of the 54 |", lambda r: r["left_out"]["file 2"]),
        ("| 480 of 4 GPUs |", lambda r: r["left_out"]["4 GPUs"]),
    ],
)
def test_errors_of_public_measurements_are_the_records(begins, found):
    errors = found(record("planner-truth.json"))
    row = PAGE[PAGE.index(begins) :].split("|")
    assert [cell.strip() for cell in row[3:6]] == [percent(errors[key]) for key in ("mean", "median", "p90")]


def test_errors_of_published_tables_are_the_records():
    papers = record("planner-papers.json")
    found, predicted = papers["korthikanti"]["all"], papers["korthikanti"]["predicted"]
    text = re.search(r"over all eight rows is (.*?) in the mean and (.*?) at most; .*? it is (.*?) in the mean", PAGE)
    assert text.groups() == (percent(found["mean"]), percent(found["max"]), percent(predicted["mean"]))
    text = re.search(r"correlation is ([\d.]+), and ([\d.]+) without", PAGE)
    assert text.groups() == tuple(
        f"{papers['tesseract'][key]:.2f}" for key in ("spearman", "spearman_without_depth_sums")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [("planner-bench.json", r"over (\d+) rows"), ("planner-compositions.json", r"over (\d+) layouts of one model")],
)
def test_errors_of_peaks_are_the_records(name, said):
    errors = [abs(row["error"]) for row in record(name)["rows"]]
    text = re.search(said + r" the error is ([\d.]+) % in the mean, ([\d.]+) % at\s+most", PAGE)
    mean = 100 * sum(errors) / len(errors)
    assert text.groups() == (str(len(errors)), f"{mean:.2f}", f"{100 * max(errors):.1f}")


def test_orders_of_layouts_are_the_record_s():
    orders = record("planner-bench.json")["orders"]
    taus, regrets = [order["tau"] for order in orders], sorted(order["regret"] for order in orders)
    text = re.search(r"Kendall's tau is ([\d.]+) to ([\d.]+), ([\d.]+) in the\s+mean", PAGE)
    assert text.groups() == (f"{min(taus):.1f}", f"{max(taus):.1f}", f"{sum(taus) / len(taus):.2f}")
    assert len(orders) == 10 and all(8 <= order["rows"] <= 10 for order in orders)
    slower = [f"{100 * regret:.1f}" for regret in regrets if regret > 0.05]
    assert "in five, and {}, {}, {}, {} and {} % slower in the others".format(*slower) in PAGE
    rows = record("planner-bench.json")["rows"]
    longer = [row["measured_s"] / row["predicted_s"] for row in rows]
    assert f"Seconds take {min(longer):.1f} to {max(longer):.1f} times as long" in PAGE


def test_what_is_said_of_single_rows_is_the_record_s():
    rows = record("planner-bench.json")["rows"]
    errors = sorted(abs(row["error"]) for row in rows)
    assert f"{100 * errors[len(errors) // 2]:.2f} % in the median" in PAGE
    worst = [row for row in rows if abs(row["error"]) > 0.0138]
    assert f"{len(rows) - len(worst)} rows are within 1.38 %" in PAGE and len(worst) == 6
    gathered = [row for row in worst if row["parallel"].startswith("fsdp=2")]
    assert len(gathered) == 5 and all(row["rows"] * row["tokens"] == 128 and row["error"] < 0 for row in gathered)
    sizes = sorted(abs(row["error"]) for row in gathered)
    assert f"({100 * sizes[0]:.1f} to {100 * sizes[-1]:.1f} % too low)" in PAGE
    (other,) = (row for row in worst if row not in gathered)
    assert other["parallel"] == "ep=2" and f"`ep=2`, {-100 * other['error']:.1f} %" in PAGE
    longer = [row for row in rows if row["parallel"].startswith("fsdp=2") and row["rows"] * row["tokens"] == 512]
    assert max(abs(row["error"]) for row in longer) < 0.0001

"""ZeroPP's experiments: formulas against tables, the crossing, the record, and a row of real ranks."""

import json
import sys
from pathlib import Path

import pytest

from rotorch.bench.rank import StepTime, load_code
from rotorch.bench.ranks import RowRanks
from rotorch.pipelining.actions import Action, ActionKind
from rotorch.pipelining.baselines import BASELINES
from rotorch.pipelining.simulate import simulate
from rotorch.strategies import parse_parallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import zeropp  # noqa: E402

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
TABLES = [parse_parallel(name)[0].table(zeropp.BUBBLES_MICRO_BATCHES) for name in zeropp.SCHEDULES]


def test_every_schedule_of_the_project_is_measured():
    assert {table.name for table in TABLES} == {*BASELINES, "zeropp"}
    assert all(table.num_ranks == zeropp.RANKS for table in TABLES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name}-{table.num_chunks}")
def test_formulas_are_those_of_the_tables(table):
    """But for ZBV's, which counts no rank's wait for the others to begin and to end."""
    simulated, formula = simulate(table).bubble_ratio, zeropp.formula(table)
    if table.name == "zbv":
        assert formula == 0 < simulated
    else:
        assert formula == pytest.approx(simulated)


def test_costs_are_seconds_of_each_stage_on_the_device():
    rank0 = [(Action(F, 0, 0), 10), (Action(F, 0, 1), 30), (Action(B, 0, 0), 50), (Action(B, 0, 1), 50)]
    rank1 = [(Action(F, 1, 0), 20), (Action(I, 1, 0), 30), (Action(W, 1, 0), 40)]
    first, second = zeropp.costs_of([rank0, rank1], num_stages=2, flops_per_s=10.0)
    assert (first.forward_s, first.duration_s(B)) == (2.0, 5.0)
    assert [second.duration_s(kind) for kind in (F, I, W)] == [2.0, 3.0, 4.0]


def test_a_step_lasts_until_all_gradients_are_complete_and_the_first_one_is_not_timed():
    def rank(late):
        return [StepTime(0, 99, 100, 1.0), StepTime(200 + late, 203 + late, 250, 1.0)]

    assert zeropp.seconds_of([rank(0), rank(2)]) == [5]


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ({1: 10, 2: 10, 4: 10}, {1: 4, 2: 8, 4: 16}, 2.5),
        ({1: 10, 2: 10}, {1: 4, 2: 10}, 2),
        ({1: 10, 2: 10}, {1: 4, 2: 8}, None),  # not yet
        ({1: 1, 2: 1}, {1: 4, 2: 8}, None),  # already before
        ({1: 10, 2: 10}, {1: 4, 3: 18}, None),  # one size in common
    ],
)
def test_the_crossing_lies_between_two_sizes(ours, theirs, found):
    assert zeropp.crossing(ours, theirs) == (found if found is None else pytest.approx(found))


def test_the_count_by_formula_crosses_at_the_papers_condition_with_as_many_rows_a_rank():
    """At the same global batch ranks under tensor parallelism pass `SHARDS` times as many rows."""
    at = {}
    for tokens in zeropp.BUSY_S:
        task = zeropp.task_of(layers=zeropp.LAYERS, tokens=tokens, micro_batches=zeropp.MICRO_BATCHES)
        sent = zeropp.bytes_by_formula(task)
        at[zeropp.condition_of(task)["of_condition"]] = sent[zeropp.THREE_D] / sent[zeropp.ZEROPP]
    assert at == {size: pytest.approx(zeropp.SHARDS * size) for size in at}
    assert min(at) < 1 / zeropp.SHARDS < 1 < max(at)  # the sweep passes both


def test_parts_are_kept_and_go_on_where_they_were(tmp_path, monkeypatch, capsys):
    ran = []

    def part(name):
        def rows(done):
            for number in range(len(done), 2):
                ran.append((name, number))
                yield {"parallel": f"row {number}"} | ({"invalid": "loss"} if name == "again" else {})

        return rows

    monkeypatch.setattr(zeropp, "PARTS", {name: part(name) for name in zeropp.PARTS})
    monkeypatch.setattr(zeropp, "why_no_hosts", lambda: "there is no tc")
    file = tmp_path / "record.json"
    assert zeropp.main(["--only", "bubbles", "sizes", "--record", str(file)]) == 0
    assert ran == [("bubbles", 0), ("bubbles", 1)]
    assert "sizes: left out: there is no tc" in capsys.readouterr().out
    file.write_text(json.dumps({**json.loads(file.read_text()), "bubbles": [{"parallel": "row 0"}]}))
    ran.clear()
    assert zeropp.main(["--only", "bubbles", "again", "--go-on", "--record", str(file)]) == 1  # losses are wrong
    assert ran == [("bubbles", 1), ("again", 0), ("again", 1)]
    record = json.loads(file.read_text())
    assert [row["parallel"] for row in record["bubbles"]] == ["row 0", "row 1"]
    assert {"commit", "date", "versions", "machine", "command", "ranks"} <= record.keys()


def test_products_of_a_real_pipeline_are_counted_by_computation(warm):
    task = zeropp.task_of(layers=2, tokens=8, micro_batches=2)
    load_code(task)
    ranks = RowRanks(task, row="zeropp=2x2", num_ranks=zeropp.RANKS)
    try:
        ranks.ask("build")
        computed = ranks.ask("action_flops")
        flops = ranks.ask("product_flops")
    finally:
        ranks.close()
    assert [sum(count for _, count in of_rank) for of_rank in computed] == flops  # no product is outside of an action
    assert {action.kind for action, _ in computed[0]} == {F, I, W}
    (first, *_) = zeropp.costs_of(computed, num_stages=2, flops_per_s=1.0)
    matrices = 2 * 12 * zeropp.WIDTH**2 * 8 * 2  # of one layer: two FLOPs a weight and token, of two rows
    assert first.backward_weight_s == matrices
    assert matrices < first.forward_s < first.backward_input_s < 1.1 * matrices  # with attention's


RECORD = json.loads(zeropp.OUT.read_text())
ROWS = {(row["parallel"], row["of_condition"]): row for row in RECORD["sizes"]}
SIZES = sorted({size for _, size in ROWS})


def ratios(key, first, second):
    """By size: a figure of one layout in terms of another's."""
    return {size: ROWS[first, size][key] / ROWS[second, size][key] for size in SIZES}


def test_the_record_has_every_row_and_right_losses():
    assert [row["parallel"] for row in RECORD["bubbles"]] == list(zeropp.SCHEDULES)
    assert [(row["parallel"], row["tokens"]) for row in RECORD["sizes"]] == [
        (name, tokens) for tokens in zeropp.BUSY_S for name in zeropp.ROWS
    ]
    assert not any("invalid" in row for part in zeropp.PARTS for row in RECORD[part])
    assert RECORD["crossings"] == zeropp.crossings(RECORD["sizes"])
    assert json.loads(json.dumps(zeropp.constants())).items() <= RECORD.items()


def test_bubbles_are_those_of_the_tables_as_the_page_says():
    """Within two points, and the difference is host time: about half as much at half the rate."""
    off = {row["parallel"]: row["bubble"] - row["bubble_of_table"] for row in RECORD["bubbles"]}
    assert all(0 < points < 0.02 for points in off.values()), off
    more, busy_s = zeropp.AGAIN[-1]
    (slower,) = (row for row in RECORD["again"] if row["part"] == "bubbles" and row["parallel"] == more)
    assert slower["busy_s"] == pytest.approx(busy_s)
    assert slower["bubble"] - slower["bubble_of_table"] < 0.75 * off[more]


def test_a_row_measured_twice_is_the_same():
    by_part = {row["part"]: row for row in RECORD["again"] if row["parallel"] in ("pp=4", zeropp.ZEROPP)}
    (before,) = (row for row in RECORD["bubbles"] if row["parallel"] == "pp=4")
    assert abs(by_part["bubbles"]["bubble"] - before["bubble"]) < 0.02
    before = ROWS[zeropp.ZEROPP, by_part["sizes"]["of_condition"]]
    assert by_part["sizes"]["step_s"] == pytest.approx(before["step_s"], rel=0.05)
    assert by_part["sizes"]["sent_bytes"] == before["sent_bytes"]


def test_the_meter_counts_what_the_formula_does_and_little_more():
    for row in RECORD["sizes"]:
        if row["formula_bytes"]:
            weights_or_sums = row["sent_bytes"] - row["sent_by_kind"]["send"]  # without boundaries of stages
            assert 1 <= weights_or_sums / row["formula_bytes"] < 1.15


def test_words_of_the_page_are_true_of_the_record():
    """docs/papers.md; whoever measures anew rewrites those that became wrong."""
    crossings = RECORD["crossings"]
    assert 0.35 < crossings["sent_bytes"] < 0.5  # "a little less again" than half
    assert abs(crossings["step_of_products"] - crossings["sent_bytes"]) < 0.1  # "step times cross where bytes do"
    assert crossings["peak_bytes"] is None and min(ratios("peak_bytes", zeropp.ZEROPP, zeropp.THREE_D).values()) > 1
    assert max(ratios("step_s", zeropp.ZEROPP, zeropp.PEER).values()) < 1
    of_expert = ratios("step_s", zeropp.ZEROPP, zeropp.EXPERT)
    assert of_expert[0.25] > 1 and max(ratio for size, ratio in of_expert.items() if size >= 0.5) < 1
    assert max(ratios("peak_bytes", zeropp.EXPERT, zeropp.ZEROPP).values()) < 1
    whole_step, zbv = "pp=2,fsdp=2", "pp=2[schedule=zbv],fsdp=2"
    for key in ("sent_bytes", "peak_bytes"):
        assert max(max(ratios(key, better, zeropp.ZEROPP).values()) for better in (whole_step, zbv)) < 1
    assert max(ratios("step_s", zbv, zeropp.ZEROPP).values()) < 1
    assert max(ratio for size, ratio in ratios("step_s", whole_step, zeropp.ZEROPP).items() if size < 1) < 1


def test_pages_name_the_rows_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    assert (pages.ZEROPP, pages.THREE_D) == (zeropp.ZEROPP, zeropp.THREE_D)
    del sys.modules["pages"]

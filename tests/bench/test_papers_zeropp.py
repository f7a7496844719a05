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


@pytest.fixture
def record():
    return json.loads(zeropp.OUT.read_text())

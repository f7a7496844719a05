"""Ten seeds of chaos, one of each kind of harm; `make chaos` does a hundred, on more layouts."""

import json
from dataclasses import replace

import pytest
from chaos_faults import Fault
from chaos_plan import describe, make_plan, moment
from chaos_runs import Attempt, run_plan

from rotorch.train import loop

SEEDS = range(10)


@pytest.fixture(scope="module")
def place(tmp_path_factory, warm):
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost(seed, place):
    plan = make_plan(seed)
    outcome = run_plan(plan, at=place, mounts=False)
    about = f"{plan.layout}: {describe(plan)} ({moment(plan)}): {outcome.ended}: {outcome.said}"
    assert outcome.wrong == [], about
    assert outcome.struck, about


def test_other_losses_are_noticed(tmp_path):
    plan = make_plan(0)
    attempt = Attempt(plan, tmp_path / "run.toml", fault=Fault(plan, run=tmp_path, scratch=tmp_path, own_disk=False))
    lines = [{"step": step, "loss": 2.0 - step / 10} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoints" / ".step-00000003.tmp-1").mkdir(parents=True)
    attempt.check_losses(lines)
    assert attempt.wrong == ["its last checkpoint is None", "left behind: .step-00000003.tmp-1"]
    attempt.wrong.clear()
    attempt.check_losses([*lines[:2], {"step": 3, "loss": 1.7001}, {"step": 4, "loss": 1.6}])
    assert attempt.wrong[:2] == ["its steps are [1, 2, 3]", "step 3: loss is 1.7, should be 1.7001"]


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_data_is_noticed(place, monkeypatch):
    begun_at = []

    def elsewhere(state):
        begun_at.append(state.step)
        return 1 if begun_at[0] else 0

    monkeypatch.setattr(loop, "read_ahead", elsewhere)
    outcome = run_plan(replace(make_plan(5), seed=1005, times=1), at=place, mounts=False)
    assert outcome.ended == "continued"
    assert any("loss is" in wrong for wrong in outcome.wrong), outcome

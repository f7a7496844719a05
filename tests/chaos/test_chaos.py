"""Ten seeds of chaos, one of each kind of harm; `make chaos` does a hundred, on more layouts."""

import pytest
from chaos_plan import describe, make_plan, moment
from chaos_runs import run_plan

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

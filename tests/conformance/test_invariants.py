"""Every strategy and every composition under every invariant of docs/architecture.md; no test here knows a strategy.

One fork per (layout, model) runs all invariants; each is a test of its own, so that a failure says which.
"""

from functools import cache
from itertools import pairwise

import pytest
from layouts import INPUTS_FIRST, MODELS, WHOLE_EXPERTS, cells, says_new_of_invariants, table

from rotorch.core.errors import RankFailure
from rotorch.strategies import COMPOSES, STRATEGIES, parse_parallel
from rotorch.testing.conformance import INVARIANTS, examine, make_case

PAIRS = table()


@pytest.fixture(scope="session")
def examined(warm, tiny, tmp_path_factory):
    """Returns what is wrong under a layout with a model, by invariant; each pair runs once."""

    @cache
    def case_of(model):
        return make_case(tiny(model), directory=tmp_path_factory.mktemp(model) / "case")

    @cache
    def of(layout, model):
        try:
            return examine(case_of(model), parallel=layout, scratch=tmp_path_factory.mktemp(model))
        except RankFailure as failure:
            return failure

    return of


@pytest.mark.parametrize("invariant", INVARIANTS)
@pytest.mark.parametrize(("layout", "model"), cells(PAIRS, says_new=says_new_of_invariants))
def test_invariant(examined, layout, model, invariant):
    problems = examined(layout, model)
    if isinstance(problems, RankFailure):
        pytest.fail(f"{layout} on {model}: {problems}", pytrace=False)
    if problems[invariant]:
        more = len(problems[invariant]) - 8
        text = "\n".join(problems[invariant][:8] + ([f"... and {more} more"] if more > 0 else []))
        pytest.fail(f"{layout} on {model}: {INVARIANTS[invariant].__doc__}\n{text}", pytrace=False)


def test_every_strategy_and_composition_is_in_the_table():
    layouts = [parse_parallel(layout) for layout, _ in PAIRS]
    assert {s.kind for strategies in layouts for s in strategies} == set(STRATEGIES)
    assert {(a.kind, b.kind) for strategies in layouts for a, b in pairwise(strategies)} == set(COMPOSES)
    assert {model for _, model in PAIRS} == {*MODELS, *(model for _, model in WHOLE_EXPERTS | INPUTS_FIRST)}
    assert len(PAIRS) == len(set(PAIRS))

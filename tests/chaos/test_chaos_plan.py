"""Plans of chaos: the same for a seed each time, and all that is promised among them."""

from dataclasses import replace

from chaos_plan import EVERY, LAYOUTS, OTHER_LAYOUTS, STEPS, Harm, describe, make_plan, moment, num_ranks

from rotorch.strategies import num_ranks as ranks_of
from rotorch.strategies import parse_parallel
from rotorch.strategies.resize import resized
from rotorch.train.launch.status import RankPhase


def test_a_seed_says_it_all():
    assert [make_plan(seed) for seed in range(100)] == [make_plan(seed) for seed in range(100)]
    assert (
        len({(describe(p), moment(p), p.layout, p.max_restarts, p.async_save) for p in map(make_plan, range(100))}) > 90
    )


def test_a_hundred_seeds_have_everything():
    plans = [make_plan(seed) for seed in range(100)]
    assert {p.harm for p in plans} == set(Harm)
    assert set(LAYOUTS) <= {p.layout for p in plans} <= {*LAYOUTS, *OTHER_LAYOUTS}
    assert len({p.layout for p in plans} & set(OTHER_LAYOUTS)) > 3
    assert {p.phase for p in plans} >= {"JOINING", "BUILDING", "READING", "FORWARD_BACKWARD", "EVALUATING", "SAVING"}
    assert {p.times for p in plans} == {1, 2, 3}
    for harm in Harm:
        of_kind = [p for p in plans if p.harm is harm]
        assert {bool(p.max_restarts) for p in of_kind} == ({True} if harm is Harm.FEWER else {True, False})
        assert {p.victim for p in of_kind} >= {0, 1}


def test_a_few_seeds_have_every_harm_on_two_ranks():
    plans = [make_plan(seed) for seed in (*range(10), 81, 82)]
    assert {p.harm for p in plans} == set(Harm)
    assert {num_ranks(p.layout) for p in plans} == {2}


def test_moments_come():
    for plan in map(make_plan, range(300)):
        assert plan.phase in RankPhase.__members__
        assert (plan.step < STEPS - 1 or plan.phase == "EVALUATING") and plan.victim < num_ranks(plan.layout)
        assert plan.phase != "SAVING" or plan.step % EVERY == 0
        assert num_ranks(plan.layout) == ranks_of(parse_parallel(plan.layout)) <= 4


def test_a_moment_has_a_delay_only_where_it_is_waited_for():
    plans = [replace(plan, delay_s=0.0123) for plan in map(make_plan, (*range(20), 81, 82))]
    waited = {(p.harm, p.unlinks) for p in plans if moment(p).endswith(" + 12.3 ms")}
    assert waited == {
        (h, False) for h in (Harm.KILL, Harm.KILL_IN_SAVE, Harm.STOP, Harm.MEMORY, Harm.ROT, Harm.LAUNCHER)
    }


def test_fewer_ranks_are_taken_where_there_is_such_a_layout_and_nothing_was_saved_in_between():
    for plan in (p for p in map(make_plan, range(300)) if p.harm is Harm.FEWER):
        smaller = [resized(parse_parallel(plan.layout), num_ranks=n) for n in range(1, num_ranks(plan.layout))]
        assert any(smaller), plan.layout
        assert plan.times == (2 if plan.step <= EVERY else 3) <= plan.max_restarts
        assert plan.step % EVERY != 1 and not plan.async_save

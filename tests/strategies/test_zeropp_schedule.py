import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.pipelining.actions import ActionKind
from rotorch.pipelining.baselines import make_schedule
from rotorch.pipelining.lower import lower
from rotorch.pipelining.simulate import ACTIVATIONS, GRADIENTS, WEIGHTS, StageCosts, simulate
from rotorch.pipelining.validate import validate
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule, smallest_unit

NO_LIMIT = 10**6


def peak(found, category=ACTIVATIONS):
    return max(found.peak_bytes(rank, category=category) for rank in range(found.schedule.num_ranks))


@pytest.mark.parametrize(
    ("shape", "bubble", "of_1f1b", "peak_unlimited", "peak_by_default"),
    [
        ((4, 1, 4, 16), 0.158, 0.158, 5, 5),
        ((4, 1, 7, 28), 0.034, 0.097, 10, 7),
        ((4, 2, 4, 16), 0.030, 0.158, 8.5, 8),
        ((8, 1, 15, 60), 0.037, 0.105, 18, 15),
        ((8, 2, 8, 32), 0.035, 0.179, 14.5, 14.5),
    ],
)
def test_the_derived_table_to_its_digits(shape, bubble, of_1f1b, peak_unlimited, peak_by_default):
    num_ranks, num_chunks, unit, num_micro_batches = shape
    sizes = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    found = simulate(make_zeropp_schedule(**sizes, num_chunks=num_chunks, unit=unit))
    unlimited = simulate(make_zeropp_schedule(**sizes, num_chunks=num_chunks, unit=unit, pending_units=NO_LIMIT))
    baseline = simulate(make_schedule("1f1b", **sizes))
    assert round(found.bubble_ratio, 3) == round(unlimited.bubble_ratio, 3) == bubble
    assert baseline.bubble_ratio == pytest.approx(of_1f1b, abs=6e-4)
    assert peak(unlimited) / num_chunks == peak_unlimited
    assert peak(found) / num_chunks == peak_by_default


@st.composite
def shapes(draw):
    num_ranks, num_chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    num_micro_batches = draw(st.integers(1, 24))
    return {
        "num_ranks": num_ranks,
        "num_chunks": num_chunks,
        "num_micro_batches": num_micro_batches,
        "unit": draw(st.integers(1, num_micro_batches)),
    }


@settings(max_examples=50)
@given(
    shape=shapes(),
    pending=st.sampled_from([None, 0, 1, 2, NO_LIMIT]),
    keep_adjacent=st.booleans(),
    need_weights=st.booleans(),
)
def test_it_is_valid_in_every_shape(shape, pending, keep_adjacent, need_weights):
    schedule = make_zeropp_schedule(**shape, pending_units=pending)
    full = lower(schedule, keep_adjacent=keep_adjacent, weight_gradients_need_weights=need_weights)
    validate(full, weight_gradients_need_weights=need_weights)
    if pending in (0, 1):
        most = (pending + 1) * schedule.unit * schedule.num_chunks
        assert schedule.most_in_flight == min(most, schedule.num_chunks * schedule.num_micro_batches)
    found = simulate(full, costs=StageCosts(weight_bytes=1, gradient_bytes=1))
    assert peak(found, GRADIENTS) == 1  # weight gradients go chunk by chunk, so no two chunks' are whole at once
    if not need_weights:
        assert peak(found, WEIGHTS) <= 2
    units = schedule.num_chunks * schedule.num_units
    for rank in range(schedule.num_ranks):
        assert full.count(ActionKind.UNSHARD, rank=rank) <= 2 * units
        assert full.count(ActionKind.REDUCE_GRAD, rank=rank) == units


@settings(max_examples=40)
@given(
    num_ranks=st.integers(1, 5),
    num_chunks=st.integers(1, 3),
    more=st.integers(0, 6),
    num_units=st.integers(1, 4),
    short=st.integers(0, 3),
)
def test_the_bubble_is_that_of_filling_the_pipeline(num_ranks, num_chunks, more, num_units, short):
    unit = smallest_unit(num_ranks=num_ranks, num_chunks=num_chunks) + more
    sizes = {"num_ranks": num_ranks, "num_micro_batches": num_units * unit + min(short, unit - 1)}
    found = simulate(make_zeropp_schedule(**sizes, num_chunks=num_chunks, unit=unit))
    if sizes["num_micro_batches"] % unit == 0:
        assert found.bubble_s == num_ranks - 1
    assert found.bubble_ratio <= simulate(make_schedule("1f1b", **sizes)).bubble_ratio


def test_the_order_of_a_rank_as_written_by_hand():
    schedule = make_zeropp_schedule(num_ranks=2, num_micro_batches=5, unit=3)
    first, second = (" ".join(f"{a.kind}{a.micro_batch}" for a in row) for row in schedule.rows)
    assert first == "F0 F1 F2 I0 W0 I1 W1 I2 F3 F4 W2 I3 W3 I4 W4"
    assert second == "F0 I0 F1 I1 F2 I2 W0 W1 F3 I3 F4 I4 W2 W3 W4"


def test_pending_weight_gradients_cost_memory_where_nothing_limits_them():
    def peak_after(num_units, **how):
        return peak(simulate(make_zeropp_schedule(num_ranks=4, num_micro_batches=7 * num_units, unit=7, **how)))

    assert [peak_after(n, pending_units=NO_LIMIT) for n in (4, 8)] == [10, 14]
    assert [peak_after(n) for n in (4, 8)] == [7, 7]


def test_gathers_for_two_units_of_two_chunks():
    full = lower(make_zeropp_schedule(num_ranks=2, num_chunks=2, num_micro_batches=6, unit=3))
    local = {ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD}
    assert [str(a) for a in full.rows[0] if a.kind in local][:8] == [
        "0UNSHARD",
        "0RESHARD",
        "2UNSHARD",
        "2RESHARD",
        "2UNSHARD",
        "0UNSHARD",
        "2RESHARD",
        "2REDUCE_GRAD",
    ]


def test_units_by_default():
    assert make_zeropp_schedule(num_ranks=4, num_micro_batches=28).unit == 7
    assert make_zeropp_schedule(num_ranks=4, num_micro_batches=28, num_chunks=2).unit == 4
    assert make_zeropp_schedule(num_ranks=4, num_micro_batches=3).unit == 3


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match="zeropp: a unit of 5 micro-batches, but a step has 4"):
        make_zeropp_schedule(num_ranks=2, num_micro_batches=4, unit=5)
    with pytest.raises(ConfigError, match="zeropp: chunks = 0"):
        make_zeropp_schedule(num_ranks=2, num_micro_batches=4, num_chunks=0)

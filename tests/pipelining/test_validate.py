"""Tables that are right pass; each rule finds the table that breaks it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.pipelining.actions import Action, ActionKind, Placement, Schedule, ScheduleError
from rotorch.pipelining.baselines import BASELINES, make_schedule
from rotorch.pipelining.lower import lower
from rotorch.pipelining.simulate import simulate
from rotorch.pipelining.validate import validate


@st.composite
def baselines(draw):
    name = draw(st.sampled_from(sorted(BASELINES)))
    num_ranks, num_micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    unit = draw(st.integers(1, num_micro_batches))
    num_chunks = {"zbv": 2, "looped_bfs": draw(st.integers(1, 3)), "interleaved_1f1b": draw(st.integers(1, 3))}.get(
        name, 1
    )
    if name == "interleaved_1f1b" and num_micro_batches > num_ranks:
        num_micro_batches -= num_micro_batches % num_ranks
        unit = min(unit, num_micro_batches)
    return make_schedule(
        name, num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=num_micro_batches, unit=unit
    )


@settings(max_examples=60)
@given(schedule=baselines(), keep_adjacent=st.booleans(), need_weights=st.booleans())
def test_every_baseline_is_valid_in_every_shape(schedule, keep_adjacent, need_weights):
    full = lower(schedule, keep_adjacent=keep_adjacent, weight_gradients_need_weights=need_weights)
    validate(full, weight_gradients_need_weights=need_weights)
    found = simulate(full)
    # the bound is met, so it is no larger than it need be; and static rows and simulated memory tell the same
    assert max(found.peak_bytes(rank) for rank in range(schedule.num_ranks)) == schedule.most_in_flight
    assert found.makespan_s >= found.busy_s(0) == 3 * schedule.num_chunks * schedule.num_micro_batches


def parsed(text):
    kinds = sorted(ActionKind, key=lambda kind: -len(kind))
    actions = []
    for word in text.split():
        stage, rest = word[0], word[1:]
        kind = next(kind for kind in kinds if rest.startswith(kind))
        actions.append(Action(kind, int(stage), int(rest[len(kind) :]) if rest != kind else None))
    return tuple(actions)


def two_ranks(first, second, *, num_micro_batches=1, unit=1, most_in_flight=2):
    return Schedule(
        "mine", 2, 1, num_micro_batches, unit, Placement.LOOP, most_in_flight, (parsed(first), parsed(second))
    )


FIRST = "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0RECV_B0 0B0 0RESHARD 0REDUCE_GRAD"
SECOND = "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1B0 1SEND_B0 1RESHARD 1REDUCE_GRAD"


def test_one_micro_batch_on_two_ranks_is_right():
    validate(two_ranks(FIRST, SECOND))
    validate(two_ranks(FIRST.replace("0B0", "0I0 0W0"), SECOND.replace("1B0", "1I0 1W0")))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("1F0", "0F0", r"rank 1, action 2 \(0F0\): the rank holds stages \(1,\) only"),
        ("1F0", "1F1", r"rank 1, action 2 \(1F1\): micro-batches are 0 to 0"),
        ("1F0 ", "1F0 1F0 ", r"rank 1, action 3 \(1F0\): done before"),
        ("1B0", "1B0 1W0", r"rank 1, action 6 \(1W0\): done before"),
        ("1B0", "1I0", "rank 1 never does 1W0"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", r"action 1 \(1F0\): stands before 1RECV_F0, which it needs"),
        ("1B0 1SEND_B0", "1W0 1I0 1SEND_B0", r"\(1W0\): stands before 1I0"),
        ("1B0 1SEND_B0", "1SEND_B0 1B0", r"\(1SEND_B0\): stands before 1I0"),
        ("1SEND_B0 ", "", r"rank 0, action 5 \(0RECV_B0\): rank 1 has no 1SEND_B0"),
        ("1SEND_B0", "1SEND_B0 1SEND_F0", r"\(1SEND_F0\): its other end is no stage"),
        ("1UNSHARD 1B0", "1B0", r"\(1B0\): the stage's weights are not whole"),
        ("1UNSHARD 1B0", "1UNSHARD 1UNSHARD 1B0", r"\(1UNSHARD\): the weights are whole already"),
        ("1F0 1RESHARD", "1F0 1RESHARD 1RESHARD", r"\(1RESHARD\): the weights are not whole"),
        ("1F0 1RESHARD", "1F0 1RESHARD 1UNSHARD 1RESHARD", "more than 2 gathers for each of 1 units"),
        ("1RESHARD 1REDUCE_GRAD", "1REDUCE_GRAD", r"rank 1 never reshards stages \[1\]"),
        (" 1REDUCE_GRAD", "", "rank 1 never sums the last gradients of stage 1"),
        ("1F0 ", "1F0 1REDUCE_GRAD ", r"action 3 \(1REDUCE_GRAD\): gradients of 0 of 1 micro-batches"),
    ],
)
def test_what_is_wrong_in_a_row_is_named(old, new, says):
    assert old in SECOND
    with pytest.raises(ScheduleError, match=says):
        validate(two_ranks(FIRST, SECOND.replace(old, new, 1)))


def test_gradients_of_two_units_do_not_mix():
    full = lower(make_schedule("1f1b", num_ranks=1, num_micro_batches=2, unit=1), keep_adjacent=True)
    late = (*(a for a in full.rows[0] if a.kind is not ActionKind.REDUCE_GRAD), full.rows[0][-1])
    with pytest.raises(ScheduleError, match=r"\(0B1\): gradients of another unit are not summed yet"):
        validate(replace(full, rows=(late,)))


def test_weights_need_not_be_whole_for_their_gradients_if_so_agreed():
    second = SECOND.replace("1B0 1SEND_B0 1RESHARD", "1I0 1SEND_B0 1RESHARD 1W0")
    validate(two_ranks(FIRST, second), weight_gradients_need_weights=False)
    with pytest.raises(ScheduleError, match=r"\(1W0\): the stage's weights are not whole"):
        validate(two_ranks(FIRST, second))


def test_more_in_flight_than_promised_is_found():
    full = lower(make_schedule("gpipe", num_ranks=2, num_micro_batches=3))
    with pytest.raises(ScheduleError, match=r"rank 0, action 5 \(0F2\): 3 micro-batches in flight, more than 2"):
        validate(replace(full, most_in_flight=2))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        # rank 0 sends its second output only when the first gradient is there, rank 1 wants both outputs first
        ("0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1", "deadlock with messages: rank 0 at action 4"),
        # fine as messages under way, but each of two waits for the other one's RECV
        ("0F0 0F1 0RECV_B0 0SEND_F0 0SEND_F1 0B0 0RECV_B1 0B1", "deadlock with blocking messages: rank 0 at"),
    ],
)
def test_ranks_that_wait_for_each_other_are_found(first, says):
    second = "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    rows = [f"{stage}UNSHARD {row} {stage}RESHARD {stage}REDUCE_GRAD" for stage, row in enumerate((first, second))]
    with pytest.raises(ScheduleError, match=says):
        validate(two_ranks(*rows, num_micro_batches=2, unit=2))


def test_batches_that_cannot_pass_are_found():
    # with blocking messages each finds its other end; as one batch rank 0 waits for a gradient of what it never sent
    from rotorch.pipelining.validate import _batches_pass

    first = "0F0 0RECV_B0 0B0 0SEND_F0"
    with pytest.raises(ScheduleError, match="deadlock with batched messages: rank 0 waits for 0RECV_B0"):
        _batches_pass(two_ranks(first, "1RECV_F0 1F0 1B0 1SEND_B0"))


def test_shapes_of_each_schedule():
    with pytest.raises(ConfigError, match="Write 2 chunks"):
        make_schedule("zbv", num_ranks=2, num_chunks=1, num_micro_batches=4)
    with pytest.raises(
        ConfigError, match=r"7 micro-batches over 2 ranks are not 3 rounds .* Write a multiple of 2: 6 or 8"
    ):
        make_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_micro_batches=7)

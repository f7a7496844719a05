import pytest

from rotorch.core.errors import ConfigError
from rotorch.pipelining.actions import COMPUTE, MESSAGES, ActionKind, Placement, ScheduleError, counterpart, table
from rotorch.pipelining.baselines import BASELINES, make_schedule
from rotorch.pipelining.lower import lower


def text(row, *, only=None):
    return " ".join(str(a) for a in row if only is None or a.kind in only)


def test_1f1b_on_two_ranks_as_written_by_hand():
    schedule = make_schedule("1f1b", num_ranks=2, num_micro_batches=3)
    assert table(schedule.rows) == "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2"


def test_messages_follow_what_they_send_and_come_in_one_order():
    schedule = lower(make_schedule("1f1b", num_ranks=2, num_micro_batches=2))
    first, second = (text(row, only={ActionKind.FORWARD, ActionKind.BACKWARD, *MESSAGES}) for row in schedule.rows)
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert second == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


def test_a_rank_keeps_one_order_with_each_other_rank():
    schedule = lower(make_schedule("1f1b", num_ranks=4, num_micro_batches=9))
    for rank in range(3):
        here = [a for a in schedule.rows[rank] if a.kind in MESSAGES and schedule.rank_of(counterpart(a).stage) > rank]
        there = [a for a in schedule.rows[rank + 1] if a.kind in MESSAGES and counterpart(a) in set(here)]
        assert here == [counterpart(a) for a in there] and here


def test_gpipe_gathers_twice_per_unit():
    schedule = lower(make_schedule("gpipe", num_ranks=2, num_micro_batches=4, unit=2))
    local = {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD}
    assert text(schedule.rows[1], only=local) == (
        "1UNSHARD 1F0 1F1 1RESHARD 1UNSHARD 1F2 1F3 1RESHARD "
        "1UNSHARD 1B0 1B1 1RESHARD 1REDUCE_GRAD 1UNSHARD 1B2 1B3 1RESHARD 1REDUCE_GRAD"
    )


def test_1f1b_gathers_for_every_micro_batch_or_keeps():
    each = lower(make_schedule("1f1b", num_ranks=2, num_micro_batches=4, unit=1))
    assert [each.count(ActionKind.UNSHARD, rank=rank) for rank in range(2)] == [8, 8]
    assert [each.count(ActionKind.REDUCE_GRAD, rank=rank) for rank in range(2)] == [4, 4]
    kept = lower(make_schedule("1f1b", num_ranks=2, num_micro_batches=4))
    assert [kept.count(ActionKind.UNSHARD, rank=rank) for rank in range(2)] == [1, 1]
    assert [kept.count(ActionKind.REDUCE_GRAD, rank=rank) for rank in range(2)] == [1, 1]
    adjacent = lower(make_schedule("1f1b", num_ranks=2, num_micro_batches=4, unit=1), keep_adjacent=True)
    assert [adjacent.count(ActionKind.UNSHARD, rank=rank) for rank in range(2)] == [1, 1]
    assert [adjacent.count(ActionKind.REDUCE_GRAD, rank=rank) for rank in range(2)] == [4, 4]


def test_outputs_leave_before_gradients_are_summed_and_weights_are_asked_for_before_inputs():
    row = lower(make_schedule("gpipe", num_ranks=2, num_micro_batches=1)).rows[1]
    assert text(row) == "1UNSHARD 1RECV_F0 1F0 1RESHARD 1UNSHARD 1B0 1SEND_B0 1RESHARD 1REDUCE_GRAD"


def test_weights_are_sent_for_while_something_else_is_computed():
    schedule = make_schedule("looped_bfs", num_ranks=1, num_chunks=3, num_micro_batches=2)
    local = {ActionKind.FORWARD, ActionKind.UNSHARD, ActionKind.RESHARD}
    row = lower(schedule, ahead=True).rows[0]
    assert text(row, only=local).startswith(
        "0UNSHARD 0F0 1UNSHARD 0F1 0RESHARD 1F0 2UNSHARD 1F1 1RESHARD 2F0 2F1 2RESHARD 2UNSHARD"
    )
    whole = 0
    for action in row:
        whole += (action.kind is ActionKind.UNSHARD) - (action.kind is ActionKind.RESHARD)
        assert whole <= 2
    assert len(row) == len(lower(schedule).rows[0])


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_no_more_than_two_stages_are_whole_for_sending_ahead(name):
    num_chunks = 4 if BASELINES[name].any_chunks else BASELINES[name].usual_chunks
    for unit in (1, 2, 4, 8):
        schedule = make_schedule(name, num_ranks=2, num_chunks=num_chunks, num_micro_batches=8, unit=unit)
        for plain, ahead in zip(lower(schedule).rows, lower(schedule, ahead=True).rows, strict=True):
            assert all(num_whole <= 2 for num_whole in whole_when_sent_ahead(ahead))
            assert sorted(map(str, ahead)) == sorted(map(str, plain))


def whole_when_sent_ahead(row):
    """The number of whole stages after each UNSHARD that stands before a computation of another stage."""
    whole = 0
    for place, action in enumerate(row):
        whole += (action.kind is ActionKind.UNSHARD) - (action.kind is ActionKind.RESHARD)
        computed = next((later for later in row[place:] if later.kind in COMPUTE), action)
        if action.kind is ActionKind.UNSHARD and computed.stage != action.stage:
            yield whole


def test_rows_are_lowered_once():
    with pytest.raises(ScheduleError, match=r"gpipe: rank 0, action 0 \(0UNSHARD\): rows are lowered already"):
        lower(lower(make_schedule("gpipe", num_ranks=2, num_micro_batches=1)))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"num_ranks": 0, "num_micro_batches": 4}, "ranks = 0. Write 1 or more"),
        ({"num_ranks": 2, "num_micro_batches": 4, "unit": 5}, "Write a unit of at most 4"),
        ({"num_ranks": 2, "num_micro_batches": 4, "unit": 0}, "unit = 0"),
        ({"num_ranks": 2, "num_micro_batches": 4, "num_chunks": 2}, "it has one stage per rank. Write 1 chunk"),
    ],
)
def test_shapes_that_do_not_exist_are_refused(shape, says):
    with pytest.raises(ConfigError, match=says):
        make_schedule("1f1b", **shape)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="did you mean '1f1b'"):
        make_schedule("1f1", num_ranks=2, num_micro_batches=2)
    assert "gpipe" in BASELINES


def test_v_placement_turns_at_its_ends():
    assert [Placement.V.rank_of(s, num_ranks=3) for s in range(9)] == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert [Placement.LOOP.rank_of(s, num_ranks=3) for s in range(6)] == [0, 1, 2, 0, 1, 2]

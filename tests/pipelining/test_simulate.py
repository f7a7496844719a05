from collections import defaultdict
from itertools import pairwise

import pytest

from rotorch.pipelining.actions import SENDS, ActionKind, counterpart
from rotorch.pipelining.baselines import BASELINES, make_schedule
from rotorch.pipelining.lower import lower
from rotorch.pipelining.simulate import (
    ACTIVATIONS,
    BUFFERS,
    CATEGORIES,
    GRADIENTS,
    WEIGHTS,
    Link,
    StageCosts,
    simulate,
)


@pytest.mark.parametrize(
    ("name", "num_chunks", "bubble_slots", "in_flight"),
    [  # in slots and stages of a whole rank: 1F1B 3 (P-1), interleaved a V-th of it, ZB-H1 a third, ZBV half of that
        ("gpipe", 1, 9, 16),
        ("1f1b", 1, 9, 4),
        ("interleaved_1f1b", 2, 4.5, 5.5),
        ("looped_bfs", 2, 4.5, 16),
        ("zb_h1", 1, 3, 4),
        ("zbv", 2, 1.5, 4),
    ],
)
def test_bubbles_and_peaks_are_those_of_the_papers(name, num_chunks, bubble_slots, in_flight):
    found = simulate(make_schedule(name, num_ranks=4, num_chunks=num_chunks, num_micro_batches=16))
    assert found.bubble_s / num_chunks == bubble_slots
    assert found.bubble_ratio == pytest.approx(bubble_slots / (48 + bubble_slots))
    assert max(found.peak_bytes(rank) for rank in range(4)) / num_chunks == in_flight


def test_times_and_links_count():
    one = make_schedule("gpipe", num_ranks=2, num_micro_batches=1)
    costs = [
        StageCosts(forward_s=2, backward_input_s=3, backward_weight_s=5),
        StageCosts(forward_s=7, backward_input_s=11, backward_weight_s=13, message_bytes=100),
    ]
    found = simulate(one, costs=costs, link=Link(bytes_per_s=50, latency_s=0.5))
    assert found.makespan_s == 2 + 2.5 + 7 + 24 + 2.5 + 8
    assert [found.busy_s(rank) for rank in range(2)] == [10, 31]
    assert found.bubble_s == pytest.approx(46 - 41 / 2)
    sends = [(e.start_s, e.end_s) for e in found.timeline if e.action.kind is ActionKind.SEND_FORWARD]
    assert sends == [(2, 4.5)]


def test_messages_go_one_after_another_when_both_ends_are_reached():
    schedule = make_schedule("gpipe", num_ranks=2, num_micro_batches=3)
    slow = simulate(schedule, costs=StageCosts(message_bytes=4), link=Link(bytes_per_s=1))
    ends = [e.end_s for e in slow.timeline if e.action.kind is ActionKind.SEND_FORWARD]
    assert ends == [5, 10, 15]  # the next RECV stands behind a forward in its row


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_messages_of_one_link_never_overlap(name):
    num_chunks = BASELINES[name].usual_chunks
    schedule = make_schedule(name, num_ranks=4, num_chunks=num_chunks, num_micro_batches=8)
    found = simulate(schedule, costs=StageCosts(message_bytes=5), link=Link(bytes_per_s=1, latency_s=0.5))
    links = defaultdict(list)
    for entry in found.timeline:
        if entry.action.kind in SENDS:
            taker = schedule.rank_of(counterpart(entry.action).stage)
            links[entry.rank, taker].append((entry.start_s, entry.end_s))
    for entries in links.values():
        assert all(end - start == 5.5 for start, end in entries)
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(entries)))
    assert links


def test_blocking_ranks_stand_still():
    schedule = make_schedule("1f1b", num_ranks=3, num_micro_batches=6)
    costs, link = StageCosts(message_bytes=1), Link(bytes_per_s=2)
    free, blocking = (simulate(schedule, costs=costs, link=link, blocking=b) for b in (False, True))
    assert blocking.makespan_s > free.makespan_s > simulate(schedule).makespan_s


def test_gathers_delay_and_sums_run_beside():
    full = lower(make_schedule("gpipe", num_ranks=1, num_micro_batches=4, unit=2))
    found = simulate(full, costs=StageCosts(unshard_s=10, reduce_s=100))
    # two gathers and forwards; two gathers and backwards, of which the second gather waits for the first sum
    assert found.makespan_s == (10 + 2) + (10 + 2) + (10 + 4) + 100 + (10 + 4) + 100
    assert found.busy_s(0) == 12


def test_sums_that_nothing_hides_hold_the_rank_up():
    full = lower(make_schedule("gpipe", num_ranks=1, num_micro_batches=4, unit=2))
    costs = StageCosts(reduce_s=100, activation_bytes=0, gradient_bytes=7, gradient_part_bytes=3, reduce_extra_bytes=2)
    found = simulate(full, costs=costs, hides_sums=False)
    # forwards of both units, two backwards, their sum, two backwards, their sum
    assert found.makespan_s == 4 + 4 + 100 + 4 + 100
    held = [(moment.time_s, sum(moment.held)) for moment in found.memory[0]]
    assert held == [(4, 7), (8, 7 + 3 + 2), (108, 3), (108, 3 + 7), (112, 3 + 7 + 3 + 2), (212, 3)]
    beside = simulate(full, costs=costs)
    assert beside.peak_bytes(0, category=GRADIENTS) == 7 and beside.makespan_s == found.makespan_s


def test_memory_by_category_over_time():
    full = lower(make_schedule("gpipe", num_ranks=1, num_micro_batches=2, unit=1))
    found = simulate(full, costs=StageCosts(activation_bytes=3, weight_bytes=100, gradient_bytes=10, reduce_s=0.5))
    assert {m.time_s: m.held[:3] for m in found.memory[0]} == {
        0: (3, 100, 0),
        1: (6, 100, 0),
        2: (6, 100, 10),
        4: (3, 100, 10),  # gathered anew, which the sum delays
        6.5: (0, 0, 10),
        7: (0, 0, 0),
    }
    assert found.peak_bytes(0) == 116
    assert [found.peak_bytes(0, category=c) for c in (ACTIVATIONS, WEIGHTS, GRADIENTS)] == [6, 100, 10]


def test_less_may_be_kept_between_the_two_gradients():
    schedule = make_schedule("zb_h1", num_ranks=3, num_micro_batches=9)
    whole, half = (simulate(schedule, costs=StageCosts(pending_bytes=b)) for b in (None, 0.5))
    assert [half.peak_bytes(rank) for rank in range(3)] == [3, 2.5, 2]
    assert [whole.peak_bytes(rank) for rank in range(3)] == [3, 3, 3]


def test_costs_of_every_stage_are_wanted():
    with pytest.raises(ValueError, match="costs of 1 stages, but there are 2"):
        simulate(make_schedule("gpipe", num_ranks=2, num_micro_batches=1), costs=[StageCosts()])


def test_messages_and_what_a_computation_takes_are_held_too():
    schedule = make_schedule("gpipe", num_ranks=2, num_micro_batches=4)
    costs = StageCosts(activation_bytes=10, message_bytes=1, forward_extra_bytes=5, backward_extra_bytes=7)
    first, last = (simulate(schedule, costs=costs).memory[rank] for rank in range(2))
    buffers = [[moment.held[CATEGORIES.index(BUFFERS)] for moment in memory] for memory in (first, last)]
    assert max(sum(m.held) for m in last) == 4 * 10 + 7  # received inputs are among activations
    assert max(sum(m.held) for m in first) == 4 * 10 + 1 + 7  # and a gradient that came
    assert buffers[0][-1] == buffers[1][-1] == 0
    assert max(buffers[1][len(buffers[1]) // 2 :]) == 7 + 2  # one is made while two are under way

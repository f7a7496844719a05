"""Both rings as state machines: what visits whom and when, and what becomes of gradients, whatever came before."""

import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from rotorch.comm.meter import Meter
from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.core.traffic import Kind
from rotorch.ops.side_by_side import OrderedAdds
from rotorch.testing.ranks import run_ranks
from rotorch.testing.rings import without_gradients

TRANSPORTS = (
    "shared_memory",
    "shared_memory+wire",
    "send_receive",
    "send_receive+wire",
    "send_receive+ahead",
    "send_receive+together",
    "send_receive+together+wire",
    "send_receive+in_place",
    "send_receive+in_place+chunks",
    "send_receive+in_place+wire",
    "symmetric_memory",
    "symmetric_memory+wire",
    "symmetric_memory+together",
    "symmetric_memory+together+wire",
)
"""Variants of a transport: see `conftest.ring`."""


class Abandoned(Exception):
    """A step ends here."""


def numels_of(n):
    """Of three items: all slices different, every other one empty, all alike."""
    return [[5 + 2 * k for k in range(n)], [3 * ((k + 1) % 2) for k in range(n)], [4] * n]


def values(item, index, numel):
    return torch.arange(numel, dtype=torch.float64) + 100.0 * (index + 1) + 1000.0 * item


def part(rank, item, index, numel, *, scale=1.0):
    """Part of `rank` in the gradient of a slice."""
    return scale * (torch.arange(numel, dtype=torch.float64) + 10.0 * index + item + 1.0) * 2.0**rank


def in_visit(ring, item, index, of_slice):
    """Elements of visit `index` of an item, made of its slices: `of_slice(index, numel)`."""
    numels = ring.numels[item]
    if not hasattr(ring, "_groups"):
        return of_slice(index, numels[index])
    groups = ring._groups[item]
    visit = torch.full((groups.numels[index],), float("nan"), dtype=torch.float64)
    for number in groups.ranks(index):
        home = of_slice(number, numels[number])
        for chunk in groups.chunks[number]:
            chunk.in_visit(visit).copy_(chunk.at_home(home))
    return visit


def summed(ring, item, *, scale=1.0):
    """Sum of all ranks' parts in the gradient of this rank's slice."""
    numel = ring.numels[item][ring.position]
    return sum(part(rank, item, ring.position, numel, scale=scale) for rank in range(ring.size))


def stagger(ring, *, seed=0):
    """Ranks get out of step: whoever runs ahead must not disturb those behind."""
    time.sleep(random.Random(1000 * seed + ring.position + time.monotonic_ns() % 7).random() * 2e-3)


def forward(ring, item, *, stop=None, changed=0.0):
    """One pass; checks every slice when it comes and when it goes."""
    for number, visit in enumerate(ring.visits(item, backward=False)):
        check_visit(ring, item, visit, backward=False, number=number, changed=changed)
        if number == stop:
            raise Abandoned
        stagger(ring, seed=number)
        check_visit(ring, item, visit, backward=False, number=number, changed=changed)


def backward(ring, item, *, fetch=True, stop=None, scale=1.0, wait=True, changed=0.0):
    for number, visit in enumerate(ring.visits(item, backward=True, fetch=fetch)):
        check_visit(ring, item, visit, backward=True, number=number, fetch=fetch, changed=changed)
        stagger(ring, seed=number)
        buffer = ring.gradient(item, visit, wait=wait) or ring.gradient(item, visit, wait=True)
        mine = in_visit(ring, item, visit.index, partial(part, ring.position, item, scale=scale))
        if buffer.fresh:
            buffer.flat.copy_(mine)
        else:
            buffer.flat.add_(mine)
        if number == stop:
            raise Abandoned
        ring.pass_on(item, visit)
        check_visit(ring, item, visit, backward=True, number=number, fetch=fetch, changed=changed)


def check_visit(ring, item, visit, *, backward, number, fetch=True, changed=0.0):
    """Holds a visit against what is due; `changed` is what was added to all weights."""
    groups = getattr(ring, "_groups", None)
    n, r = (ring.size, ring.position) if groups is None else (groups[item].count, groups[item].own)
    assert visit.index == ((r + 1 + number) % n if backward else (r - number) % n)
    assert visit.number == number
    if fetch:
        expected = in_visit(ring, item, visit.index, partial(values, item)) + changed
        assert torch.equal(visit.weights.double(), expected)
    else:
        assert visit.weights is None


def train(ring, items, *, fresh=True, scale=1.0, wait=True):
    dist.barrier()
    ring.start(fresh=[fresh] * len(ring.numels))
    for item in items:
        forward(ring, item)
    for item in reversed(items):
        backward(ring, item, scale=scale, wait=wait)
    ring.finish()


def evaluate(ring, items):
    dist.barrier()
    with torch.no_grad():
        ring.start(fresh=[True] * len(ring.numels))
        for item in items:
            forward(ring, item)


def on_ranks(function, transport, n, ring):
    return run_ranks(_with_ring, function, transport, n, ring, num_ranks=n)


def _with_ring(function, transport, n, make):
    ring = make(transport, numels=numels_of(n))
    assert ring.name == transport.partition("+")[0]
    without_gradients(ring)  # whatever was there must not be seen
    function(ring)
    for item in range(len(ring.numels)):
        expected = values(item, ring.position, ring.numels[item][ring.position])
        assert torch.equal(ring.home_weights(item), expected), "the weights have left home"
    dist.barrier()
    ring.close()


def one_step(ring):
    train(ring, [0, 1, 2])
    for item in range(3):
        assert torch.equal(ring.home_gradients(item), summed(ring, item))
    joined = torch.cat([ring.home_gradients(item) for item in range(3)])
    assert joined.sum() == sum(torch.nansum(flat) for flat in ring.home_gradients_of(range(3)))


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_slice_visits_every_rank_and_gradients_arrive_complete(transport, n, ring):
    on_ranks(one_step, transport, n, ring)


def several_steps(ring):
    train(ring, [0, 1, 2])
    train(ring, [0, 1, 2], scale=3.0)
    for item in range(3):
        assert torch.equal(ring.home_gradients(item), summed(ring, item, scale=3.0)), "fresh did not overwrite"
    train(ring, [0, 1, 2], fresh=False, wait=False)
    for item in range(3):
        assert torch.equal(ring.home_gradients(item), summed(ring, item, scale=4.0)), "not fresh did not add"


def one_item_twice(ring):
    """As of tied weights, and of two micro-batches: all passes of a step add up, the first one overwrites."""
    for _ in range(2):
        train(ring, [0, 2, 0, 1], wait=False)
        assert torch.equal(ring.home_gradients(0), summed(ring, 0, scale=2.0))
        assert torch.equal(ring.home_gradients(2), summed(ring, 2))


def without_weights(ring):
    """As in the backward of an embedding, with a weighted pass before and after it."""
    for _ in range(2):
        dist.barrier()
        ring.start(fresh=[True] * 3)
        for item in (2, 0, 1):
            forward(ring, item)
        backward(ring, 1)
        backward(ring, 0, fetch=False)
        backward(ring, 2)
        ring.finish()
        for item in range(3):
            assert torch.equal(ring.home_gradients(item), summed(ring, item))


def unused_items(ring):
    """An item that a step leaves out stays fresh, what was its gradient as it is; others are not disturbed."""
    train(ring, [0, 2])
    assert ring.fresh == [False, True, False]
    before = ring.home_gradients(0)
    train(ring, [1])
    assert ring.fresh == [True, False, True]
    assert torch.equal(before, summed(ring, 0))
    assert torch.equal(ring.home_gradients(1), summed(ring, 1))


def changing_weights(ring):
    """As an optimizer changes them: nothing that was made of the values before is used after."""
    for items in ([0], [0], [2, 0], [0, 2]):  # one is the last of a step and the first of the next
        for changed in (0.0, 8.0, -8.0):
            for item in range(3):
                ring.home_weights(item).copy_(values(item, ring.position, ring.numels[item][ring.position]) + changed)
            dist.barrier()
            ring.start(fresh=[True] * 3)
            for item in items:
                forward(ring, item, changed=changed)
            for item in reversed(items):
                backward(ring, item, changed=changed)
            ring.finish()
            dist.barrier()
    for item in range(3):
        ring.home_weights(item).add_(8.0)


def changing_programs(ring):
    """The order of passes that the last step had is a guess only (see [Note: one ahead])."""
    steps = [
        lambda: train(ring, [0, 1, 2]),
        lambda: evaluate(ring, [0, 1, 2]),
        lambda: evaluate(ring, [0, 1, 2, 0, 1, 2]),  # more than expected
        lambda: evaluate(ring, [0]),  # ends early: what is on its way nobody takes
        lambda: train(ring, [0, 1, 2, 0, 1, 2]),  # more micro-batches
        lambda: train(ring, [2, 1]),  # another way from the first pass on
        lambda: train(ring, [2, 1]),
        lambda: evaluate(ring, []),
        lambda: train(ring, [0, 1, 2]),
    ]
    for step in steps:
        step()
    for item in range(3):
        assert torch.equal(ring.home_gradients(item), summed(ring, item))


def left_behind(ring):
    """Rank 0 leaves in its first backward; the others come to the end of theirs, and then know."""
    train(ring, [0, 1, 2])
    for _ in range(2):
        dist.barrier()
        ring.start(fresh=[False] * 3)
        forward(ring, 0)
        forward(ring, 2)
        if ring.position == 0:
            with pytest.raises(Abandoned):
                backward(ring, 2, stop=0)
            ring.restore_owners(after=Abandoned())
        else:
            backward(ring, 2)
            backward(ring, 0, wait=False)
            with pytest.raises(RankFailure, match="rank 0 has left this step in the middle: gradients are incomplete"):
                ring.finish()
    train(ring, [0, 1, 2])
    for item in range(3):
        assert torch.equal(ring.home_gradients(item), summed(ring, item))


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_nobody_waits_for_a_rank_that_has_left_the_step(n, ring):
    on_ranks(left_behind, "shared_memory", n, ring)


def at_different_places(make):
    """Rank 1 is one slice further than the others when an exception is raised on all."""
    ring = make("send_receive+in_place", numels=numels_of(3))
    train(ring, [0, 1, 2])
    dist.barrier()
    ring.start(fresh=[True] * 3)
    with pytest.raises(Abandoned):
        forward(ring, 0, stop=2 if ring.position == 1 else 1)
    for go_on in (lambda: ring.restore_owners(after=Abandoned()), lambda: ring.start(fresh=[True] * 3)):
        with pytest.raises(RankFailure, match="ranks left the step at different places: they cannot return"):
            go_on()


def test_weights_that_left_home_do_not_return_if_ranks_disagree_where_they_are(ring):
    run_ranks(at_different_places, ring, num_ranks=3, timeout_s=30)


def somebody_ends(ring, *, ended):
    """Rank 1 is gone before its backward. Rank 0 waits for it and notices; rank 2 hears it from rank 0."""
    train(ring, [0, 1, 2])
    dist.barrier()
    ring.start(fresh=[True] * 3)
    forward(ring, 2)
    if ring.position == 1:
        return
    if ring.position == 0:
        ended(ring._patience, 1)
    with pytest.raises(HeardFailure) as told:
        backward(ring, 2)
        ring.finish()
    ring.restore_owners(after=told.value)
    expected = "rank 1 has ended, and this one" if ring.position == 0 else "rank 0 has left this step in the middle"
    assert str(told.value).startswith(expected)


def test_nobody_waits_for_a_rank_that_has_ended(ring, ended):
    on_ranks(partial(somebody_ends, ended=ended), "shared_memory", 3, ring)


def turns(ring, item):
    """This rank's additions to an item's slices, as those of a layer's weight."""
    numels = ring.numels[item]
    unit = SimpleNamespace(
        reached=set(),
        ring=ring,
        item=item,
        slices=SimpleNamespace(numels=numels),
        gradients=lambda buffer, index: [buffer.flat],
        ranges=range(ring.size),
    )

    def add(gradient, fresh, index):
        mine = part(ring.position, item, index, numels[index])
        gradient.copy_(mine) if fresh else gradient.add_(mine)

    return OrderedAdds(unit, add)


def kept_back(ring):
    """Rank 0 notes additions to item 0. When those to item 2 are possible at once, so are these, and it makes them."""
    for _ in range(2):
        dist.barrier()
        ring.start(fresh=[True] * 3)
        if ring.position == 0:
            turns(ring, 0).go_on()
            assert len(ring._deferred) == 1
        dist.barrier()
        if ring.position != 0:
            turns(ring, 0).go_on()
            turns(ring, 2).go_on()
        for _ in range(4):  # the others come as far as they can without rank 0
            dist.barrier()
            if ring.position != 0:
                ring.flush_ready()
        dist.barrier()
        if ring.position == 0:
            turns(ring, 2).go_on()
            assert ring._deferred == []
        ring.finish()
        assert all(torch.equal(ring.home_gradients(item), summed(ring, item)) for item in (0, 2))


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_additions_that_were_kept_back_are_made_when_they_can_be(n, ring):
    on_ranks(kept_back, "shared_memory", n, ring)


def one_ahead_of_the_other(ring):
    """Rank 0 comes to the end of its backward before rank 1 begins its own."""
    for fresh in (True, False):
        dist.barrier()
        ring.start(fresh=[fresh] * 3)
        for turn in range(2):
            if ring.position == turn:
                for visit in ring.visits(0, backward=True, fetch=False):
                    buffer = ring.gradient(0, visit, wait=False)
                    assert buffer is not None, "waits for the other rank"
                    mine = part(ring.position, 0, visit.index, ring.numels[0][visit.index])
                    buffer.flat.copy_(mine) if buffer.fresh else buffer.flat.add_(mine)
                    ring.pass_on(0, visit)
            dist.barrier()
        ring.finish()
        assert torch.equal(ring.home_gradients(0), summed(ring, 0, scale=1.0 if fresh else 2.0))


def test_over_messages_a_rank_writes_its_own_part_home_before_the_others_sum_has_come(ring):
    on_ranks(one_ahead_of_the_other, "send_receive", 2, ring)


def one_behind_the_other(ring):
    """Rank 0 has nothing left to do but wait for its sum before rank 1 begins its backward."""
    ring.start(fresh=[True] * 3)
    if ring.position == 0:
        backward(ring, 0, fetch=False)
        dist.barrier()
    else:
        dist.barrier()
        time.sleep(0.3)  # until rank 0 is in `finish`, from where it cannot tell
        backward(ring, 0, fetch=False)
    ring.finish()
    assert torch.equal(ring.home_gradients(0), summed(ring, 0))


def test_the_end_of_a_step_waits_for_a_sum_that_comes_late(ring):
    on_ranks(one_behind_the_other, "send_receive", 2, ring)


def fetches_ahead(ring, *, most):
    """At every visit the fetches that come next are under way; in the first step those of the same pass."""
    n, program = ring.size, ((0, False), (2, False), (2, True), (0, True))
    fetched = [
        (item, is_backward, step) for item, is_backward in program for step in range(not is_backward, n - is_backward)
    ]
    for number in range(2):
        dist.barrier()
        ring.start(fresh=[True] * 3)
        done = 0
        for item, is_backward in program:
            of_this_pass = fetched.index((item, is_backward, n - 2 if is_backward else n - 1)) + 1
            for visit in ring.visits(item, backward=is_backward):
                done += visit.index != ring.position
                ahead = [(flight.target.item, flight.target.backward, flight.step) for flight in ring._ahead.under_way]
                assert ahead == fetched[done : min(done + most, len(fetched) if number else of_this_pass)]
                stagger(ring, seed=done)
                expected = values(item, visit.index, ring.numels[item][visit.index])
                assert torch.equal(visit.weights, expected), "a fetch came into what visits"
                if is_backward:
                    mine = part(ring.position, item, visit.index, ring.numels[item][visit.index])
                    ring.gradient(item, visit, wait=True).flat.copy_(mine)
                    ring.pass_on(item, visit)
        ring.finish()


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["send_receive", "send_receive+ahead"])
def test_messages_fetch_what_comes_next_during_a_visit(n, transport, ring):
    on_ranks(partial(fetches_ahead, most=2 if "ahead" in transport else 1), transport, n, ring)


def evaluation_inside_a_step(ring):
    """A forward pass without gradients between forward and backward, as of a teacher."""
    for _ in range(2):
        dist.barrier()
        ring.start(fresh=[True] * 3)
        forward(ring, 0)
        with torch.no_grad():
            forward(ring, 2)
            forward(ring, 0)
        forward(ring, 2)
        backward(ring, 2)
        backward(ring, 0)
        ring.finish()
        assert torch.equal(ring.home_gradients(0), summed(ring, 0))


def abandoned_steps(ring):
    """All ranks leave a step at the same place; the next one owes nothing to it."""
    train(ring, [0, 1, 2])
    for pass_, stop in [(forward, 0), (forward, ring.size - 1), (backward, 0), (backward, ring.size - 1)]:
        with pytest.raises(Abandoned):
            dist.barrier()
            ring.start(fresh=[False] * 3)
            forward(ring, 0)
            forward(ring, 1)
            pass_(ring, 1, stop=stop)
        train(ring, [0, 1, 2], wait=False)
        for item in range(3):
            assert torch.equal(ring.home_gradients(item), summed(ring, item))


STEPS = (
    several_steps,
    one_item_twice,
    without_weights,
    unused_items,
    changing_weights,
    changing_programs,
    evaluation_inside_a_step,
    abandoned_steps,
)


def all_steps(transport, n, make):
    """One fork for all, each with a ring of its own."""
    for steps in STEPS:
        try:
            _with_ring(steps, transport, n, make)
        except BaseException as error:
            error.add_note(f"in {steps.__name__}")
            raise


REPEATED = {"send_receive", "send_receive+in_place+chunks", "send_receive+in_place+wire", "symmetric_memory"}
"""Variants whose parts others have; test_symmetric_memory.py runs steps over symmetric memory in any order."""


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transport", [pytest.param(each, marks=pytest.mark.slow if each in REPEATED else ()) for each in TRANSPORTS]
)
def test_steps(transport, n, ring):
    run_ranks(all_steps, transport, n, ring, num_ranks=n)


def sent_bytes(make, transport, n):
    ring = make(transport, numels=numels_of(n))
    train(ring, [0, 1, 2])  # without a guess
    counts = []
    for items in ([0, 1, 2], [0, 1, 2], [2, 0]):
        with Meter(smallest_counted_bytes=0) as meter:
            ring.start(fresh=[True] * 3)
            for item in items:
                forward(ring, item)
            for item in reversed(items):
                backward(ring, item)
            ring.finish()
        dist.barrier()
        home = sum(ring.numels[i][ring.position] for i in items)
        others = sum(sum(ring.numels[i]) - ring.numels[i][ring.position] for i in items)
        counts.append((meter.sent_bytes[Kind.SEND], 8 * (2 * (n - 1) * home + others)))
    return counts


@pytest.fixture(scope="module")
def meter_loaded():
    """Loads here what a dispatch mode loads on first use: seconds for every forked rank."""
    with Meter():
        torch.zeros(1)


@pytest.mark.usefixtures("meter_loaded")
@pytest.mark.parametrize("n", [2, 3])
def test_messages_carry_weights_twice_and_gradients_once(n, ring):
    for counts in run_ranks(sent_bytes, ring, "send_receive", n, num_ranks=n):
        assert [got for got, _ in counts[:2]] == [expected for _, expected in counts[:2]]


@pytest.mark.usefixtures("meter_loaded")
def test_shared_memory_sends_nothing(ring):
    for counts in run_ranks(sent_bytes, ring, "shared_memory", 2, num_ranks=2):
        assert [got for got, _ in counts] == [0, 0, 0]

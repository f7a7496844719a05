"""The ring over symmetric memory waits for all that it must, and for no more: without GPUs, over `FakePeerMemory`.

Whatever marks and signals leave open is done early, late, or at random; and every access is checked by clocks.
"""

import re

import pytest
import test_ring
import torch
from test_ring import Abandoned, backward, forward, numels_of, summed, values
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.meter import Meter
from rotorch.comm.ring import RingSetup
from rotorch.comm.transports.passes import Pass, Passes
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core.errors import RankFailure
from rotorch.testing.peer_memory import FakeLane, FakePeerMemory
from rotorch.testing.ranks import run_ranks
from rotorch.testing.rings import without_gradients


@pytest.fixture(scope="module", autouse=True)
def dispatch_mode_loaded():
    """Loads here what a dispatch mode loads on first use: seconds for every forked rank."""
    with Meter():
        torch.zeros(1)


STEPS = [
    test_ring.several_steps,
    test_ring.one_item_twice,
    test_ring.without_weights,
    test_ring.changing_programs,
    test_ring.abandoned_steps,
]
SCHEDULES = {
    "early": lambda rank: "early",
    "late": lambda rank: "late",
    "some early, some late": lambda rank: ("early", "late")[rank % 2],
}


def on_ranks(function, n, make, schedule="random", faults=(), variant=""):
    return run_ranks(_with_ring, function, n, make, schedule, faults, variant, num_ranks=n)


def _with_ring(function, n, make, schedule, faults, variant):
    for lane, method in faults:
        _forget(lane, method)
    pick = SCHEDULES.get(schedule, lambda rank: schedule)
    ring = make("symmetric_memory" + variant, numels=numels_of(n), schedule=pick(dist.get_rank()))
    without_gradients(ring)
    with ring._memory.watched():
        found = function(ring)
    for item in range(len(ring.numels)):
        assert torch.equal(ring.home_weights(item), values(item, ring.position, ring.numels[item][ring.position]))
    dist.barrier()
    ring.close()
    return found


SOME = [pytest.param(name, marks=pytest.mark.slow if name == "early" else ()) for name in SCHEDULES]
"""Those of them that are quick; some ranks are early in the last one."""


@pytest.mark.parametrize("schedule", SOME)
@pytest.mark.parametrize("steps", STEPS, ids=lambda f: f.__name__)
def test_steps_whatever_runs_first(steps, schedule, ring):
    on_ranks(steps, 3, ring, schedule)


@pytest.mark.parametrize("schedule", SOME)
def test_slices_that_visit_in_another_precision_whatever_runs_first(schedule, ring):
    """Each owner converts once; its masters stay as they are."""
    on_ranks(test_ring.several_steps, 3, ring, schedule, variant="+wire")


@pytest.mark.parametrize("schedule", SOME)
@pytest.mark.parametrize(
    "steps", [*STEPS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in STEPS[2:])], ids=lambda f: f.__name__
)
def test_slices_that_visit_together_whatever_runs_first(steps, schedule, ring):
    """Groups of four, of one, and of two."""
    on_ranks(steps, 4, ring, schedule, variant="+together")


# ------------------------------------------------------------- what is left out is found


def _forget(lane_name, method):
    """From now on, lanes of this name forget to do one thing."""
    known = getattr(FakeLane, method)

    def forgetful(self, *args, **kwargs):
        if self.name != lane_name:
            known(self, *args, **kwargs)

    setattr(FakeLane, method, forgetful)


FORGOTTEN = {
    "compute does not wait for a fetch or a hop": ("compute", "after"),
    "a fetch does not wait for its slot to be free": ("fetches", "after"),
    "a hop does not wait for the part to be made": ("hops", "after"),
    "a sum does not wait for what it adds, nor a push for the inbox": ("hops", "wait_signal"),
}


@pytest.mark.parametrize("variant", ["", "+together"])
@pytest.mark.parametrize("fault", FORGOTTEN)
def test_what_is_not_waited_for_is_found(fault, variant, ring):
    with pytest.raises(RankFailure, match=r"OutOfOrder: rank \d"):
        on_ranks(test_ring.several_steps, 3, ring, "some early, some late", [FORGOTTEN[fault]], variant)


def one_credit_too_few(ring):
    """The inbox is never said to be free: pushes overwrite what nobody has read, or wait for ever."""
    ring._memory.clear(range(8))
    known = FakeLane.wait_signal

    def wait_signal(self, peer, *, channel):
        if channel != ring._channels()[1]:
            known(self, peer, channel=channel)

    FakeLane.wait_signal = wait_signal
    test_ring.several_steps(ring)


def test_a_push_without_leave_is_found(ring):
    with pytest.raises(RankFailure, match="OutOfOrder"):
        on_ranks(one_credit_too_few, 3, ring, "some early, some late")


def filled_while_visiting(ring):
    ring.start(fresh=[True] * 3)
    for step, _ in enumerate(ring.visits(0, backward=False)):
        if step == 1:
            ring._post(Pass(0, False, True), 2)  # one more fetch than there are slots


def test_a_third_fetch_has_no_slot(ring):
    with pytest.raises(RankFailure, match=r"slot \d is filled while its slice is visiting"):
        on_ranks(filled_while_visiting, 4, ring)


# ------------------------------------------------------------- weights change between steps only


def changing_weights(ring):
    """As an optimizer does, with a fetch under way that a step did not take."""
    seen = []
    for number in range(4):
        for item in range(3):
            home = ring.home_weights(item)
            home.copy_(values(item, ring.position, home.numel()) + number)
        dist.barrier()
        ring.start(fresh=[True] * 3)
        items = [0, 1, 2] if number % 2 else [0, 1]
        for item in items:
            for visit in ring.visits(item, backward=False):
                expected = values(item, visit.index, ring.numels[item][visit.index]) + number
                seen.append(torch.equal(visit.weights, expected))
        ring.finish()
        dist.barrier()  # nobody changes weights that others still read: here no gradients have told
    for item in range(3):
        ring.home_weights(item).copy_(values(item, ring.position, ring.numels[item][ring.position]))
    return all(seen)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_sees_the_weights_of_its_own(schedule, ring):
    assert on_ranks(changing_weights, 3, ring, schedule) == [True] * 3


# ------------------------------------------------------------- ahead, and late


def ahead(ring):
    """The fetch under way during each visit of the second of two equal steps: (item, step) or None."""
    found = []
    for number in range(2):
        dist.barrier()
        ring.start(fresh=[True] * 3)
        for item in (0, 2):
            for _ in ring.visits(item, backward=False):
                flight = ring._in_flight
                if number:
                    found.append(flight and (flight.target.item, flight.step))
        ring.finish()
    return found


def test_the_next_unit_is_fetched_during_the_last_slice(ring):
    for found in on_ranks(ahead, 3, ring):
        assert found == [(0, 1), (0, 2), (2, 1), (2, 1), (2, 2), None]


def test_passes_to_come_are_those_of_the_step_before():
    passes, one, two = Passes(size=3), Pass(0, False, True), Pass(1, True, True)
    passes.start()
    passes.enter(one)
    assert [passes.next_fetch(one, step) for step in range(3)] == [(one, 1), (one, 2), None]
    passes.enter(two)
    assert [passes.next_fetch(two, step) for step in range(3)] == [(two, 1), None, None]
    passes.start()
    passes.enter(one)
    assert passes.next_fetch(one, 2) == (two, 0)
    passes.start()
    passes.enter(two)  # another way
    assert passes.next_fetch(two, 1) is None
    with torch.no_grad():
        passes.start()
        passes.enter(one)
        assert passes.next_fetch(one, 2) is None  # nothing is known of steps without gradients
    assert Passes(size=1).next_fetch(one, 0) is None


def late():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    setup = RingSetup(mesh, numels_of(2), torch.float64, timeout_s=5.0)
    ring = SymmetricMemoryRing(setup, make_memory=FakePeerMemory)
    ring.start(fresh=[True] * 3)
    if ring.position == 1:
        return ""
    for visit in ring.visits(0, backward=True):
        ring.gradient(0, visit, wait=True).flat.zero_()
        ring.pass_on(0, visit)
    ring._timeout_s = 0.5  # nobody comes
    try:
        ring.start(fresh=[True] * 3)
    except RankFailure as error:
        return str(error)
    raise AssertionError("did not wait")


def test_a_neighbour_that_never_signals_is_a_rank_failure_at_the_next_start():
    message, _ = run_ranks(late, num_ranks=2)
    assert re.search(r"ring position 0 waited .* for gradients of the last step: .* late or gone", message)


def abandoned_apart(ring):
    """Ranks leave a step at different visits of forward, where nobody waits for anybody."""
    for stop in (0, ring.position % ring.size, ring.size - 1 - ring.position):
        with pytest.raises(Abandoned):
            dist.barrier()
            ring.start(fresh=[False] * 3)
            forward(ring, 0, stop=stop)
        dist.barrier()
        ring.start(fresh=[True] * 3)
        forward(ring, 0)
        backward(ring, 0)
        ring.finish()
        assert torch.equal(ring.home_gradients(0), summed(ring, 0))


def test_a_forward_pass_may_be_left_anywhere(ring):
    on_ranks(abandoned_apart, 3, ring)

"""The ring over hosts as a state machine: visits, gradients, bytes between hosts, and steps that break off."""

import mmap
import platform
import random
import time

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm import transports
from rotorch.comm.meter import Meter
from rotorch.comm.shared_file import SharedMemoryUnavailable
from rotorch.comm.transports import hierarchical, make_ring
from rotorch.comm.transports.messages import Exchange
from rotorch.core.crossings import slices_between_hosts
from rotorch.core.errors import ConfigError, HeardFailure, RankFailure
from rotorch.core.traffic import Kind
from rotorch.testing.ranks import run_ranks
from rotorch.testing.rings import without_gradients

PLACES = ["aabb", "aaabbb", "aabbcc"]
"""Host of each rank, a letter each."""


class Abandoned(Exception):
    """A step ends here."""


def numels_of(n):
    """Of three items: all slices different, every other one empty, all alike."""
    return [[25 + 2 * k for k in range(n)], [30 * ((k + 1) % 2) for k in range(n)], [40] * n]


def values(item, index, numel):
    return torch.arange(numel, dtype=torch.float64) + 100.0 * (index + 1) + 1000.0 * item


def part(rank, item, index, numel):
    """Part of `rank` in the gradient of a slice: sums of these are exact in every order."""
    return (torch.arange(numel, dtype=torch.float64) + 10.0 * index + item + 1.0) * 2.0**rank


def make(hosts, transport="hierarchical", **options):
    mesh = init_device_mesh("cpu", (len(hosts),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: hosts[dist.get_rank()])
        options = dict(num_hosts=len(set(hosts)), device=torch.device("cpu"), dtype=torch.float64) | options
        ring = make_ring(transport, mesh=mesh, numels=numels_of(len(hosts)), **options)
    for item, numels in enumerate(ring.numels):
        ring.home_weights(item).copy_(values(item, ring.position, numels[ring.position]))
    without_gradients(ring)  # whatever was there must not be seen
    return ring


def stagger(ring):
    """Ranks get out of step: whoever runs ahead must not disturb those behind."""
    time.sleep(random.Random(ring.position + time.monotonic_ns() % 7).random() * 2e-3)


def forward(ring, item, *, stop=None):
    seen = []
    for visit in ring.visits(item, backward=False):
        for _ in range(2):
            assert torch.equal(visit.weights, values(item, visit.index, ring.numels[item][visit.index]))
            stagger(ring)
        if visit.number == stop:
            raise Abandoned
        seen.append(visit.index)
    assert seen == ring.order(backward=False) and seen[0] == ring.position and sorted(seen) == list(range(ring.size))


def backward(ring, item, *, fetch=True, stop=None):
    seen = []
    for visit in ring.visits(item, backward=True, fetch=fetch):
        if fetch:
            assert torch.equal(visit.weights, values(item, visit.index, ring.numels[item][visit.index]))
        if visit.number == stop:
            raise Abandoned
        stagger(ring)
        buffer = ring.gradient(item, visit, wait=False) or ring.gradient(item, visit, wait=True)
        mine = part(ring.position, item, visit.index, ring.numels[item][visit.index])
        buffer.flat.copy_(mine if buffer.fresh else buffer.flat + mine)
        ring.pass_on(item, visit)
        if fetch:
            assert torch.equal(visit.weights, values(item, visit.index, ring.numels[item][visit.index]))
        seen.append(visit.index)
    assert seen == ring.order(backward=True) and seen[-1] == ring.position and sorted(seen) == list(range(ring.size))


def train(ring, items, *, fresh=True):
    dist.barrier()
    ring.start(fresh=[fresh] * 3)
    for item in items:
        forward(ring, item)
    for item in reversed(items):
        backward(ring, item, fetch=item != 2)
    ring.finish()


def has_sums(ring, item, *, times=1):
    numel = ring.numels[item][ring.position]
    expected = times * sum(part(rank, item, ring.position, numel) for rank in range(ring.size))
    assert torch.equal(ring.home_gradients(item), expected)


def steps(hosts, ahead):
    ring = make(hosts, ahead=ahead)
    assert ring.name == "hierarchical" and ring.num_hosts == len(set(hosts))
    for items in ([0, 1, 2], [0, 1, 2], [2, 0, 1, 0], [0, 2], [1], [0, 0, 0]):
        train(ring, items)
        for item in items:
            has_sums(ring, item, times=items.count(item))
        dist.barrier()
        ring.start(fresh=[True] * 3)
        with torch.no_grad():
            for item in items:  # an evaluation: no backward, no `finish`
                forward(ring, item)
    train(ring, [0], fresh=False)
    has_sums(ring, 0, times=4)
    dist.barrier()
    ring.close()


@pytest.mark.parametrize(
    ("hosts", "ahead"),
    [
        *(pytest.param(hosts, 1, marks=pytest.mark.slow if hosts == "aaabbb" else ()) for hosts in PLACES),
        ("aabb", 2),
    ],
)
def test_slices_and_gradients_are_right_in_every_order_of_passes(hosts, ahead):
    run_ranks(steps, hosts, ahead, num_ranks=len(hosts))


def sent(hosts):
    """Elements that a rank sends in each of two steps, and those of its slots."""
    ring, found = make(hosts), []
    for _ in range(2):  # in the second one fetches run ahead
        with Meter(smallest_counted_bytes=0) as meter:
            train(ring, [0, 1, 2])
        assert set(meter.sent_bytes) <= {Kind.SEND}
        found.append(meter.sent_bytes[Kind.SEND] // 8)
    return found, sum(slot.numel() for slot in ring.slots())


@pytest.mark.parametrize("hosts", PLACES)
def test_each_slice_crosses_to_each_host_once_per_pass(hosts):
    found = run_ranks(sent, hosts, num_ranks=len(hosts))
    num_hosts, numels = len(set(hosts)), numels_of(len(hosts))
    assert slices_between_hosts(hosts)[1] == (num_hosts - 1) * len(hosts)
    # To each other host once: weights in forward, weights and gradients in backward, which asks for none of item 2.
    once = sum(3 * sum(sizes) for sizes in numels[:2]) + 2 * sum(numels[2])
    assert [sum(of_rank[step] for of_rank, _ in found) for step in range(2)] == [(num_hosts - 1) * once] * 2
    largest = max(max(sizes) for sizes in numels)
    assert {slots for _, slots in found} == {largest * (4 if num_hosts == 2 else 5)}


class SendsLate(Exchange):
    """An exchange whose message is taken from memory only when the sender waits for anything of it."""

    def __init__(self, *, send, to, receive, source, group):
        self.message = dict(send=send, to=to, receive=receive[:0], source=source, group=group)
        super().__init__(send=send[:0], to=to, receive=receive, source=source, group=group)

    def leave(self):
        message, self.message = self.message, None
        if message is not None:
            Exchange(**message).wait()

    def wait_received(self):
        self.leave()
        super().wait_received()

    def wait_sent(self):
        self.leave()


def sums_that_leave_late(hosts):
    hierarchical.Exchange = SendsLate
    ring = make(hosts)
    for items in ([0, 1, 2], [0, 0, 1]):
        train(ring, items)
        for item in items:
            has_sums(ring, item, times=items.count(item))


def test_a_slot_for_sums_is_not_opened_before_what_it_held_has_left():
    run_ranks(sums_that_leave_late, "aabb", num_ranks=4)


def refilled_slot(hosts, note):
    """Rank 1 keeps to a slice in a slot of rank 0, which goes on to the fetch after next, into the same slot."""
    ring = make(hosts)
    train(ring, [0, 1, 2])  # from here on fetches run ahead
    dist.barrier()
    ring.start(fresh=[True] * 3)
    if ring.position == 0:
        await_number = ring._await

        def awaits(numbers, index, value, *, whom, what):
            if what == "its visit of a slice" and numbers[index] < value:
                note[0] = 1  # it waits for its neighbour, as it must
            await_number(numbers, index, value, whom=whom, what=what)

        class Arrives(Exchange):
            def __init__(self, **message):
                super().__init__(**message)
                if ring._num_fetches == len(ring._own.slots) + 1:
                    self.wait_received()  # the earliest that the slot can have other contents
                    note[0] = 2

        ring._await, hierarchical.Exchange = awaits, Arrives
    for item in (0, 1, 2):
        for visit in ring.visits(item, backward=False):
            if ring.position == 1 and item == 0 and visit.index == 3:
                while not note[0]:
                    time.sleep(1e-3)
            assert torch.equal(visit.weights, values(item, visit.index, ring.numels[item][visit.index]))
    ring.finish()


def test_a_slot_is_not_refilled_while_a_neighbour_computes_with_what_is_in_it():
    with mmap.mmap(-1, mmap.PAGESIZE) as note:  # shared by the ranks
        run_ranks(refilled_slot, "aaabbb", note, num_ranks=6)
        assert note[0]


def broken_off_together(hosts):
    ring = make(hosts)
    train(ring, [0, 1, 2])
    for run, stop in [(forward, 0), (forward, 1), (forward, len(hosts) - 1), (backward, 0), (backward, len(hosts) - 2)]:
        dist.barrier()
        ring.start(fresh=[True] * 3)
        if run is backward:
            forward(ring, 0)
        with pytest.raises(Abandoned):
            run(ring, 0, stop=stop)
        ring.restore_owners(after=Abandoned())
        train(ring, [0, 1, 2])
        for item in range(3):
            has_sums(ring, item)


@pytest.mark.parametrize("hosts", [pytest.param("aabb", marks=pytest.mark.slow), "aabbcc"])
def test_a_step_that_breaks_off_on_all_ranks_leaves_nothing_behind(hosts):
    run_ranks(broken_off_together, hosts, num_ranks=len(hosts))


def broken_off_alone(hosts, in_backward):
    transports.group_timeout_s = lambda mesh, device: 3.0
    ring = make(hosts)
    train(ring, [0, 1, 2])
    dist.barrier()
    ring.start(fresh=[True] * 3)
    stop = 1 if ring.position == 1 else None
    try:
        forward(ring, 0, stop=None if in_backward else stop)
        for item in (1, 2):
            forward(ring, item)
        for item in range(3):
            backward(ring, item, stop=stop)
        ring.finish()
    except (Abandoned, RankFailure, HeardFailure) as error:
        ring.restore_owners(after=error)
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_if_one_rank_leaves_alone_nobody_hangs_and_its_neighbour_names_it(in_backward):
    found = run_ranks(broken_off_alone, "aabb", in_backward, num_ranks=4, timeout_s=60)
    assert found[1].startswith("Abandoned")
    assert found[0].startswith("HeardFailure: rank 1 has left this step in the middle")
    assert all("Failure" in of_rank for of_rank in found[2:])


def chosen(hosts, transport, unavailable, options):
    def fail(*_, **__):
        raise SharedMemoryUnavailable("of this")

    if "one" in unavailable:
        transports.SharedMemoryRing = fail
    if "each" in unavailable:
        transports.HierarchicalRing = fail
    try:
        return make(hosts, transport, **options).name
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("hosts", "transport", "unavailable", "options", "expected"),
    [
        ("aabb", "auto", "one", {}, "hierarchical"),
        ("aabb", "auto", "one each", {}, "send_receive"),
        ("aabb", "auto", "one", {"buffering": "in_place"}, "send_receive"),
        ("aabb", "auto", "one", {"wire_dtype": torch.float32}, "send_receive"),
        ("aabb", "send_receive", "", {}, "send_receive"),
        ("abab", "auto", "one", {}, "send_receive"),
        ("aaab", "auto", "one", {}, "send_receive"),
        ("aabb", "hierarchical", "each", {}, "is not possible: of this. Write transport=auto"),
        ("aabb", "hierarchical", "", {"num_hosts": 4}, "are on a, a, b, b. Write hosts=2, or transport=auto"),
        ("aabb", "hierarchical", "", {"wire_dtype": torch.float32}, "as they are at home. Write transport=auto"),
        ("abab", "hierarchical", "", {}, "are on a, b, a, b. Write transport=auto"),
    ],
)
def test_where_ranks_are_decides(hosts, transport, unavailable, options, expected):
    found = run_ranks(chosen, hosts, transport, unavailable, options, num_ranks=4)
    assert len(set(found)) == 1 and found[0].endswith(expected)

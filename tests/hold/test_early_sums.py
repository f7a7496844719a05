"""Sums of gradients that leave under backward: their order, their messages, and steps that do not end."""

import pytest
import torch
import torch.distributed as dist

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import RankFailure
from rotorch.hold.early_sums import EarlySums, Part, in_runs
from rotorch.testing.ranks import run_ranks


class Sent:
    """Sums that are made at once, of a group of one rank; and what was sent."""

    def __init__(self):
        self.sent = []

    def later(self, tensor):
        self.sent.append(tensor)
        return lambda: None

    def part(self, *names, gradients, **more):
        return Part(names, lambda: gradients, self.later, **more)

    def numels(self):
        found, self.sent[:] = [tensor.numel() for tensor in self.sent], []
        return found


def step(sums, *names, last=True):
    """One micro-batch that adds to gradients, each of which may let parts leave."""
    with sums.micro_batch(last=last):
        for name in names:
            sums.added(name)
            sums.leave()


def end(sums):
    sums.send_rest()
    sums.wait()


def test_parts_leave_in_order_when_the_last_micro_batch_has_added_as_often_as_before():
    made = Sent()
    sums = EarlySums(
        [
            made.part("c", gradients=[torch.ones(3)]),
            made.part("a", "b", gradients=[torch.ones(2)]),
            made.part(gradients=[torch.ones(1)]),
        ]
    )
    sums.start()
    step(sums, "c", "c", "b", "a")
    assert made.numels() == []  # nothing is known in the first step
    end(sums)
    assert made.numels() == [3, 2, 1]
    sums.start()
    step(sums, "c", "c", "b", "a", last=False)
    assert made.numels() == []
    step(sums, "c")
    assert made.numels() == []  # twice in the step before
    step(sums, "b", "a")
    assert made.numels() == []  # not past one that has not left
    end(sums)
    assert made.numels() == [3, 2, 1]
    sums.start()
    step(sums, "c", "c")
    assert made.numels() == [3]
    step(sums, "b", "unknown", "a")
    assert made.numels() == [2]
    end(sums)
    assert made.numels() == [1]


def test_a_part_waits_until_it_is_home():
    made = Sent()
    there = {"home": False}
    part = made.part("a", gradients=[torch.ones(2)], is_home=lambda: there["home"])
    sums = EarlySums([part])
    sums.start()
    step(sums, "a")
    end(sums)
    made.numels()
    sums.start()
    with sums.micro_batch(last=True):
        sums.added("a")
        sums.leave()
        assert made.numels() == []
        there["home"] = True
        sums.leave()
        assert made.numels() == [2]


def test_every_gradient_is_a_message_of_its_own_wherever_it_lies():
    """Gradients of other ranks may lie elsewhere: their messages must be as many, and as large."""
    made, flat = Sent(), torch.arange(8.0)
    sums = EarlySums([made.part(gradients=[flat[:2], flat[2:2], flat[2:6], torch.ones(2, 3).t()])])
    sums.start()
    end(sums)
    assert made.numels() == [2, 4, 6]


def test_a_step_whose_forward_uses_more_sends_nothing_early_and_those_behind_it_know():
    made = Sent()
    sums = EarlySums([made.part("a", gradients=[torch.ones(2)])])

    def early(*uses, additions):
        sums.start()
        with sums.micro_batch(last=True):
            for name in uses:
                sums.used(name)
            for _ in range(additions):
                sums.added("a")
                sums.leave()
        found = made.numels()
        end(sums)
        made.numels()
        return found

    assert early("a", additions=1) == []
    assert early("a", additions=1) == [2]
    assert early("a", "a", additions=2) == []
    assert early("a", "a", additions=2) == [2]
    assert early("another", additions=1) == []


def test_an_addition_to_what_has_left_is_refused_by_name():
    made = Sent()
    sums = EarlySums([made.part("head", gradients=[torch.ones(1)])])
    for _ in range(2):
        sums.start()
        step(sums, "head")
        end(sums)
    sums.start()
    with pytest.raises(RankFailure, match="adds more often to the gradient of 'head' than those before"):
        step(sums, "head", "head")


def test_a_model_is_cut_into_runs_of_an_eighth_at_least():
    assert in_runs([(name, 1) for name in range(20)]) == [
        (0, 1, 2),
        (3, 4, 5),
        (6, 7, 8),
        (9, 10, 11),
        (12, 13, 14),
        (15, 16, 17),
        (18, 19),
    ]
    assert in_runs([("large", 90), ("small", 1), ("smaller", 1)]) == [("large",), ("small", "smaller")]
    assert in_runs([(name, 1) for name in range(5)], least=2) == [(0, 1), (2, 3), (4,)]
    assert in_runs([]) == []


class OfRank:
    """Sums of two gradients and one behind backward, over all ranks."""

    def __init__(self):
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ddp",))
        later = AxisGroup.along(mesh, "ddp").all_reduce_later
        self.gradients = {name: torch.zeros(size) for name, size in (("c", 3), ("b", 2), ("rest", 1))}
        self.sums = EarlySums(
            [
                Part(() if name == "rest" else (name,), lambda gradient=gradient: [gradient], later)
                for name, gradient in self.gradients.items()
            ]
        )
        self.scale = 1.0 + dist.get_rank()

    def step(self, *names, breaks=False):
        self.sums.start()
        for gradient in self.gradients.values():
            gradient.fill_(self.scale)
        step(self.sums, *names)
        if breaks:
            return None
        end(self.sums)
        return [gradient.tolist() for gradient in self.gradients.values()]


def break_off_at_different_places(first):
    rank = OfRank()
    steps = [] if first else [rank.step("c", "b")]
    rank.step(*[("c", "b"), ("c",), ()][dist.get_rank()], breaks=True)
    return [*steps, rank.step("c", "b"), rank.step("c", "b")]


@pytest.mark.parametrize("first", [False, True])
def test_steps_after_one_that_ranks_left_at_different_places_are_right(first):
    """In the first step nothing leaves early; later ranks have sent two parts, one and none."""
    right = [[6.0] * 3, [6.0] * 2, [6.0]]
    for found in run_ranks(break_off_at_different_places, first, num_ranks=3):
        assert found == [right] * (2 if first else 3)

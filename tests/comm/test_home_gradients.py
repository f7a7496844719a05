"""Memory of home gradients that comes when it is asked for, and is left to whoever refers to it."""

import weakref

import pytest
import torch
from torch import nn

import rotorch
from rotorch.comm.home_gradients import ComingGradients, StayingGradients
from rotorch.testing.ranks import run_ranks

NUMELS = [3, 4, 5, 6]
PARTS = {2}  # item 2 is the second part of the slice that begins with item 1


@pytest.fixture
def alive():
    """Numbers of elements of each piece of memory that is there."""
    return []


@pytest.fixture
def gradients(alive):
    def make(numel):
        made = torch.zeros(numel)
        alive.append(numel)
        weakref.finalize(made, alive.remove, numel)
        return made

    return ComingGradients(NUMELS, later_parts=PARTS, make=make)


def test_memory_comes_when_it_is_asked_for_once_for_all_parts_of_a_slice(gradients, alive):
    assert alive == []
    assert gradients[2].numel() == 5 and alive == [9]
    gradients[2].fill_(1.0)
    assert gradients[1].numel() == 4 and gradients[2].eq(1.0).all() and alive == [9]
    assert gradients[3].numel() == 6 and alive == [9, 6]


def test_memory_that_is_given_up_goes_with_whoever_refers_to_it(gradients, alive):
    kept = gradients[0].fill_(7.0)
    gradients[1].fill_(7.0)
    gradients.give_up([0, 2])
    assert alive == [3], "the parts of a slice go together"
    assert gradients[0].data_ptr() != kept.data_ptr()
    gradients[0].zero_()
    assert kept.eq(7.0).all() and alive == [3, 3]
    del kept
    assert alive == [3]
    gradients.give_up([0, 3])
    assert alive == []


def test_neighbours_in_one_piece_of_memory_are_one_tensor(gradients):
    assert [flat.numel() for flat in gradients.side_by_side([3, 2, 1, 0])] == [3, 9, 6]
    assert [flat.numel() for flat in gradients.side_by_side([2, 0])] == [3, 5]
    gradients.side_by_side([1, 2])[0].copy_(torch.arange(9))
    assert gradients[1].tolist() == [0, 1, 2, 3] and gradients[2].tolist() == [4, 5, 6, 7, 8]


def test_memory_that_stays_is_in_one_piece_and_may_have_gaps():
    memory = torch.zeros(24)
    starts = (0, 8, 12, 18)
    gradients = StayingGradients([memory[s : s + numel] for s, numel in zip(starts, NUMELS, strict=True)])
    gradients.give_up([0, 1, 2, 3])
    assert [flat.numel() for flat in gradients.side_by_side(range(4))] == [24]
    assert [flat.numel() for flat in gradients.side_by_side([3, 1, 0])] == [12, 6]
    gradients[2].fill_(1.0)
    assert memory.sum() == 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.frozen(x)))).square().mean()


def between_steps(transport):
    """Items that have memory: before a step, before its backward, behind it, and in the next one's forward."""
    plan = {"frozen": "colwise_gather_output", "up": "colwise", "down": "rowwise"}
    torch.manual_seed(0)
    model = rotorch.parallelize(Net(), f"rtp=2[transport={transport}]", plan=plan)
    (gradients,) = (part.ring._home_gradients for part in [model.sharded])
    found = [set(gradients._there)]
    for _ in range(2):
        loss = model(torch.ones(2, 8))
        found.append(set(gradients._there))
        loss.backward()
        found.append(set(gradients._there))
        model.zero_grad()
    trained = {item for unit in model.sharded.units if unit.trained for item in unit.items}
    frozen = {item for unit in model.sharded.units for item in unit.items} - trained
    model.close()
    return found, trained, frozen


def test_a_step_has_gradients_from_its_backward_on_and_none_of_frozen_weights():
    for found, trained, frozen in run_ranks(between_steps, "send_receive", num_ranks=2):
        assert frozen and found == [set(), set(), trained, set(), trained]

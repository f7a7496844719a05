"""Gradients in flat buffers, summed over ranks: when the sums leave, and what they are."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import RankFailure
from rotorch.hold.flat_gradients import FlatGradients
from rotorch.testing.ranks import run_ranks

SIZES = {"unused": 2, "first": 3, "second": 40, "third": 5, "fourth": 40}


class Step:
    """Steps of a model of a few vectors, on one of several ranks, and what was sent when."""

    def __init__(self):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("depth",))
        self.group = AxisGroup.along(mesh, "depth")
        self.weights = {}
        for name, size in SIZES.items():
            leaf = nn.Parameter(torch.zeros(size))
            self.weights[name] = SimpleNamespace(name=name, leaf=leaf, local=leaf.detach(), parameter=leaf)
        self.memory = FlatGradients(sums=dict.fromkeys(SIZES, (self.group,)), homes={})
        self.sent = []
        later = self.group.all_reduce_later

        def counted(tensor):
            self.sent.append(tensor.numel())
            return later(tensor)

        self.group.all_reduce_later = counted

    def backward(self, *names, times=1.0):
        scale = times * (1 + self.group.position)
        sum(self.weights[name].leaf.sum() * scale for name in names).backward()

    def run(self, *micro_batches):
        """Each of them is a list of backward passes, each of them the names that it uses; returns gradients."""
        self.sent.clear()
        self.memory.start(self.weights)
        for number, backwards in enumerate(micro_batches, 1):
            with self.memory.micro_batch(last=number == len(micro_batches)):
                for names in backwards:
                    self.backward(*names)
        under_backward = len(self.sent)
        found = {name: sorted(set(grad.tolist())) for name, grad in self.memory.complete(self.weights).items()}
        return found, under_backward, list(self.sent)


ALL = ("first", "second", "third", "fourth")


def of_all(value):
    """Gradients of a step that uses all but one."""
    return {"unused": [0.0], **{name: [value] for name in ALL}}


def steps():
    step = Step()
    return [
        step.run([ALL]),
        step.run([ALL], [ALL]),
        step.run([("first", "fourth")]),
        step.run([("first", "second", "third")]),
        step.run([ALL]),
    ]


def test_sums_leave_under_backward_from_the_last_weight_on():
    """Not in the first step; and never past a weight that was not reached, so all ranks send the same in one order."""
    for found in run_ranks(steps, num_ranks=2):
        gradients, early, sent = zip(*found, strict=True)
        assert list(sent) == [[40, 45, 5]] * 5
        assert early == (0, 2, 1, 0, 2)
        assert gradients[0] == gradients[4] == of_all(3.0) and gradients[1] == of_all(6.0)
        assert gradients[2] == of_all(3.0) | {"second": [0.0], "third": [0.0]}
        assert gradients[3] == of_all(3.0) | {"fourth": [0.0]}


def add_again():
    step = Step()
    step.run([ALL, ALL])
    within = step.run([ALL, ALL])  # as often as in the first step
    with pytest.raises(
        RankFailure, match=r"adds more often to the gradient of 'fourth' than those before .* use_reentrant=False"
    ):
        step.run([ALL, ALL, ("fourth",)])
    return within


def test_a_gradient_that_is_added_to_after_its_sum_has_left_ends_the_run():
    for gradients, early, _ in run_ranks(add_again, num_ranks=2):
        assert gradients["fourth"] == [6.0] and early == 2


def break_off():
    step = Step()
    step.run([ALL])
    step.memory.start(step.weights)
    with pytest.raises(KeyError), step.memory.micro_batch(last=True):
        step.backward(*ALL)
        raise KeyError
    return step.run([ALL])


def test_a_step_after_one_that_broke_off_is_right():
    """First leave zeros in place of what had not left: other ranks may have sent more."""
    for gradients, early, sent in run_ranks(break_off, num_ranks=2):
        assert gradients == of_all(3.0) and (early, sent) == (3, [5, 40, 45, 5])

"""Gradients in a ring's memory beside those that a user put there or cleared, on one rank whose backward is played."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rotorch.comm.home_gradients import ComingGradients, StayingGradients
from rotorch.comm.ring import Ring, RingSetup
from rotorch.core.spec import Combine, Cut, Unit, UnitKind, Weight
from rotorch.hold.ring_memory import RingMemory
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.mesh import make_mesh
from rotorch.shard.flat import FlatSlices
from rotorch.shard.sites import find_sites
from rotorch.strategies import parse_parallel
from rotorch.testing.fake import as_rank

WEIGHTS = (Weight("weight", (5, 3), 4, Cut(0, 5)), Weight("bias", (5,), 4, Cut(0, 5)))


class PlayedRing(Ring):
    """A ring of one rank with one slice of one unit, and its gradient in memory that stays or comes."""

    def __init__(self, mesh, *, stays):
        super().__init__(RingSetup(mesh, [[20]], torch.float32))
        self._home_weights = [torch.zeros(20)]
        make = partial(torch.full, fill_value=torch.nan)
        staying = StayingGradients([make((20,))])
        coming = ComingGradients([20], later_parts=(), make=lambda numel: make((numel,)))
        self._home_gradients = staying if stays else coming

    def backward(self, value):
        """Overwrites the gradients of all weights of the unit, or adds to all: there is one flag per unit."""
        if self.fresh[0]:
            self.home_gradients(0).zero_()
        self.home_gradients(0).add_(value)
        self.fresh[0] = False

    def _visits(self, item, *, backward, fetch):
        raise NotImplementedError

    def gradient(self, item, visit, *, wait):
        raise NotImplementedError

    def pass_on(self, item, visit):
        raise NotImplementedError


@contextmanager
def in_a_ring(*, stays):
    """A function that takes a step with a gradient, or with no backward, and the two weights of a layer."""
    module = nn.Linear(3, 5)
    unit = SimpleNamespace(
        unit=Unit("layer", UnitKind.MODULE, Combine.SUM, WEIGHTS),
        slices=FlatSlices(WEIGHTS, num_slices=1),
        item=0,
        items=(0,),
        trained=True,
        reached=set(),
    )
    with as_rank(0, num_ranks=2):
        mesh = make_mesh(parse_parallel("ddp=2"), device=torch.device("cpu"))
        ring = PlayedRing(mesh, stays=stays)
        placements = [ShardPlacement.whole(weight, mesh=mesh) for weight in WEIGHTS]
        shards = ShardedWeights(
            placements,
            sites=find_sites(module),
            mesh=mesh,
            device=torch.device("cpu"),
            memory=RingMemory(ring, [unit]),
        )

        def step(value):
            with shards.unsharded():
                shards.start()
                if value is not None:
                    ring.backward(value)
                    shards.finish()

        yield step, shards.held["weight"], shards.held["bias"]


def are_all(gradient, value):
    return torch.equal(gradient, torch.full_like(gradient, value))


@pytest.fixture(params=[True, False], ids=["stays", "comes"])
def stays(request):
    return request.param


def test_a_gradient_that_the_user_put_there_is_added_to(stays):
    with in_a_ring(stays=stays) as (step, weight, bias):
        step(1.0)
        weight.parameter.grad = weight.parameter.grad * 0.5
        step(2.0)
        assert are_all(weight.local_grad, 2.5) and are_all(bias.local_grad, 3.0)


def test_a_gradient_that_the_user_has_cleared_begins_at_zero_beside_one_that_is_kept(stays):
    with in_a_ring(stays=stays) as (step, weight, bias):
        step(1.0)
        weight.parameter.grad = None
        step(2.0)
        assert are_all(weight.local_grad, 2.0) and are_all(bias.local_grad, 3.0)


@pytest.mark.parametrize("both", [True, False])
def test_a_gradient_that_was_cleared_stays_as_it_is_for_whoever_refers_to_it(stays, both):
    with in_a_ring(stays=stays) as (step, weight, bias):
        step(1.0)
        kept, weight.parameter.grad = weight.parameter.grad, None
        if both:
            bias.parameter.grad = None
        step(2.0)
        step(4.0)
        assert are_all(kept.to_local(), 1.0)
        assert are_all(weight.local_grad, 6.0) and are_all(bias.local_grad, 6.0 if both else 7.0)


@pytest.mark.parametrize("cleared", [True, False])
def test_the_gradient_of_a_weight_that_is_frozen_stays_as_it_is(stays, cleared):
    with in_a_ring(stays=stays) as (step, weight, bias):
        step(1.0)
        weight.parameter.requires_grad = False
        if cleared:
            bias.parameter.grad = None
        step(2.0)
        step(4.0)
        assert are_all(weight.local_grad, 1.0) and are_all(bias.local_grad, 6.0 if cleared else 7.0)
        weight.parameter.requires_grad = True
        step(8.0)
        assert are_all(weight.local_grad, 9.0) and are_all(bias.local_grad, 14.0 if cleared else 15.0)


def test_a_gradient_that_is_added_to_is_the_same_tensor(stays):
    with in_a_ring(stays=stays) as (step, weight, _):
        step(1.0)
        before = weight.parameter.grad
        step(2.0)
        assert weight.parameter.grad is before and are_all(before.to_local(), 3.0)


def test_an_evaluation_leaves_gradients_as_they_are(stays):
    with in_a_ring(stays=stays) as (step, weight, bias):
        step(1.0)
        kept, bias.parameter.grad = bias.parameter.grad, None
        with torch.no_grad():
            step(None)
        assert are_all(weight.local_grad, 1.0) and are_all(kept.to_local(), 1.0)
        step(2.0)
        assert are_all(weight.local_grad, 3.0) and are_all(bias.local_grad, 2.0)

"""Gradients in a ring's memory beside those that a user put there or cleared, on one rank whose backward is played."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import nn

from rotorch.core.spec import Combine, Cut, Unit, UnitKind, Weight
from rotorch.hold.ring_memory import RingMemory
from rotorch.hold.sharded_weights import ShardedWeights, ShardPlacement
from rotorch.mesh import make_mesh
from rotorch.shard.flat import FlatSlices
from rotorch.shard.sites import find_sites
from rotorch.strategies import parse_parallel
from rotorch.testing.fake import as_rank

WEIGHTS = (Weight("weight", (5, 3), 4, Cut(0, 5)), Weight("bias", (5,), 4, Cut(0, 5)))


class PlayedRing:
    """A ring with one slice of one unit."""

    numels, position = [[20]], 0

    def __init__(self):
        self._weights, self._gradients = torch.zeros(20), torch.full((20,), torch.nan)

    def home_weights(self, item):
        return self._weights

    def home_gradients(self, item):
        return self._gradients

    def start(self, *, fresh):
        self.fresh = list(fresh)

    def backward(self, value):
        """Overwrites the gradients of all weights of the unit, or adds to all: there is one flag per unit."""
        if self.fresh[0]:
            self._gradients.zero_()
        self._gradients.add_(value)
        self.fresh[0] = False

    def restore_owners(self, *, after=None):
        pass


@contextmanager
def in_a_ring():
    """A function that takes a step with a gradient, and the two weights of a layer."""
    module, ring = nn.Linear(3, 5), PlayedRing()
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
                ring.backward(value)
                shards.finish()

        yield step, shards.held["weight"], shards.held["bias"]


def are_all(gradient, value):
    return torch.equal(gradient, torch.full_like(gradient, value))


def test_a_gradient_that_the_user_put_there_is_added_to():
    with in_a_ring() as (step, weight, bias):
        step(1.0)
        weight.parameter.grad = weight.parameter.grad * 0.5
        step(2.0)
        assert are_all(weight.local_grad, 2.5) and are_all(bias.local_grad, 3.0)


def test_a_gradient_that_the_user_has_cleared_begins_at_zero_beside_one_that_is_kept():
    with in_a_ring() as (step, weight, bias):
        step(1.0)
        weight.parameter.grad = None
        step(2.0)
        assert are_all(weight.local_grad, 2.0) and are_all(bias.local_grad, 3.0)

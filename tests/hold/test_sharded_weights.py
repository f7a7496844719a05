"""Weights at rest and in a pass, on one rank whose others are played: what the module finds, and whose gradients."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Weight
from rotorch.hold.sharded_weights import Memory, ShardedWeights, ShardPlacement
from rotorch.mesh import make_mesh
from rotorch.shard.sharded_weight import Chunk, EarlierGradient
from rotorch.shard.sites import find_sites
from rotorch.strategies import parse_parallel
from rotorch.testing.fake import as_rank

WEIGHTS = [Weight("weight", (5, 3), 4), Weight("bias", (5,), 4)]


@contextmanager
def held(module=None, *, frozen=False, memory=None, place=ShardPlacement.whole):
    """A linear layer and what rank 1 of 2 holds of it."""
    module = nn.Linear(3, 5) if module is None else module
    module.weight.requires_grad_(not frozen)
    with as_rank(1, num_ranks=2):
        mesh = make_mesh(parse_parallel("ddp=2"), device=torch.device("cpu"))
        placements = [place(weight, mesh=mesh) for weight in WEIGHTS]
        sites = find_sites(module)
        yield (
            module,
            ShardedWeights(placements, sites=sites, mesh=mesh, device=torch.device("cpu"), memory=memory),
        )


def test_the_module_finds_plain_weights_in_a_pass_and_dtensors_at_rest():
    with held() as (module, shards):
        values = shards.held["weight"].local.clone()
        assert isinstance(module.weight, DTensor)
        shards.replace("bias", None)
        with shards.unsharded():
            assert module.weight is shards.leaves["weight"] and module.bias is None
            assert torch.equal(module.weight, values)
        assert module.weight is shards.held["weight"].parameter and isinstance(module.bias, DTensor)


def test_a_whole_weight_stays_in_the_memory_of_the_module():
    """A copy would take the memory of the model twice."""
    module = nn.Linear(3, 5)
    memory = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    with held(module) as (_, shards):
        assert {name: weight.local.data_ptr() for name, weight in shards.held.items()} == memory


def step_of(shards, buffer, value, *, around=()):
    """A step whose gradients lie in the same memory as those of the step before; returns the weight's."""
    earlier = [EarlierGradient(held) for held in around if held.parameter.grad is not None]
    with shards.unsharded():
        shards.start()
        if shards.leaves["weight"].requires_grad:
            shards.leaves["weight"].grad = buffer.fill_(value)
        shards.finish()
    for each in earlier:
        each.add_back()
    return shards.held["weight"].parameter.grad


def test_gradients_that_nobody_keeps_stay_in_one_tensor():
    with held(memory=Memory(gradients_stay=True)) as (_, shards):
        weight, buffer, places = shards.held["weight"], torch.empty(5, 3), set()
        for step in range(6):
            gradient = step_of(shards, buffer, 1.0, around=[weight] if step > 3 else [])
            gradient.steps_seen = getattr(gradient, "steps_seen", 0) + 1  # a new tensor may get a freed one's id
            places.add(gradient.to_local().data_ptr())
            del gradient
            if step < 3:  # behind that it adds up
                weight.parameter.grad = None
        assert weight.parameter.grad.steps_seen == 6 and len(places) == 1
        assert torch.equal(weight.local_grad, torch.full((5, 3), 3.0))


def test_a_gradient_that_is_kept_keeps_its_values():
    with held(memory=Memory(gradients_stay=True)) as (_, shards):
        weight, buffer = shards.held["weight"], torch.empty(5, 3)
        kept = step_of(shards, buffer, 1.0)
        weight.parameter.grad = None
        other = step_of(shards, buffer, 2.0)
        assert torch.equal(kept.to_local(), torch.ones(5, 3))
        assert other is not kept and torch.equal(other.to_local(), torch.full((5, 3), 2.0))


@pytest.mark.parametrize("stays", [False, True])
def test_a_gradient_of_a_weight_that_is_frozen_later_stays(stays):
    with held(memory=Memory(gradients_stay=stays)) as (_, shards):
        weight, buffer = shards.held["weight"], torch.empty(5, 3)
        gradient = step_of(shards, buffer, 1.0)
        weight.parameter.requires_grad_(False)
        assert step_of(shards, buffer if stays else torch.empty(5, 3), 2.0) is gradient
        assert torch.equal(gradient.to_local(), torch.ones(5, 3))
        weight.parameter.requires_grad_(True)
        assert torch.equal(
            step_of(shards, buffer if stays else torch.empty(5, 3), 2.0).to_local(), torch.full((5, 3), 3.0)
        )


@pytest.mark.parametrize("stays", [False, True])
def test_gradients_that_were_not_cleared_add_up(stays):
    with held(memory=Memory(gradients_stay=stays)) as (_, shards):
        leaf, buffer = shards.leaves["weight"], torch.empty(5, 3)
        for step in range(3):
            with shards.unsharded():
                shards.start()
                leaf.grad = buffer.fill_(step + 1.0) if stays else torch.full((5, 3), step + 1.0)
                shards.finish()
        assert torch.equal(shards.held["weight"].local_grad, torch.full((5, 3), 6.0))
        assert shards.held["bias"].local_grad is None


def test_a_step_that_breaks_off_leaves_gradients_as_they_were():
    with held(memory=Memory(gradients_stay=True)) as (module, shards):
        buffer = torch.full((5, 3), 2.0)
        with shards.unsharded():
            shards.start()
            shards.leaves["weight"].grad = buffer
            shards.finish()
        with pytest.raises(RuntimeError, match="in a pass"), shards.unsharded():
            shards.start()
            buffer.fill_(7.0)  # this step's own, in the same memory
            raise RuntimeError("in a pass")
        assert torch.equal(shards.held["weight"].local_grad, torch.full((5, 3), 2.0))
        assert module.weight is shards.held["weight"].parameter


@pytest.mark.parametrize("stays", [False, True])
def test_gradients_taken_away_around_a_step_come_back_in_turn(stays):
    with held(memory=Memory(gradients_stay=stays)) as (_, shards):
        leaf, weight, buffer = shards.leaves["weight"], shards.held["weight"], torch.empty(5, 3)

        def step(value):
            with shards.unsharded():
                shards.start()
                leaf.grad = buffer.fill_(value) if stays else torch.full((5, 3), value)
                shards.finish()

        step(1.0)
        outer = EarlierGradient(weight)
        step(2.0)
        inner = EarlierGradient(weight)
        step(4.0)
        assert torch.equal(weight.local_grad, torch.full((5, 3), 4.0))
        inner.add_back()
        outer.add_back()
        assert torch.equal(weight.local_grad, torch.full((5, 3), 7.0))


def test_a_gradient_taken_away_comes_back_to_its_memory_if_a_step_makes_none():
    with held() as (_, shards):
        weight = shards.held["weight"]
        with shards.unsharded():
            shards.start()
            shards.leaves["weight"].grad = torch.full((5, 3), 2.0)
            shards.finish()
        there = weight.local_grad
        earlier = EarlierGradient(weight)
        there.fill_(9.0)  # a sum over a flat buffer in which it lies
        earlier.add_back()
        assert weight.local_grad.data_ptr() == there.data_ptr()
        assert torch.equal(weight.local_grad, torch.full((5, 3), 2.0))


def test_an_evaluation_leaves_gradients_alone():
    with held() as (_, shards):
        gradient = torch.ones(5, 3)
        with shards.unsharded():
            shards.start()
            shards.leaves["weight"].grad = gradient
            shards.finish()
        with torch.no_grad(), shards.unsharded():
            shards.start()
        assert shards.held["weight"].local_grad.data_ptr() == gradient.data_ptr()
        assert shards.held["weight"].earlier is None


def test_a_weight_that_was_frozen_stays_so():
    with held(frozen=True) as (_, shards):
        shards.start()
        shards.held["weight"].parameter.requires_grad_()
        with pytest.raises(ConfigError, match="'weight' was frozen when"):
            shards.start()


def test_the_last_rank_has_fewer_rows():
    with held(place=ShardPlacement.rows_of) as (_, shards):
        assert shards.held["weight"].local.shape == (2, 3)
        assert shards.held["weight"].chunks == (Chunk((3, 0), (2, 3)),)
        assert shards.held["weight"].parameter.shape == (5, 3)


def test_memory_of_a_shard_goes_and_comes_unless_others_lie_in_it():
    given = torch.zeros(6, 3)

    class Given(Memory):
        def shard(self, placement):
            return given[:5] if placement.weight.name == "weight" else None

    with held(memory=Given()) as (_, shards):
        for weight in shards.held.values():
            weight.free()
        assert given.untyped_storage().nbytes() == 6 * 3 * 4
        assert shards.held["bias"].local.untyped_storage().nbytes() == 0
        shards.held["bias"].allocate()
        assert shards.held["bias"].local.fill_(1.0).sum() == 5


def test_a_block_is_held_by_those_among_whom_it_is_not_cut():
    with as_rank(0, num_ranks=2):
        mesh = make_mesh(parse_parallel("tesseract=1x1x2"), device=torch.device("cpu"))
    axis_groups = [
        AxisGroup(axis, size, position, None)
        for axis, size, position in (("depth", 2, 1), ("row", 3, 2), ("col", 4, 1))
    ]
    cuts = list(zip(axis_groups, (None, Cut(0, 5), None), strict=True))
    found = ShardPlacement.on_axis_groups(WEIGHTS[0], chunks=(), shape=(2, 3), mesh=mesh, cuts=cuts)
    assert found.placements == (Replicate(), Shard(0), Replicate())
    assert (found.num_holders, found.holder) == (8, 1 * 4 + 1)

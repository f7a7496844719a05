"""Replicas whose steps use other weights than each other's: the same messages on all of them, and right sums."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_replicas import sums_of_replicas
from torch import nn
from torch.distributed.tensor import DTensor

import rotorch
from rotorch.comm import collectives
from rotorch.testing.ranks import run_ranks

EXACT = 1e-10
PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.1": "rowwise"}


class Layer(nn.Module):
    """A layer with weights that lie side by side in a gradient of both, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.turned = nn.Parameter(torch.randn(8, 6).t())

    def forward(self, x):
        return x + self.mlp(x) + torch.cat([self.a, self.b]) + x[..., :6] @ self.turned


def made_for(layout):
    """A model of float64; without what torch's fully_shard refuses."""
    torch.manual_seed(0)
    module = InAnyOrder().double()
    for layer in module.layers if "fsdp" in layout else ():
        layer.turned = nn.Parameter(layer.turned.detach().contiguous())
    return module


class InAnyOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, labels, order):
        for number in order.tolist():
            x = self.layers[number](x)
        return x


def squares(module):
    sums = [weight.pow(2).sum() for weight in module.parameters()]
    return sum(each.full_tensor() if isinstance(each, DTensor) else each for each in sums)


def loss_of(module, batch, _):
    return F.mse_loss(module(**batch), batch["labels"], reduction="sum")


def loss_and_penalty(module, batch, _):
    """The penalty comes first, so backward comes to it last."""
    penalty = 0.1 * squares(module)
    return penalty + F.mse_loss(module(**batch), batch["labels"], reduction="sum")


def share_of(step, batch_rank, order):
    generator = torch.Generator().manual_seed(100 * step + batch_rank)
    x, labels = (torch.randn(2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "labels": labels, "order": torch.tensor(order)}


def compared(layout, steps, loss, over_messages):
    """Largest error of a step's gradients; per step, sums that left under backward, and all."""
    with pytest.MonkeyPatch.context() as patch:
        sent = sums_of_replicas(patch)
        if over_messages:
            patch.setattr(collectives, "shared_reduce_of", lambda *_, **__: None)
        plain = made_for(layout)
        model = rotorch.parallelize(copy.deepcopy(plain), layout, device="cpu", loss=loss, plan=PLAN)
        each, worst, found = model.num_batch_ranks // 2, 0.0, []
        for step, orders in enumerate(steps):
            sent.clear()
            model.forward_backward([share_of(step, model.batch_rank, orders[model.batch_rank // each])])
            plain.zero_grad()
            for share in range(model.num_batch_ranks):
                loss(plain, share_of(step, share, orders[share // each]), None).backward()
            for name, weight in plain.named_parameters():
                right = torch.zeros_like(weight) if weight.grad is None else weight.grad
                ours = model.full_tensor(name, grad=True)
                ours = torch.zeros_like(weight) if ours is None else ours
                worst = max(worst, float((ours - right).abs().max() / right.abs().max().clamp(min=1)))
            found.append((sum(early for _, early in sent), len(sent)))
            model.module.zero_grad()
        model.close()
    return worst, found


ALL = [0, 1, 2, 3]
STEPS = [(ALL, ALL), (ALL, [0, 2, 3]), ([3, 2], ALL), ([0], [3]), (ALL, ALL)]


@pytest.mark.parametrize(
    ("layout", "over_messages"),
    [
        ("ddp=2,megatron=2", False),
        pytest.param("ddp=2,rtp=2", False, marks=pytest.mark.slow),
        ("ddp=2,rtp=2[transport=send_receive]", False),
        ("ddp=2,fsdp=2", False),
        ("ddp=2,megatron=1", True),
        ("ddp=2,rtp=1", True),
    ],
)
def test_replicas_may_use_other_layers(layout, over_messages):
    """Around a single rank replicas are all ranks, whose other sums must not come between."""
    found = run_ranks(compared, layout, STEPS, loss_of, over_messages, num_ranks=2 if "=1" in layout else 4)
    assert max(worst for worst, _ in found) < EXACT
    assert len({tuple(total for _, total in steps) for _, steps in found}) == 1  # the same messages on all ranks
    if layout != "ddp=2,rtp=2":  # where time decides
        assert all(steps[-1][0] > 0 for _, steps in found)


def steps_alike(layout):
    """Largest difference between the gradients of equal steps, the first of which sends nothing early."""
    model = rotorch.parallelize(made_for(layout), layout, device="cpu", loss=loss_and_penalty, plan=PLAN)
    found = []
    for _ in range(3):
        model.forward_backward([share_of(0, model.batch_rank, ALL)])
        found.append({name: held.local_grad.clone() for name, held in model.weights.items()})
        model.module.zero_grad()
    model.close()
    first = found[0]
    return max(float((later[n] - first[n]).abs().max()) for later in found[1:] for n in first if first[n].numel())


@pytest.mark.parametrize(
    "layout",
    ["ddp=2,fsdp=2", "ddp=2,megatron=2", pytest.param("ddp=2,rtp=2[transport=send_receive]", marks=pytest.mark.slow)],
)
def test_penalties_count(layout):
    """Under fsdp autograd adds to a shard's gradient itself, after fully_shard has."""
    assert max(run_ranks(steps_alike, layout, num_ranks=4)) < EXACT


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("ddp=2,fsdp=2", marks=pytest.mark.slow),  # in loops: test_replicas_in_loops.py
        "ddp=2,rtp=2",
        "ddp=2,rtp=2[transport=send_receive]",
    ],
)
def test_layers_may_be_used_more_often_than_before(layout):
    """A step in which a forward does so sends nothing early, and those behind it know."""
    deeper = [[0, 1, 2, 3], [0, 1, 1, 2, 3], [3, 0, 1, 1, 1, 2, 3], [3, 0, 1, 1, 1, 2, 3], [0, 1, 2, 3]]
    for worst, steps in run_ranks(compared, layout, [(o, o) for o in deeper], loss_of, False, num_ranks=4):
        assert worst < EXACT and [early for early, _ in steps[:3]] == [0, 0, 0]


def all_home(layout):
    model = rotorch.parallelize(made_for(layout), layout, device="cpu", loss=loss_of, plan=PLAN)
    model.forward_backward([share_of(0, model.batch_rank, ALL)])
    ring = model.sharded._inner.ring
    home = all(map(ring.is_home, range(len(ring.numels))))
    model.close()
    return home


def test_all_gradients_are_home_behind_a_step():
    """Gradients that left early were, too: tests above would find other sums."""
    assert run_ranks(all_home, "ddp=2,rtp=2", num_ranks=4) == [True] * 4

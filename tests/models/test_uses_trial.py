"""Trial of the uses of a weight: the functions that get it in a pass, and their dependence on the data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rotorch.models.trial.uses import Use, pattern_of, uses_in_passes


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
        self.conv = nn.Conv1d(4, 4, 3, padding=1, bias=False)
        self.table = nn.Parameter(torch.ones(4, 4))
        self.unused = nn.Linear(4, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(layer(x))
        chosen = ids % len(self.experts)
        for number in chosen.unique().tolist():
            x = x + (chosen == number).unsqueeze(-1) * self.experts[number](x)
        x = self.conv(x.mT).mT + x @ self.conv.weight.sum(-1)
        return x @ self.table.T + self.table.shape[0]


def uses(model, *inputs):
    with torch.no_grad():
        return uses_in_passes(model, [lambda ids=ids: model(ids) for ids in inputs])


FEW, MANY = torch.tensor([[1]]), torch.arange(8).view(2, 4)


def test_uses_are_counted_by_what_they_do():
    found = uses(Model(), FEW, MANY)
    assert found["embed.weight"] == Use(lookups=1)
    assert found["layers.*.weight"] == found["layers.*.bias"] == Use(products=2)
    assert found["conv.weight"] == Use(products=1, others=("sum",), alone=1)
    assert found["table"] == Use(products=1, alone=1)  # to ask for its shape is no use
    assert "unused.weight" not in found


def test_transposes_are_followed_to_what_takes_them():
    class Transposes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, ids):
            x = torch.ones(ids.numel(), 4)
            x = x @ self.a.weight.T + torch.addmm(self.a.bias, x, self.a.weight.transpose(0, 1)) + self.a.bias
            x = F.linear(x, self.b.weight.mT.mT) + torch.einsum("bi,io->bo", x, self.b.weight.t())
            return x + self.b.weight.T.sum() + self.b(x) + 0 * self.a.weight.T.shape[0]

    found = uses(Transposes(), FEW, MANY)
    assert found["a.weight"] == Use(products=2, alone=1)
    assert found["a.bias"] == Use(products=1, others=("add",))
    assert found["b.weight"] == Use(products=2, others=("t", "t"), alone=1)


@pytest.mark.parametrize("inputs", [(FEW, MANY), (MANY, FEW)])
def test_a_use_that_depends_on_the_data_is_found(inputs):
    use = uses(Model(), *inputs)["experts.*.weight"]
    assert use.varies and "depends on the data" in use.obstacle


def test_what_one_pass_alone_shows_is_not_taken_for_granted():
    assert all(use.varies for use in uses(Model(), MANY).values())


def test_a_later_pass_that_fails_shows_nothing():
    assert not uses(Model(), MANY, torch.tensor([[99]]), MANY)["layers.*.weight"].varies


def test_another_order_is_found():
    class Either(Model):
        def forward(self, ids):
            first, second = self.layers if ids.numel() > 1 else reversed(self.layers)
            return second(first(self.embed(ids)))

    assert uses(Either(), FEW, MANY)["layers.*.weight"].varies


@pytest.mark.parametrize(
    ("touch", "said"),
    [
        (lambda w: w.data.clamp_(-1, 1), "takes hold of its 'data'"),
        (lambda w: w.clamp_(-1, 1), "changes it by 'clamp_'"),
        (lambda w: [w[i] for i in range(3)], "'__getitem__', which takes no slices, uses it; 3 such uses"),
    ],
)
def test_what_speaks_against_going_round(touch, said):
    class Touched(nn.Linear):
        def forward(self, x):
            touch(self.weight)
            return F.linear(x, self.weight)

    model = Touched(4, 4)
    assert said in uses(model, torch.ones(1, 4), torch.ones(2, 4))["weight"].obstacle


def test_patterns_leave_out_numbers_of_layers_only():
    assert pattern_of("model.layers.11.mlp.fc1.weight") == "model.layers.*.mlp.fc1.weight"

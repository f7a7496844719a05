"""Calls of a module of experts on some of its experts: their sum is the call on all."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range
from rotorch.models.routed_pairs import RoutedPairs

NUM_EXPERTS, NUM_TOKENS, WIDTH = 5, 12, 6


class Experts(nn.Module):
    """One matrix per expert; numbers from `num_experts` on give their input back."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.num_tokens_seen = NUM_EXPERTS, 0
        self.matrix = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH, dtype=torch.float64))

    def forward(self, x, numbers, weights):
        self.num_tokens_seen += len(x)
        total = torch.zeros_like(x)
        for k in range(numbers.shape[1]):
            for t, number in enumerate(numbers[:, k].tolist()):
                one = F.linear(x[t], self.matrix[number]) if number < self.num_experts else x[t]
                total = total.index_add(0, torch.tensor([t]), (one * weights[t, k]).unsqueeze(0))
        return total


def made(*, most, top_k=2):
    torch.manual_seed(0)
    module = Experts()
    x = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(NUM_TOKENS, top_k, dtype=torch.float64, requires_grad=True)
    return module, x, torch.randint(0, most, (NUM_TOKENS, top_k)), weights


def in_sets(module, x, numbers, weights, *, sets):
    pairs, whole = (
        RoutedPairs(module, name="experts", num_experts=NUM_EXPERTS, leaves=[x, numbers, weights]),
        module.matrix,
    )
    total, start = 0, 0
    anchor = torch.zeros((), requires_grad=True)
    for length in sets:
        part = whole[start : start + length]
        del module.matrix
        module.matrix = part
        assert module.num_experts == NUM_EXPERTS
        output = pairs.run(
            [x, numbers, weights], Range(start, length), run=lambda leaves: module(*leaves), anchor=anchor
        )
        assert output.requires_grad  # a graph also of experts that no token goes to
        total, start = total + output, start + length
        module.matrix = None
        del module.matrix
        module.register_parameter("matrix", whole)
    return total


def test_outputs_of_pairs_are_not_kept():
    """A token that goes to k experts has k rows of outputs: kept, they would take k times what one output does."""
    leaves = [torch.randn(64, WIDTH), torch.randint(0, NUM_EXPERTS, (64, 2)), torch.rand(64, 2)]
    pairs = RoutedPairs(nn.Identity(), name="experts", num_experts=NUM_EXPERTS, leaves=leaves)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        rows = torch.randn(128, WIDTH, requires_grad=True)
        total = pairs.total(leaves, rows, Range(0, NUM_EXPERTS))
    assert total.requires_grad and not any(tensor.is_floating_point() for tensor in saved)


@pytest.mark.parametrize(
    ("most", "sets"),
    [
        (NUM_EXPERTS, (2, 2, 1)),
        (NUM_EXPERTS, (5,)),
        (2, (2, 3)),  # no token goes to the second set
        (NUM_EXPERTS + 2, (3, 2)),  # some give their input back, and count once
    ],
)
def test_sets_of_experts_add_up(most, sets):
    module, x, numbers, weights = made(most=most)
    expected = module(x, numbers, weights)
    module.num_tokens_seen = 0
    total = in_sets(module, x, numbers, weights, sets=sets)
    assert module.num_tokens_seen == numbers.numel()  # each pair once, whatever the number of sets
    torch.testing.assert_close(total, expected)
    loss_weights = torch.randn_like(expected)
    inputs = [x, weights, module.matrix]
    for ours, theirs in zip(
        torch.autograd.grad((total * loss_weights).sum(), inputs),
        torch.autograd.grad((expected * loss_weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, numbers, weights: [x, weights], "has no tensor of int64"),
        (lambda x, numbers, weights: [x, numbers, numbers, weights], "has no tensor of int64"),
        (lambda x, numbers, weights: [x.view(3, 4, WIDTH), numbers, weights], "beside numbers [12, 2]"),
        (lambda x, numbers, weights: [x, numbers - 9, weights], "has a number below 0"),
    ],
)
def test_other_calls_are_refused(change, said):
    module, *leaves = made(most=NUM_EXPERTS)
    with pytest.raises(ConfigError) as error:
        RoutedPairs(module, name="mlp.experts", num_experts=NUM_EXPERTS, leaves=change(*leaves))
    assert said in str(error.value) and "'mlp.experts' (Experts)" in str(error.value)

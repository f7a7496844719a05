import pytest
import torch
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.blocks import recompute_blocks, repeated_blocks
from rotorch.testing.ranks import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(8, 8)])
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale):
        return x + scale * self.drop(self.inside[0](x).tanh())


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Dropout(0.0), Block()])

    def forward(self, x):
        return self.blocks[2](self.blocks[0](x, scale=2.0), scale=3.0)


def test_blocks_are_the_outermost_lists_members_that_have_weights():
    tower = Tower()
    assert repeated_blocks(tower) == [tower.blocks[0], tower.blocks[2]]


def test_a_block_is_computed_again_with_the_same_dropout():
    torch.manual_seed(0)
    tower, x = Tower().double(), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    seen = []
    tower.blocks[0].inside[0].register_forward_hook(lambda *_: seen.append(1))

    def gradients():
        torch.manual_seed(1)
        return torch.autograd.grad(tower(x).square().sum(), [x, *tower.parameters()])

    expected, names = gradients(), [name for name, _ in tower.named_parameters()]
    recompute_blocks(tower, strategy="single")
    assert [name for name, _ in tower.named_parameters()] == names
    assert len(seen) == 1
    found = gradients()
    assert len(seen) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        tower(x)
    assert len(seen) == 4


def _refused():
    for parallel in ("single[recompute=block]", "ddp=1[recompute=block]", "fsdp=1[recompute=block]"):
        kind = parallel[: parallel.index("[")].split("=")[0]
        with pytest.raises(ConfigError, match=f"{kind}: recompute=block: Sequential has no nn.ModuleList"):
            rotorch.parallelize(nn.Sequential(nn.Linear(2, 2)), parallel, device="cpu")


def test_a_model_without_blocks_is_refused():
    run_ranks(_refused, num_ranks=1)

"""Steps of one process on some global batches, for tests that hold layouts to it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rotorch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.shard.materialize import take_recipes
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.batches import Rows
from rotorch.testing.reference import fill, reference_step


def build(config: Any) -> nn.Module:
    """A language model in float64, without values."""
    with rotorch.on_meta():
        return widen(causal_lm(config).train())


def one_process(config: Any, batches: Iterable[Rows], *, seed: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of every step, with plain gradient descent at 0.1."""
    watched, module, steps = build(config), widen(causal_lm(config).train()), []
    fill(module, spec=describe(watched), recipes=take_recipes(watched), seed=seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in batches:
        with exact_arithmetic():
            loss = float(reference_step(module, batch))
        steps.append((loss, {name: p.grad.clone() for name, p in module.named_parameters()}))
        optimizer.step()
    return steps


def mean_gradients(
    module: nn.Module, backwards: Callable[[nn.Module, Any], None], shares: Sequence[Any]
) -> dict[str, Tensor]:
    """By name: means over shares of the gradients that `backwards` of each leaves; zeros where it leaves none."""
    found = {name: torch.zeros_like(weight) for name, weight in module.named_parameters()}
    for share in shares:
        module.zero_grad()
        backwards(module, share)
        for name, weight in module.named_parameters():
            if weight.grad is not None:
                found[name] += weight.grad / len(shares)
    return found

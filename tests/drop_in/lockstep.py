"""Runs an idiom on one process for all shares in turn, and on a rank for its own; compares."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import idioms_of_calls  # noqa: F401, it adds to IDIOMS
import idioms_of_copies  # noqa: F401
import idioms_of_gradients  # noqa: F401
import torch
from idioms import IDIOMS, LEARNING_RATE, Loop
from torch import Tensor
from torch.distributed.tensor import DTensor

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors, relative_error, value_errors

BAR = 1e-10
REFUSED = "refused: "


@dataclass
class Expected:
    """Results of one process for an idiom.

    Attributes:
        gradients: before each update.
        results: of each update.
        values: of all weights in the end.
        said: by share.
    """

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    said: list[list[Tensor]] = field(default_factory=list)


def build(config: Any, *, seed: int) -> torch.nn.Module:
    """A model with values that depend on the seed, in float64, in training mode."""
    module = widen(causal_lm(config)).train()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in name else 0.0))
    return module


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)


def update(how: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    if callable(how):
        return how(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return None


def expected_of(name: str, config: Any, *, num_shares: int) -> Expected:
    """Runs an idiom on this process; gradients are means over shares."""
    found, model = Expected(), build(config, seed=1)
    optimizer, others = optimizer_of(model), {}
    with exact_arithmetic():
        loops = [
            Loop(model, lambda seed: others.setdefault(seed, build(config, seed=seed)), share, config.vocab_size)
            for share in range(num_shares)
        ]
        running, carried = [IDIOMS[name](loop) for loop in loops], {}
        while True:
            asked = [next(each, StopIteration) for each in running]
            if asked[0] is StopIteration:
                break
            for key, parameter in model.named_parameters():
                if parameter.grad is not None:  # what was there before is a mean already
                    before = carried.get(key, torch.zeros_like(parameter))
                    parameter.grad.sub_(before).div_(num_shares).add_(before)
            found.gradients.append({k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()})
            found.results.append(update(asked[0], model, optimizer))
            carried = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    found.values = {key: p.detach().clone() for key, p in model.named_parameters()}
    found.said = [loop.said for loop in loops]
    return found


class Models:
    """Parallel models of one layout on this rank: made once, and given a seed's values each time they are asked for.

    Args:
        config: of which kind.
        layout: how they are spread.
    """

    def __init__(self, config: Any, layout: str) -> None:
        self._config, self._layout = config, layout
        self._made: list[Any] = []
        self._num_taken = 0

    def make(self, seed: int) -> Any:
        """The next model, as if it were new."""
        fresh = build(self._config, seed=seed)
        if self._num_taken == len(self._made):
            self._made.append(rotorch.parallelize(fresh, self._layout, device="cpu"))
        else:
            self._reset(self._made[self._num_taken], dict(fresh.named_parameters()))
        self._num_taken += 1
        return self._made[self._num_taken - 1]

    def give_back(self, *, well: bool) -> None:
        """All models; those that something went wrong with are not used again."""
        self._num_taken = 0
        if not well:
            self._made = []

    def close(self) -> None:
        for model in self._made:
            model.close()

    def _reset(self, model: Any, values: dict[str, Tensor]) -> None:
        for name, held in model.weights.items():
            held.parameter.grad = None
            for chunk in held.chunks:
                chunk.of_local(held.local).copy_(chunk.of_whole(values[name].detach()))
        model.values_changed()


def problems_of(name: str, config: Any, expected: Expected, *, models: Models) -> list[str]:
    """Runs an idiom on this rank; says what differs, or that it is refused."""
    try:
        found = list(_problems(name, config, expected, models=models))
    except ConfigError as error:
        found = [REFUSED + str(error)]
    except BaseException:
        found = [traceback.format_exc()]
    models.give_back(well=not found)
    return found


def _problems(name: str, config: Any, expected: Expected, *, models: Models) -> Any:
    model = models.make(1)
    optimizer = optimizer_of(model)
    loop = Loop(model, models.make, model.batch_rank, config.vocab_size)
    with exact_arithmetic():
        for number, asked in enumerate(IDIOMS[name](loop)):
            for weight, error in gradient_errors(model.weights, expected.gradients[number]).items():
                if not error <= BAR:
                    yield f"update {number}: gradient of {weight} is off by {error:.1e}"
            for key, held in model.weights.items():
                if (held.parameter.grad is None) != (expected.gradients[number][key] is None):
                    yield f"update {number}: {key} has {'no' if held.parameter.grad is None else 'a'} gradient"
            result = update(asked, model, optimizer)
            if expected.results[number] is not None:
                result = result.full_tensor() if isinstance(result, DTensor) else result
                error = relative_error(result, expected.results[number])
                if not error <= BAR:
                    yield f"update {number}: the result is off by {error:.1e}"
    for weight, error in value_errors(model.weights, expected.values).items():
        if not error <= BAR:
            yield f"{weight} is off by {error:.1e} in the end"
    theirs = expected.said[model.batch_rank]
    if len(loop.said) != len(theirs):
        yield f"said {len(loop.said)} numbers, not {len(theirs)}"
    for number, (mine, other) in enumerate(zip(loop.said, theirs, strict=False)):
        if mine.shape != other.shape or not relative_error(mine, other) <= BAR:
            yield f"number {number} that was said differs: {mine.shape} and {other.shape}, {mine.flatten()[:3]}"

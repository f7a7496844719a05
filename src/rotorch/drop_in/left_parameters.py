"""Parameters that a module has left behind in `parallelize`, and optimizers and lists that still have them.

Such an optimizer would find no gradients and change nothing, without a word, and so would clipping over such a list.
torch's DDP keeps a module's parameters, so loops that make the optimizer first are common.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rotorch.core.errors import ConfigError

_LEFT = "left_by_parallelize"
"""Attribute of a parameter that is its module's no more."""


class LeftParameter(nn.Parameter):
    """A parameter that is its module's no more: the same object, its values and all; its copies are plain ones.

    Clipping asks for gradients and passes over those that are None. Another module that has it too may have left one
    in it, and a frozen one has none by right.
    """

    @property  # type: ignore[override]
    def grad(self) -> Tensor | None:
        """The gradient.

        Raises:
            ConfigError: there is none where one would be expected.
        """
        found: Tensor | None = super().grad
        if found is None and self.requires_grad:
            raise ConfigError(
                f"a parameter of shape {list(self.shape)} was asked for its gradient: it is one of the model before "
                "parallelize, and none will come. Take model.parameters() again, after parallelize"
            )
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        torch.Tensor.grad.__set__(self, None)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the same values."""
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))  # type: ignore[return-value]


def mark_left(before: Sequence[nn.Parameter], module: nn.Module) -> None:
    """Makes those of `before` that `module` has no more refuse to be clipped, and optimizers to step with them."""
    _watch_steps()
    kept = {id(parameter) for parameter in module.parameters()}
    for parameter in before:
        if id(parameter) not in kept:
            setattr(parameter, _LEFT, True)
            if type(parameter) is nn.Parameter:  # others bring a class of their own
                parameter.__class__ = LeftParameter


@cache  # once in a process: torch calls it at each step of every optimizer
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_left)


def _refuse_left(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if any(hasattr(parameter, _LEFT) for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} was made before parallelize, over parameters that the model has no more: its "
            "steps would change nothing. Make it after parallelize, over model.parameters()"
        )

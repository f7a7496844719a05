"""Outputs of norms that backward recomputes from their inputs, so that no unit keeps them.

Where units are recomputed, a unit keeps its inputs, and the norm before it keeps its own: the residual stream. These
are two tensors of one size in place of one, although the norm takes a thousandth of the unit's time. So a norm attaches
a recipe to its output, and a unit that gets this output keeps the norm's input, which is kept anyway.

The recipe is void once the output or the input has been written to. Only norms attach one: other modules between units
may draw random numbers, or take as long as a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.models.blocks import recompute
from rotorch.ops.autocast_state import AutocastState

_NOTE = "_rotorch_recipe"


@dataclass(frozen=True)
class NormRecipe:
    """The recipe of a norm's output: its `forward`, under `autocast`."""

    forward: Callable[[Tensor], Tensor]
    autocast: AutocastState

    def again(self, source: Tensor) -> Tensor:
        """Returns the output, made from the norm's input."""
        with torch.no_grad(), self.autocast.again():
            return self.forward(source)


@dataclass(frozen=True)
class _Note:
    """Attached to an output: its recipe, its source, and the versions of both at that moment."""

    how: NormRecipe
    source: Tensor
    versions: tuple[int, int]


def recompute_norm(norm: nn.Module) -> None:
    """Makes a module keep only its input in forward; if it is a norm, its outputs get their recipe. In place."""
    dense = norm.forward
    recompute(norm)
    if "Norm" in type(norm).__name__:
        norm.forward = partial(_noting, norm.forward, dense)  # type: ignore[method-assign]


def _noting(forward: Callable[..., Any], dense: Callable[[Tensor], Tensor], /, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if torch.is_grad_enabled() and isinstance(output, Tensor) and len(args) == 1 and not kwargs:
        (source,) = args
        if isinstance(source, Tensor) and output is not source:  # else it would refer to itself
            how = NormRecipe(dense, AutocastState.now(output.device.type))
            setattr(output, _NOTE, _Note(how, source, (output._version, source._version)))
    return output


def hand_on_recipe(tensor: Tensor, *, to: Tensor) -> None:
    """Gives `to`, a view of all of a norm's output, the recipe of that; does nothing for other tensors."""
    how, source = recipe_of(tensor)
    if how is not None:
        setattr(to, _NOTE, _Note(how, source, (to._version, source._version)))


def recipe_of(tensor: Tensor) -> tuple[NormRecipe | None, Tensor]:
    """Returns a norm's output as (recipe, source), if neither has been written to since; else (None, the tensor)."""
    note: _Note | None = getattr(tensor, _NOTE, None)
    # A write to either, by a hook or in place, makes the recipe give something else than the unit was given.
    if note is None or note.versions != (tensor._version, note.source._version):
        return None, tensor
    return note.how, note.source

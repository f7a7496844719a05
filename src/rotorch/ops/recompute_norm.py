"""Outputs of norms that backward makes again from their inputs, so that nobody keeps them.

Where units are computed again, a unit keeps its inputs, and the norm before it keeps its own: the residual stream. Two
tensors of one size in place of one, for what takes a thousandth of the unit's time to make. So a norm leaves a note on
its output how to make it, and a unit that gets it keeps the norm's input, which is kept anyway.

The note is of no use any more once somebody has written to the output or to the input. Only norms leave one: what else
lies between units may draw random numbers, or take as long as a unit.
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

_NOTE = "_rotorch_remake"


@dataclass(frozen=True)
class Remake:
    """How a norm's output is made: by its `forward`, under `autocast`."""

    forward: Callable[[Tensor], Tensor]
    autocast: AutocastState

    def again(self, source: Tensor) -> Tensor:
        """The output, from what the norm was given."""
        with torch.no_grad(), self.autocast.again():
            return self.forward(source)


@dataclass(frozen=True)
class _Note:
    """On an output: how it was made, what from, and the versions of both then."""

    how: Remake
    source: Tensor
    versions: tuple[int, int]


def recompute_norm(norm: nn.Module) -> None:
    """Lets a module keep only its input in forward; if it is a norm, its outputs say how they are made. In place."""
    dense = norm.forward
    recompute(norm)
    if "Norm" in type(norm).__name__:
        norm.forward = partial(_noting, norm.forward, dense)  # type: ignore[method-assign]


def _noting(forward: Callable[..., Any], dense: Callable[[Tensor], Tensor], /, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if torch.is_grad_enabled() and isinstance(output, Tensor) and len(args) == 1 and not kwargs:
        (source,) = args
        if isinstance(source, Tensor) and output is not source:  # else it would refer to itself
            how = Remake(dense, AutocastState.now(output.device.type))
            setattr(output, _NOTE, _Note(how, source, (output._version, source._version)))
    return output


def remake_of(tensor: Tensor) -> tuple[Remake | None, Tensor]:
    """How to make a tensor again and what from, if a norm has left a note and it is as it was made; else the tensor."""
    note: _Note | None = getattr(tensor, _NOTE, None)
    if note is None or note.versions != (tensor._version, note.source._version):
        return None, tensor
    return note.how, note.source

"""A unit's weights gathered whole for one use, for functions that have no rule for slices.

Over messages the slices are copied into a tensor that lives as long as autograd needs it, as under FSDP; where they lie
side by side in shared memory nothing is copied. The gradient arrives whole and goes home slice by slice, as always.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.comm.ring import Visit
from rotorch.core.spec import Range
from rotorch.ops.rotate import RotatingUnit, SliceGradient
from rotorch.ops.side_by_side import OrderedAdds


def gather_weights(unit: RotatingUnit) -> list[Tensor]:
    """The unit's weights, whole, in the dtype that modules see. Differentiable through the ring.

    All ranks of the ring call it for the same units in the same order. Sends the unit's slices once (nothing where they
    lie side by side), in backward the gradients.
    """
    if not torch.is_grad_enabled() or not unit.trained:
        return _gather(unit)
    return list(_GatherWeights.apply(unit, unit.anchor))


def _gather(unit: RotatingUnit) -> list[Tensor]:
    if unit.whole is not None:
        return [unit.whole.data]  # not the tensor that all passes share: this one gets a graph of its own
    home = unit.ring.home_weights(unit.item)
    whole = [home.new_empty(weight.shape, dtype=unit.dtype) for weight in unit.slices.weights]
    for part, visit in unit.visits_of_parts(backward=False):
        for weight, values, target in zip(unit.slices.weights, part.weights(visit), whole, strict=True):
            for chunk in part.slices.chunks(weight, index=visit.index):
                chunk.of_whole(target).copy_(chunk.of_local(values.detach()))
    return whole


class _GatherWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # zeros would count as gradients of weights that the function did not use
        return tuple(_gather(unit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        if unit.whole is not None:
            (grad,) = grads
            OrderedAdds(unit, partial(_add, unit, grad), reaches=grad is not None).go_on()
            return None, None
        # Gradients only: autograd has the whole weight, so no slice needs to come again.
        for part, visit in unit.visits_of_parts(backward=True, fetch=False):
            _add_slice(part, visit, grads)
        return None, None


def _add(unit: RotatingUnit, whole: Tensor | None, gradient: Tensor, fresh: bool, part: Range) -> None:
    """Adds a slice's part of a whole gradient, if there is one, to the slice's gradient."""
    if whole is None:
        if fresh:
            gradient.zero_()
        return
    cut = unit.slices.weights[0].cut
    if cut is None:
        raise AssertionError(f"{unit.unit.name} is not cut")
    mine = whole.narrow(cut.dim, part.start, part.length)
    gradient.copy_(mine) if fresh else gradient.add_(mine)


def _add_slice(unit: RotatingUnit, visit: Visit, grads: tuple[Tensor | None, ...]) -> None:
    receiver = SliceGradient(unit, visit, wait=True)
    for number, (weight, grad) in enumerate(zip(unit.slices.weights, grads, strict=True)):
        if grad is None:
            continue
        chunks = unit.slices.chunks(weight, index=visit.index)
        parts = [chunk.of_whole(grad) for chunk in chunks]
        # A fused weight has one part in each of its blocks; the slice has them side by side.
        receiver.add(number, parts[0] if len(parts) == 1 else torch.cat(parts, dim=chunks[0].dim))
    receiver.pass_on()

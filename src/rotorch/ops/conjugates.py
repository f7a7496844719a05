"""Pairs of operations around what is cut over an axis whose ranks share a batch (Megatron-LM, arXiv 1909.08053).

Ranks that share a batch hold equal activations and equal gradients outside of what is cut. Going in, forward does
nothing and backward sums, since each rank's part of the computation gives a part of the gradient; coming out, forward
sums and backward does nothing, since the gradient is whole on every rank. The same for outputs that are placed side by
side. All ranks of the axis call each of them in the same order, with tensors of equal shapes but for the dim that is
cut.

[Note: who owns a gradient]
    Each function says which of the two conventions holds on its sides. "Equal": the tensor is the same on all ranks and
    so is its gradient, whole. "Part": tensor or gradient are this rank's share, and the sum over ranks is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup

_Move = Callable[[Tensor, int, Sequence[int], AxisGroup], Tensor]


def copy_to_region(x: Tensor, *, axis_group: AxisGroup) -> Tensor:
    """Lets an equal tensor into what is cut: `x` itself, its gradient summed over `axis_group`."""
    return x if axis_group.size == 1 else _CopyToRegion.apply(x, axis_group)


def reduce_from_region(x: Tensor, *, axis_group: AxisGroup) -> Tensor:
    """Sums parts over `axis_group` to an equal tensor; the gradient passes as it is."""
    return x if axis_group.size == 1 else _ReduceFromRegion.apply(x, axis_group)


def gather_from_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Makes an equal tensor of what each rank has a stretch of along `dim`; of the gradient each takes its stretch."""
    return x if axis_group.size == 1 else _Along.apply(x, gathered_along, _own, dim, tuple(lengths), axis_group)


def scatter_to_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Takes this rank's stretch of an equal tensor along `dim`; its gradient is placed side by side."""
    return x if axis_group.size == 1 else _Along.apply(x, _own, gathered_along, dim, tuple(lengths), axis_group)


class Boundary:
    """How activations go into a module that is cut, and how its output comes out: equal on both sides.

    Attributes:
        axis_group: the ranks over which it is cut.
    """

    def __init__(self, axis_group: AxisGroup) -> None:
        self.axis_group = axis_group

    def enter_all(self, inputs: Sequence[Any]) -> list[Any]:
        """What the module's code sees of its inputs, of which some are tensors."""
        return [self.enter(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]

    def inside(self) -> AbstractContextManager[object]:
        """Around the module's code, after `enter_all`."""
        return nullcontext()

    def enter(self, x: Tensor) -> Tensor:
        """What the module's code sees of an input that requires a gradient."""
        return copy_to_region(x, axis_group=self.axis_group)

    def leave(self, x: Tensor) -> Tensor:
        """What the code around the module sees of an output, of which this rank has a part."""
        return reduce_from_region(x, axis_group=self.axis_group)


class PartlySynced(Boundary):
    """Only the first channels of outputs are summed; the others stay each rank's own, so activations part.

    CAAT-Net (arXiv 2506.19645). What stays own is scaled by the square root of the number of ranks, as large as a sum
    of independent parts. Activations are no longer equal, so each rank's gradients are parts of sums throughout:
    nothing is summed on the way in, and on the way out the gradient of what was summed. That is the derivative of what
    forward computes, for as many bytes as forward sends.

    Args:
        axis_group: the ranks over which modules are cut.
        num_synced: how many channels of an output of so many features are summed.
    """

    def __init__(self, axis_group: AxisGroup, *, num_synced: Callable[[int], int]) -> None:
        super().__init__(axis_group)
        self._num_synced = num_synced

    def enter(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The first channels summed, the others scaled."""
        return x if self.axis_group.size == 1 else _SyncSome.apply(x, self._num_synced(x.shape[-1]), self.axis_group)


def sum_of_parts(x: Tensor, *, axis_group: AxisGroup) -> Tensor:
    """Sums over `axis_group`, its gradient too: each rank goes on with it for its own part (see `PartlySynced`)."""
    return x if axis_group.size == 1 else _SumOfParts.apply(x, axis_group)


def _summed(x: Tensor, axis_group: AxisGroup) -> Tensor:
    return axis_group.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _own(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    return x.split(list(lengths), dim=dim)[axis_group.position].contiguous()


def gathered_along(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """All ranks' stretches of `lengths` along `dim`, side by side. Not differentiable."""
    longest = max(lengths)
    parts = axis_group.all_gather(_padded(x.movedim(dim, 0), longest)).split(longest)
    return torch.cat([p[:n] for p, n in zip(parts, lengths, strict=True)]).movedim(0, dim).contiguous()


def summed_stretch(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """This rank's stretch of `lengths` along `dim` of the sum of `x` over ranks. Not differentiable."""
    longest, moved = max(lengths), x.movedim(dim, 0)
    if min(lengths) < longest:
        moved = torch.cat([_padded(part, longest) for part in moved.split(list(lengths))])
    mine = axis_group.reduce_scatter(moved.contiguous())[: lengths[axis_group.position]]
    return mine.movedim(0, dim).contiguous()


def _padded(part: Tensor, length: int) -> Tensor:
    """`part [n, ..]` with zeros behind it: `[length, ..]`, contiguous. Messages are of one size on all ranks."""
    if part.shape[0] == length:
        return part.contiguous()
    padded = part.new_zeros(length, *part.shape[1:])
    padded[: part.shape[0]].copy_(part)
    return padded


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis_group: AxisGroup) -> Tensor:
        ctx.axis_group = axis_group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _summed(grad, ctx.axis_group), None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis_group: AxisGroup) -> Tensor:
        return _summed(x, axis_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _SumOfParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis_group: AxisGroup) -> Tensor:
        ctx.axis_group = axis_group
        return _summed(x, axis_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _summed(grad, ctx.axis_group), None


class _SyncSome(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_synced: int, axis_group: AxisGroup) -> Tensor:
        ctx.num_synced, ctx.axis_group = num_synced, axis_group
        return _some_summed(x, num_synced, axis_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _some_summed(grad, ctx.num_synced, ctx.axis_group), None, None


def _some_summed(x: Tensor, num_synced: int, axis_group: AxisGroup) -> Tensor:
    first, own = x.split([num_synced, x.shape[-1] - num_synced], dim=-1)
    return torch.cat([_summed(first, axis_group), own * axis_group.size**0.5], dim=-1)


class _Along(Function):
    """One operation along a dim in forward, its conjugate in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: _Move, back: _Move, dim: int, lengths: Sequence[int], axis_group: AxisGroup
    ) -> Tensor:
        ctx.back, ctx.place = back, (dim, lengths, axis_group)
        return forth(x, *ctx.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, *ctx.place), *[None] * 5

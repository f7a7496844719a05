"""Pairs of operations around modules that are cut over ranks which share a batch (Megatron-LM, arXiv 1909.08053).

Ranks that share a batch hold equal activations and equal gradients outside of such modules. At the input, forward does
nothing and backward sums, since each rank's part of the computation gives a part of the gradient; at the output,
forward sums and backward does nothing, since the gradient is whole on every rank. Gather and scatter are the same for
outputs that are concatenated. All ranks of the axis call each of them in the same order, with tensors of equal shapes
except for the dim that is cut.

[Note: two conventions]
    Each function names the convention on its two sides. "Equal": the tensor is the same on all ranks, and its whole
    gradient too. "Part": the tensor or gradient is this rank's summand of a sum over ranks.
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
    """Passes an equal tensor into a cut module: `x` itself; its gradient is summed over `axis_group`."""
    return x if axis_group.size == 1 else _CopyToRegion.apply(x, axis_group)


def reduce_from_region(x: Tensor, *, axis_group: AxisGroup) -> Tensor:
    """Sums parts over `axis_group` to an equal tensor; the gradient passes unchanged."""
    return x if axis_group.size == 1 else _ReduceFromRegion.apply(x, axis_group)


def gather_from_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Gathers the ranks' shards along `dim` to an equal tensor; each rank takes its shard of the gradient."""
    return x if axis_group.size == 1 else _Along.apply(x, all_gather_along, _own, dim, tuple(lengths), axis_group)


def scatter_to_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Takes this rank's shard of an equal tensor along `dim`; the gradient is gathered."""
    return x if axis_group.size == 1 else _Along.apply(x, _own, all_gather_along, dim, tuple(lengths), axis_group)


def gather_to_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Gathers the ranks' shards along `dim` for a cut module; the gradients, parts of a sum, are reduce-scattered."""
    return _Along.apply(x, all_gather_along, reduce_scatter_along, dim, tuple(lengths), axis_group)


def reduce_scatter_from_region(x: Tensor, *, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Sums parts to this rank's shard of the sum along `dim`; the gradient is gathered."""
    return _Along.apply(x, reduce_scatter_along, all_gather_along, dim, tuple(lengths), axis_group)


class ParallelRegion:
    """The operations at inputs and outputs of a module that is cut: activations are equal before and behind it.

    Attributes:
        axis_group: the ranks over which it is cut.
    """

    def __init__(self, axis_group: AxisGroup) -> None:
        self.axis_group = axis_group

    def enter_all(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs as the module's code gets them; some are tensors."""
        # Masks and positions have no gradient to sum, and stay out of the graph.
        return [self.enter(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]

    def inside(self) -> AbstractContextManager[object]:
        """Returns a block for the module's code, after `enter_all`."""
        return nullcontext()

    def enter(self, x: Tensor) -> Tensor:
        """Returns an input that requires a gradient as the module's code gets it."""
        return copy_to_region(x, axis_group=self.axis_group)

    def leave(self, x: Tensor) -> Tensor:
        """Turns this rank's part of an output into the output that the code around the module gets."""
        return reduce_from_region(x, axis_group=self.axis_group)


class PartlySyncedRegion(ParallelRegion):
    """Region that sums only the first channels of outputs; the others stay each rank's own, so activations differ.

    CAAT-Net (arXiv 2506.19645). The other channels are scaled by the square root of the number of ranks, to be as large
    as a sum of independent parts. Activations are no longer equal, so each rank's gradients are parts of sums
    throughout: backward sums nothing at the input, and at the output the gradient of the summed channels. That is
    forward's exact derivative, for as many bytes as forward sends.

    Args:
        axis_group: the ranks over which modules are cut.
        num_synced: gives the number of summed channels for an output's number of features.
    """

    def __init__(self, axis_group: AxisGroup, *, num_synced: Callable[[int], int]) -> None:
        super().__init__(axis_group)
        self._num_synced = num_synced

    def enter(self, x: Tensor) -> Tensor:
        """Returns the input unchanged."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sums the first channels and scales the others."""
        return x if self.axis_group.size == 1 else _SyncSome.apply(x, self._num_synced(x.shape[-1]), self.axis_group)


def sum_of_parts(x: Tensor, *, axis_group: AxisGroup) -> Tensor:
    """Sums over `axis_group`, the gradient too: ranks use the sum in different computations (`PartlySyncedRegion`)."""
    return x if axis_group.size == 1 else _SumOfParts.apply(x, axis_group)


def _summed(x: Tensor, axis_group: AxisGroup) -> Tensor:
    # A copy: the sum is made in place, and `x` belongs to autograd, or to the caller.
    return axis_group.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _own(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    # A copy, also of a part that is contiguous: a view would keep all of `x` in memory, and autograd lets nobody write
    # into a view that a function returns.
    return x.split(list(lengths), dim=dim)[axis_group.position].clone(memory_format=torch.contiguous_format)


def all_gather_along(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Concatenates all ranks' shards of `lengths` along `dim`. Not differentiable."""
    longest = max(lengths)
    # The cut dim first, so that the ranks' parts follow one another in the gathered tensor.
    parts = axis_group.all_gather(_padded(x.movedim(dim, 0), longest)).split(longest)
    return torch.cat([p[:n] for p, n in zip(parts, lengths, strict=True)]).movedim(0, dim).contiguous()


def reduce_scatter_along(x: Tensor, dim: int, lengths: Sequence[int], axis_group: AxisGroup) -> Tensor:
    """Sums `x` over ranks; returns this rank's shard of `lengths` along `dim`. Not differentiable."""
    # The cut dim first, so that each rank's part is one contiguous message.
    longest, moved = max(lengths), x.movedim(dim, 0)
    # reduce_scatter takes parts of one size: shorter shards are padded, and the padding is cut off below.
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
        # Whole on every rank already: another sum would count it once per rank.
        return grad, None


class _SumOfParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis_group: AxisGroup) -> Tensor:
        ctx.axis_group = axis_group
        return _summed(x, axis_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Every rank's use of the sum has a loss of its own: their gradients add up.
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
        ctx.back, ctx.along = back, (dim, lengths, axis_group)
        return forth(x, *ctx.along)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, *ctx.along), *[None] * 5

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

from rotorch.comm.line import Line

_Move = Callable[[Tensor, int, Sequence[int], Line], Tensor]


def copy_to_region(x: Tensor, *, line: Line) -> Tensor:
    """Lets an equal tensor into what is cut: `x` itself, its gradient summed over `line`."""
    return x if line.size == 1 else _CopyToRegion.apply(x, line)


def reduce_from_region(x: Tensor, *, line: Line) -> Tensor:
    """Sums parts over `line` to an equal tensor; the gradient passes as it is."""
    return x if line.size == 1 else _ReduceFromRegion.apply(x, line)


def gather_from_region(x: Tensor, *, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
    """Makes an equal tensor of what each rank has a stretch of along `dim`; of the gradient each takes its stretch."""
    return x if line.size == 1 else _Along.apply(x, gathered_along, _own, dim, tuple(lengths), line)


def scatter_to_region(x: Tensor, *, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
    """Takes this rank's stretch of an equal tensor along `dim`; its gradient is placed side by side."""
    return x if line.size == 1 else _Along.apply(x, _own, gathered_along, dim, tuple(lengths), line)


class Boundary:
    """How activations go into a module that is cut, and how its output comes out: equal on both sides.

    Attributes:
        line: the ranks over which it is cut.
    """

    def __init__(self, line: Line) -> None:
        self.line = line

    def enter_all(self, inputs: Sequence[Any]) -> list[Any]:
        """What the module's code sees of its inputs, of which some are tensors."""
        return [self.enter(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]

    def inside(self) -> AbstractContextManager[object]:
        """Around the module's code, after `enter_all`."""
        return nullcontext()

    def enter(self, x: Tensor) -> Tensor:
        """What the module's code sees of an input that requires a gradient."""
        return copy_to_region(x, line=self.line)

    def leave(self, x: Tensor) -> Tensor:
        """What the code around the module sees of an output, of which this rank has a part."""
        return reduce_from_region(x, line=self.line)


class PartlySynced(Boundary):
    """Only the first channels of outputs are summed; the others stay each rank's own, so activations part.

    CAAT-Net (arXiv 2506.19645). What stays own is scaled by the square root of the number of ranks, as large as a sum
    of independent parts. Activations are no longer equal, so each rank's gradients are parts of sums throughout:
    nothing is summed on the way in, and on the way out the gradient of what was summed. That is the derivative of what
    forward computes, for as many bytes as forward sends.

    Args:
        line: the ranks over which modules are cut.
        num_synced: how many channels of an output of so many features are summed.
    """

    def __init__(self, line: Line, *, num_synced: Callable[[int], int]) -> None:
        super().__init__(line)
        self._num_synced = num_synced

    def enter(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The first channels summed, the others scaled."""
        return x if self.line.size == 1 else _SyncSome.apply(x, self._num_synced(x.shape[-1]), self.line)


def sum_of_parts(x: Tensor, *, line: Line) -> Tensor:
    """Sums over `line`, its gradient too: where each rank goes on with it for its own part (see `PartlySynced`)."""
    return x if line.size == 1 else _SumOfParts.apply(x, line)


def _summed(x: Tensor, line: Line) -> Tensor:
    return line.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _own(x: Tensor, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
    return x.split(list(lengths), dim=dim)[line.position].contiguous()


def gathered_along(x: Tensor, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
    """All ranks' stretches of `lengths` along `dim`, side by side. Not differentiable."""
    longest = max(lengths)
    parts = line.all_gather(_padded(x.movedim(dim, 0), longest)).split(longest)
    return torch.cat([p[:n] for p, n in zip(parts, lengths, strict=True)]).movedim(0, dim).contiguous()


def summed_stretch(x: Tensor, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
    """This rank's stretch of `lengths` along `dim` of the sum of `x` over ranks. Not differentiable."""
    longest, moved = max(lengths), x.movedim(dim, 0)
    if min(lengths) < longest:
        moved = torch.cat([_padded(part, longest) for part in moved.split(list(lengths))])
    mine = line.reduce_scatter(moved.contiguous())[: lengths[line.position]]
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
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _summed(grad, ctx.line), None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return _summed(x, line)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _SumOfParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return _summed(x, line)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _summed(grad, ctx.line), None


class _SyncSome(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_synced: int, line: Line) -> Tensor:
        ctx.num_synced, ctx.line = num_synced, line
        return _some_summed(x, num_synced, line)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _some_summed(grad, ctx.num_synced, ctx.line), None, None


def _some_summed(x: Tensor, num_synced: int, line: Line) -> Tensor:
    first, own = x.split([num_synced, x.shape[-1] - num_synced], dim=-1)
    return torch.cat([_summed(first, line), own * line.size**0.5], dim=-1)


class _Along(Function):
    """One operation along a dim in forward, its conjugate in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: _Move, back: _Move, dim: int, lengths: Sequence[int], line: Line) -> Tensor:
        ctx.back, ctx.place = back, (dim, lengths, line)
        return forth(x, *ctx.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, *ctx.place), *[None] * 5

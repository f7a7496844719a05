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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_gather_along, all_reduce_sum, reduce_scatter_along

_Move = Callable[[Tensor, int, Sequence[int], DeviceMesh], Tensor]


def enter(x: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Lets an equal tensor into what is cut: `x` itself, its gradient summed over `mesh`."""
    return x if mesh.size() == 1 else _Enter.apply(x, mesh)


def leave(x: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """Sums parts over `mesh` to an equal tensor; the gradient passes as it is."""
    return x if mesh.size() == 1 else _Leave.apply(x, mesh)


def place_side_by_side(x: Tensor, *, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Makes an equal tensor of what each rank has a stretch of along `dim`; of the gradient each takes its stretch."""
    return x if mesh.size() == 1 else _Along.apply(x, _gathered, _own, dim, tuple(lengths), mesh)


def take_own(x: Tensor, *, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Takes this rank's stretch of an equal tensor along `dim`; its gradient is placed side by side."""
    return x if mesh.size() == 1 else _Along.apply(x, _own, _gathered, dim, tuple(lengths), mesh)


def gather_in(x: Tensor, *, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Lets what each rank has a stretch of into what is cut: side by side; of the summed gradient each takes its own.

    As `enter` after `place_side_by_side`, in one message per pass (Korthikanti et al., arXiv 2205.05198).
    """
    return x if mesh.size() == 1 else _Along.apply(x, _gathered, _scattered, dim, tuple(lengths), mesh)


def scatter_out(x: Tensor, *, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Sums parts over `mesh` and takes this rank's stretch along `dim`; its gradient is placed side by side.

    As `take_own` after `leave`, in one message per pass.
    """
    return x if mesh.size() == 1 else _Along.apply(x, _scattered, _gathered, dim, tuple(lengths), mesh)


class Boundary:
    """How activations go into a module that is cut, and how its output comes out: equal on both sides.

    Attributes:
        mesh: the ranks over which it is cut, one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def enter(self, x: Tensor) -> Tensor:
        """What the module's code sees of an input that requires a gradient."""
        return enter(x, mesh=self.mesh)

    def leave(self, x: Tensor) -> Tensor:
        """What the code around the module sees of an output, of which this rank has a part."""
        return leave(x, mesh=self.mesh)


def _summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), mesh=mesh)


def _own(x: Tensor, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    position = mesh.get_local_rank()
    return x.narrow(dim, sum(lengths[:position]), lengths[position]).contiguous()


def _gathered(x: Tensor, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    return all_gather_along(x, dim=dim, lengths=lengths, mesh=mesh)


def _scattered(x: Tensor, dim: int, lengths: Sequence[int], mesh: DeviceMesh) -> Tensor:
    return reduce_scatter_along(x, dim=dim, lengths=lengths, mesh=mesh)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _summed(grad, ctx.mesh), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _summed(x, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None


class _Along(Function):
    """One operation along a dim in forward, its conjugate in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: _Move, back: _Move, dim: int, lengths: Sequence[int], mesh: DeviceMesh
    ) -> Tensor:
        ctx.back, ctx.place = back, (dim, lengths, mesh)
        return forth(x, *ctx.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, *ctx.place), *[None] * 5

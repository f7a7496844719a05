"""Heads and tokens that ranks with one sequence give each other, in autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.redistribution import Redistribution
from rotorch.models.moved_parts import moved


def redistribute(
    x: Tensor,
    moves: Redistribution,
    *,
    axis_group: AxisGroup,
    before_waiting: Callable[[], None],
    into: Tensor | None = None,
) -> Tensor:
    """Makes this rank's tensor of parts of all ranks' tensors; gradients go back, and add up where parts overlap.

    Args:
        x: this rank's tensor, `[rows, heads, tokens, features]`; rows and features are the same on all ranks.
        moves: this rank's part.
        axis_group: the ranks that share the sequence; all of them call it in the same order.
        before_waiting: called before each exchange, in forward and in backward: this rank then waits for others, who
            may wait for something that it has put off.
        into: an earlier result of these moves, whose memory takes this one, without autograd.
    """
    if into is not None:
        before_waiting()
        return moved(x, moves, swap=axis_group.swap, into=into)
    made: Tensor = _Redistribute.apply(x, moves, axis_group, before_waiting)
    return made


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moves: Redistribution, axis_group: AxisGroup, before_waiting: Callable[[], None]
    ) -> Tensor:
        ctx.moves = moves, axis_group, before_waiting
        before_waiting()
        return moved(x, moves, swap=axis_group.swap)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        moves, axis_group, before_waiting = ctx.moves
        before_waiting()
        return moved(grad, moves.back, swap=axis_group.swap, add=moves.overlap), None, None, None

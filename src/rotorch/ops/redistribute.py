"""Heads and tokens that ranks with one sequence give each other, in autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.redistribution import Part, Redistribution
from rotorch.core.spec import Range

_TOKENS = 2  # dim of `[rows, heads, tokens, features]`


def redistribute(
    x: Tensor, *, moves: Redistribution, axis_group: AxisGroup, before_waiting: Callable[[], None]
) -> Tensor:
    """Makes this rank's tensor of parts of all ranks' tensors; gradients go back, and add up where parts overlap.

    Args:
        x: this rank's tensor, `[rows, heads, tokens, features]`; rows and features are the same on all ranks.
        moves: this rank's part.
        axis_group: the ranks that share the sequence; all of them call it in the same order.
        before_waiting: called before each exchange, in forward and in backward: this rank then waits for others, who
            may wait for something that it has put off.
    """
    made: Tensor = _Redistribute.apply(x, moves, axis_group, before_waiting)
    return made


class _Redistribute(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moves: Redistribution, axis_group: AxisGroup, before_waiting: Callable[[], None]
    ) -> Tensor:
        ctx.moves = moves, axis_group, before_waiting
        before_waiting()
        heads, tokens = moves.num_made
        return _moved(x, moves.sends, moves.receives, (heads, tokens), moves, axis_group, add=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        moves, axis_group, before_waiting = ctx.moves
        before_waiting()
        size = moves.num_heads, moves.num_tokens
        own = _moved(grad, moves.receives, moves.sends, size, moves, axis_group, add=moves.overlap)
        return own, None, None, None


def _moved(
    x: Tensor,
    sends: Sequence[Part],
    receives: Sequence[Part],
    size: tuple[int, int],
    moves: Redistribution,
    axis_group: AxisGroup,
    *,
    add: bool,
) -> Tensor:
    """A tensor of `size` heads and tokens, of what ranks send; `add`: onto this rank's own part, which is all of it."""
    here = x.movedim(_TOKENS, 0)  # tokens first: those of a message then lie side by side
    made = here.new_empty(size[1], here.shape[1], size[0], here.shape[3])
    outgoing = [_taken(here, sends[rank]) for rank in moves.others]
    incoming = [
        here.new_empty(part.num_tokens, here.shape[1], part.heads.length, here.shape[3])
        for part in (receives[rank] for rank in moves.others)
    ]
    wait = axis_group.swap(outgoing, incoming, peers=moves.others)
    _put(made, receives[moves.rank], _taken(here, sends[moves.rank]), add=False)
    wait()
    for rank, came in zip(moves.others, incoming, strict=True):
        _put(made, receives[rank], came, add=add)
    return made.movedim(0, _TOKENS)


def _taken(x: Tensor, part: Part) -> Tensor:
    """The tokens of a part, one range after another. Contiguous."""
    ranges = [_range_of(x, each, part.heads) for each in part.tokens]
    return torch.cat(ranges) if ranges else x.new_empty(0, x.shape[1], part.heads.length, x.shape[3])


def _put(x: Tensor, part: Part, tokens: Tensor, *, add: bool) -> None:
    done = 0
    for each in part.tokens:
        there, came = _range_of(x, each, part.heads), tokens.narrow(0, done, each.length)
        if add:
            there.add_(came)
        else:
            there.copy_(came)
        done += each.length


def _range_of(x: Tensor, tokens: Range, heads: Range) -> Tensor:
    return x.narrow(0, tokens.start, tokens.length).narrow(2, heads.start, heads.length)

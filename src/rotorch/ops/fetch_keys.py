"""Keys and values of a sequence that ranks share: each rank gets the ones its tokens attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Range
from rotorch.core.zigzag import KeyExchange

_TOKENS = 2  # dim of `[rows, heads, tokens, features]`


def fetch_keys(
    x: Tensor, *, exchange: KeyExchange, axis_group: AxisGroup, before_waiting: Callable[[], None]
) -> Tensor:
    """Returns the keys of all tokens that this rank's tokens attend to, in order; gradients go back and add up.

    Args:
        x: of this rank's own tokens, `[rows, heads, tokens, features]`.
        exchange: this rank's part.
        axis_group: the ranks that share the sequence; all of them call it in the same order.
        before_waiting: called before each exchange, in forward and in backward: this rank then waits for others, who
            may wait for something that it has put off.
    """
    fetched: Tensor = _FetchKeys.apply(x, exchange, axis_group, before_waiting)
    return fetched


class _FetchKeys(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: KeyExchange, axis_group: AxisGroup, before_waiting: Callable[[], None]
    ) -> Tensor:
        ctx.exchange = exchange, axis_group, before_waiting
        before_waiting()
        own = x.movedim(_TOKENS, 0)  # tokens first: those of a message then lie side by side
        keys = own.new_empty(exchange.num_needed, *own.shape[1:])
        outgoing = [_taken(own, exchange.sends(to)) for to in exchange.others]
        incoming = [_room(own, exchange.receives(source)) for source in exchange.others]
        wait = axis_group.swap(outgoing, incoming, peers=exchange.others)
        _put(keys, exchange.receives(exchange.rank), _taken(own, exchange.sends(exchange.rank)))
        wait()
        for source, came in zip(exchange.others, incoming, strict=True):
            _put(keys, exchange.receives(source), came)
        return keys.movedim(0, _TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exchange, axis_group, before_waiting = ctx.exchange
        before_waiting()
        of_keys = grad.movedim(_TOKENS, 0)
        outgoing = [_taken(of_keys, exchange.receives(source)) for source in exchange.others]
        incoming = [_room(of_keys, exchange.sends(to)) for to in exchange.others]
        wait = axis_group.swap(outgoing, incoming, peers=exchange.others)
        # Every token of this rank attends to itself: its own part comes first, and leaves nothing unset.
        own = of_keys.new_empty(sum(chunk.length for chunk in exchange.chunks), *of_keys.shape[1:])
        _put(own, exchange.sends(exchange.rank), _taken(of_keys, exchange.receives(exchange.rank)))
        wait()
        for to, came in zip(exchange.others, incoming, strict=True):
            done = 0
            for each in exchange.sends(to):
                own.narrow(0, each.start, each.length).add_(came.narrow(0, done, each.length))
                done += each.length
        return own.movedim(0, _TOKENS), None, None, None


def _taken(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The tokens of some ranges, one range after another. Contiguous."""
    parts = [x.narrow(0, each.start, each.length) for each in ranges]
    return torch.cat(parts) if parts else x.new_empty(0, *x.shape[1:])


def _room(like: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Memory for the tokens of some ranges."""
    return like.new_empty(sum(each.length for each in ranges), *like.shape[1:])


def _put(x: Tensor, ranges: Sequence[Range], tokens: Tensor) -> None:
    done = 0
    for each in ranges:
        x.narrow(0, each.start, each.length).copy_(tokens.narrow(0, done, each.length))
        done += each.length

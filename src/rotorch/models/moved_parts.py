"""Tensors of heads and tokens, made of parts of several ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rotorch.core.redistribution import Part, Redistribution
from rotorch.core.spec import Range

_TOKENS = 2  # dim of `[rows, heads, tokens, features]`


class Swap(Protocol):
    """Starts sending a tensor to each of some ranks and receiving one from each; the result waits for them."""

    def __call__(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, peers: Sequence[int]
    ) -> Callable[[], None]: ...


def moved(x: Tensor, moves: Redistribution, *, swap: Swap, add: bool = False, into: Tensor | None = None) -> Tensor:
    """Makes this rank's tensor of parts of all ranks' tensors. All of them, in one order.

    Args:
        x: this rank's tensor, `[rows, heads, tokens, features]`; rows and features are the same on all ranks.
        moves: this rank's part.
        swap: exchanges tensors among them.
        add: what comes from others is added to what this rank has itself, which is all of it.
        into: an earlier result of these moves, whose memory takes this one.
    """
    here = x.movedim(_TOKENS, 0)  # tokens first: those of a message then lie side by side
    heads, tokens = moves.num_made
    made = here.new_empty(tokens, here.shape[1], heads, here.shape[3]) if into is None else into.movedim(_TOKENS, 0)
    outgoing = [_taken(here, moves.sends[rank]) for rank in moves.others]
    incoming = [
        here.new_empty(part.num_tokens, here.shape[1], part.heads.length, here.shape[3])
        for part in (moves.receives[rank] for rank in moves.others)
    ]
    wait = swap(outgoing, incoming, peers=moves.others)
    _put(made, moves.receives[moves.rank], _taken(here, moves.sends[moves.rank]), add=False)
    wait()
    for rank, came in zip(moves.others, incoming, strict=True):
        _put(made, moves.receives[rank], came, add=add)
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

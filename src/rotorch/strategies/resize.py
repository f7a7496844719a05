"""A layout for another number of ranks, when some of them are lost or come back. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from rotorch.core.strategy import Strategy


def resized(strategies: Sequence[Strategy], *, num_ranks: int) -> tuple[Strategy, ...] | None:
    """Returns a layout as like `strategies` as there is on `num_ranks`, None if there is none.

    What is outermost is repeated more or less often, and what is inside stays: `ddp=4,rtp=2` on 6 ranks is
    `ddp=3,rtp=2`, and on two `rtp=2`. Of a grid the last size changes, of tesseract that is its depth. If that does
    not divide, the innermost strategy takes all ranks: `ddp=4,rtp=2` on 5 is `rtp=5`.
    """
    outermost, *inner = strategies
    inside = 1
    for strategy in inner:
        inside *= strategy.num_ranks
    if num_ranks % inside == 0:
        if inner and num_ranks == inside:
            return tuple(inner)
        if (other := _with_ranks(outermost, num_ranks=num_ranks // inside)) is not None:
            return (other, *inner)
    if inner and (other := _with_ranks(inner[-1], num_ranks=num_ranks)) is not None:
        return (other,)
    return None


def _with_ranks(strategy: Strategy, *, num_ranks: int) -> Strategy | None:
    """The strategy with its last size such that it takes so many ranks."""
    if not strategy.size_fields:
        return strategy if num_ranks == strategy.num_ranks else None
    last = strategy.size_fields[-1]
    others, rest = divmod(strategy.num_ranks, getattr(strategy, last))
    size, left = divmod(num_ranks, others)
    if rest or left or not size:
        return None
    try:
        made = type(strategy).model_validate({**strategy.model_dump(), last: size})
    except ValidationError:
        return None
    return made if made.num_ranks == num_ranks else None

"""A layout for another number of ranks, when some of them are lost or come back. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from rotorch.core.strategy import Strategy


def resized(strategies: Sequence[Strategy], *, num_ranks: int) -> tuple[Strategy, ...] | None:
    """Returns the layout on `num_ranks` that is most like `strategies`, None if there is none.

    The outermost strategy gets another size, and the inner ones stay: `ddp=4,rtp=2` on 6 ranks is `ddp=3,rtp=2`, and on
    two `rtp=2`. Of a grid the last size changes, which is tesseract's depth. If the ranks do not divide, the innermost
    strategy takes all of them: `ddp=4,rtp=2` on 5 is `rtp=5`.
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
    """The strategy with its last size changed so that it takes `num_ranks`; None if no size does."""
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

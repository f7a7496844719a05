"""Sequences that ranks share: the chunks of each rank, and the tokens of others whose keys and values it needs.

Each rank has one chunk from the front and one from the back: rank r of c has chunks r and 2c-1-r. A token attends to
those before it, so the chunks of a rank together have as much to do as those of every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rotorch.core.spec import Range


def zigzag(num_tokens: int, *, num_ranks: int) -> tuple[tuple[Range, Range], ...]:
    """Cuts a sequence into two chunks per rank.

    Where the length does not divide, the first chunks have one token more; no two ranks differ by more than one.

    Args:
        num_tokens: of the sequence.
        num_ranks: of those that share it.
    """
    num_chunks = 2 * num_ranks
    each, rest = divmod(num_tokens, num_chunks)
    chunks = [Range(i * each + min(i, rest), each + (i < rest)) for i in range(num_chunks)]
    return tuple((chunks[rank], chunks[num_chunks - 1 - rank]) for rank in range(num_ranks))


def seen_by(queries: Range, *, window: int | None) -> Range:
    """The tokens that some consecutive tokens attend to: from their window's begin to their last one."""
    first = queries.start if queries.length == 0 else 0 if window is None else max(0, queries.start - window + 1)
    return Range(first, queries.stop - first)


@dataclass(frozen=True)
class KeyExchange:
    """One rank's part in the exchange of keys and values: every rank gets the ones its own tokens attend to.

    Attributes:
        num_tokens: of the sequence.
        num_ranks: of those that share it.
        rank: this rank's number among them.
        window: tokens that a token attends to, itself among them; None: all before it.
    """

    num_tokens: int
    num_ranks: int
    rank: int
    window: int | None = None

    @cached_property
    def chunks(self) -> tuple[Range, Range]:
        """This rank's tokens; in its tensors they follow one another."""
        return zigzag(self.num_tokens, num_ranks=self.num_ranks)[self.rank]

    @cached_property
    def needed(self) -> tuple[Range, ...]:
        """The tokens whose keys this rank needs, its own among them, in order; they follow one another in its keys."""
        found: list[Range] = []
        for chunk in self.chunks:
            seen = seen_by(chunk, window=self.window)
            if found and seen.start <= found[-1].stop:
                seen = Range(found[-1].start, max(seen.stop, found[-1].stop) - found.pop().start)
            found.append(seen)
        return tuple(each for each in found if each.length)

    @property
    def num_needed(self) -> int:
        return sum(each.length for each in self.needed)

    def offset(self, seen: Range) -> int:
        """The offset of consecutive needed tokens in this rank's keys."""
        return _offset(seen, self.needed)

    def other(self, rank: int) -> KeyExchange:
        """The part of another rank."""
        return KeyExchange(self.num_tokens, self.num_ranks, rank, self.window)

    def sends(self, to: int) -> tuple[Range, ...]:
        """The ranges of the tokens, among this rank's own, whose keys another rank needs."""
        common = _common(self.chunks, self.other(to).needed)
        return tuple(Range(_offset(each, self.chunks), each.length) for each in common)

    def receives(self, source: int) -> tuple[Range, ...]:
        """The ranges in this rank's keys that come from another rank, in the order in which it sends them."""
        common = _common(self.other(source).chunks, self.needed)
        return tuple(Range(_offset(each, self.needed), each.length) for each in common)

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in range(self.num_ranks) if rank != self.rank)

    @property
    def num_sent(self) -> int:
        """Tokens whose keys this rank sends, once per rank that needs them."""
        return sum(each.length for to in self.others for each in self.sends(to))

    @property
    def num_received(self) -> int:
        """Tokens whose keys it gets from others, and whose gradients it sends back."""
        return sum(each.length for source in self.others for each in self.receives(source))


def _common(these: tuple[Range, ...], those: tuple[Range, ...]) -> list[Range]:
    """The ranges of tokens that are in both."""
    found = []
    for one in these:
        for other in those:
            start, stop = max(one.start, other.start), min(one.stop, other.stop)
            if start < stop:
                found.append(Range(start, stop - start))
    return found


def _offset(wanted: Range, ranges: tuple[Range, ...]) -> int:
    """The offset of a range of tokens in a tensor of these ranges, one of which has all of it."""
    offset = 0
    for each in ranges:
        if each.start <= wanted.start and wanted.stop <= each.stop:
            return offset + wanted.start - each.start
        offset += each.length
    raise AssertionError(f"{wanted} is in none of {ranges}")

"""Sequences that ranks share: the chunks of each rank, and what it gets of others for its attentions.

Each rank has one chunk from the front and one from the back: rank r of c has chunks r and 2c-1-r. A token attends to
those before it, so the chunks of a rank together have as much to do as those of every other.

In an attention a rank gets the keys and values that its own tokens attend to (`KeyExchange`), or all tokens of some
heads, in place of some tokens of all heads (`HeadExchange`; DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rotorch.core.errors import ConfigError
from rotorch.core.redistribution import Part, Redistribution
from rotorch.core.spec import Range

_FEWEST_BLOCKS, _LARGEST_BLOCK = 16, 512
"""Blocks of queries of a sequence, and tokens of a block."""


def zigzag(num_tokens: int, *, num_ranks: int) -> tuple[tuple[Range, Range], ...]:
    """Cuts a sequence into two chunks per rank.

    Where the length does not divide, the first chunks have one token more; no two ranks differ by more than one.

    Args:
        num_tokens: of the sequence.
        num_ranks: of those that share it.
    """
    chunks = _even(num_tokens, parts=2 * num_ranks)
    return tuple((chunks[rank], chunks[-1 - rank]) for rank in range(num_ranks))


def _even(size: int, *, parts: int) -> list[Range]:
    """Consecutive parts of a size, of which the first are one longer where it does not divide."""
    each, rest = divmod(size, parts)
    return [Range(i * each + min(i, rest), each + (i < rest)) for i in range(parts)]


def block_size(num_tokens: int) -> int:
    """Queries of a sequence that attend at once."""
    return min(_LARGEST_BLOCK, max(1, num_tokens // _FEWEST_BLOCKS))


def blocks_of(chunk: Range, *, num_tokens: int) -> Iterator[Range]:
    """A chunk of a sequence in blocks of queries."""
    size = block_size(num_tokens)
    for start in range(chunk.start, chunk.stop, size):
        yield Range(start, min(size, chunk.stop - start))


def seen_by(queries: Range, *, window: int | None) -> Range:
    """The tokens that some consecutive tokens attend to: from their window's begin to their last one."""
    first = queries.start if queries.length == 0 else 0 if window is None else max(0, queries.start - window + 1)
    return Range(first, queries.stop - first)


def sees_all(window: int | None, *, num_tokens: int) -> bool:
    """True if each token of a sequence attends to all before it."""
    return window is None or window >= num_tokens


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

    def moves(self, *, num_heads: int) -> Redistribution:
        """Of keys and values of so many heads: from those of this rank's tokens to those that it needs."""
        heads, ranks = Range(0, num_heads), range(self.num_ranks)
        return Redistribution(
            self.rank,
            sends=tuple(Part(heads, self.sends(to)) for to in ranks),
            receives=tuple(Part(heads, self.receives(source)) for source in ranks),
            overlap=True,
        )

    @property
    def num_sent(self) -> int:
        """Tokens whose keys this rank sends, once per rank that needs them."""
        return self.moves(num_heads=1).sent

    @property
    def num_received(self) -> int:
        """Tokens whose keys it gets from others, and whose gradients it sends back."""
        return self.moves(num_heads=1).received


@dataclass(frozen=True)
class HeadExchange:
    """One rank's part in the exchange of heads: every rank gets all tokens of some, in place of its own of all.

    Attributes:
        num_tokens: of the sequence.
        num_ranks: of those that share it.
        rank: this rank's number among them.
        num_sets: of heads that are dealt to ranks: query heads with the keys and values that they share. Of uneven
            numbers the first ranks get one more.
    """

    num_tokens: int
    num_ranks: int
    rank: int
    num_sets: int

    @property
    def moves(self) -> Redistribution:
        """From all sets of this rank's tokens to all tokens of its sets."""
        chunks = zigzag(self.num_tokens, num_ranks=self.num_ranks)
        sets = _even(self.num_sets, parts=self.num_ranks)
        first, second = chunks[self.rank]
        mine = (Range(0, first.length), Range(first.length, second.length))
        return Redistribution(
            self.rank,
            sends=tuple(Part(theirs, mine) for theirs in sets),
            receives=tuple(Part(Range(0, sets[self.rank].length), theirs) for theirs in chunks),
        )


def num_head_sets(*, heads: int, key_heads: int, num_ranks: int, repeats: bool) -> int:
    """Sets of heads for `HeadExchange`: one per head of keys, or one per rank where these are fewer.

    Args:
        heads: of queries.
        key_heads: of keys and values.
        num_ranks: of those that share a sequence.
        repeats: the attention takes any number of query heads per head of keys.

    Raises:
        ConfigError: ranks would share a query head, or hold a part of those that share keys.
    """

    def sets_of(ranks: int) -> int | None:
        if key_heads >= ranks:
            return key_heads
        return ranks if ranks % key_heads == 0 and heads % ranks == 0 and repeats else None

    if (sets := sets_of(num_ranks)) is not None:
        return sets
    why = f"{heads} heads, with {key_heads} of keys and values, cannot be dealt to {num_ranks} ranks"
    if not repeats:
        why += ", since its own code has an attention of whole groups"
    # Divisors of it divide the number of all ranks, too.
    fewer = max(ranks for ranks in range(1, num_ranks) if num_ranks % ranks == 0 and sets_of(ranks))
    instead = f", or context={fewer}" if fewer > 1 else ""
    raise ConfigError(f"exchange=heads: {why}. Write exchange=gather{instead}")


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

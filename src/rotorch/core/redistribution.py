"""Moves of heads and tokens between ranks that share a sequence: what of a rank's tensor goes where."""

from __future__ import annotations

from dataclasses import dataclass

from rotorch.core.spec import Range


@dataclass(frozen=True)
class Part:
    """Some tokens of some heads of a tensor `[rows, heads, tokens, features]`.

    Attributes:
        heads: consecutive ones.
        tokens: ranges of them; in a message they follow one another.
    """

    heads: Range
    tokens: tuple[Range, ...]

    @property
    def num_tokens(self) -> int:
        return sum(each.length for each in self.tokens)

    @property
    def size(self) -> int:
        """Its tokens, once per head."""
        return self.heads.length * self.num_tokens


@dataclass(frozen=True)
class Redistribution:
    """One rank's part in making a tensor of parts of all ranks' tensors; gradients take the way back.

    Attributes:
        rank: this rank's number.
        sends: by rank, the part of this rank's tensor that goes there; its own stays.
        receives: by rank, the part of the result that comes from there.
        overlap: True if something of it goes to several ranks, whose gradients then add up; all of it stays, too.
    """

    rank: int
    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    overlap: bool = False

    @property
    def others(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in range(len(self.sends)) if rank != self.rank)

    @property
    def num_made(self) -> tuple[int, int]:
        """Heads and tokens of the result."""
        heads = max((part.heads.stop for part in self.receives if part.num_tokens), default=0)
        tokens = max((each.stop for part in self.receives for each in part.tokens), default=0)
        return heads, tokens

    @property
    def back(self) -> Redistribution:
        """The way back: of a result to this rank's tensor."""
        return Redistribution(self.rank, self.receives, self.sends)

    @property
    def sent(self) -> int:
        """Tokens that this rank sends, once per head and per rank that gets them."""
        return sum(self.sends[rank].size for rank in self.others)

    @property
    def received(self) -> int:
        """Tokens that it gets from others, once per head; it sends as many gradients back."""
        return sum(self.receives[rank].size for rank in self.others)

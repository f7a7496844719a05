"""A random order of any number of things, computed one element at a time."""

from __future__ import annotations

import hashlib
from typing import final

_NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


@final
class Permutation:
    """A pseudo-random order of `range(size)` that is never stored: a billion windows take no memory.

    A Feistel network permutes the numbers of an even number of bits; a result outside `range(size)` is fed in again
    until one falls inside ("cycle walking"), which keeps it a bijection and takes fewer than four turns on average.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, methods 2 and 3.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        """Derives the keys.

        Args:
            size: How many elements, at least 1.
            seed: The run's seed.
            epoch: Each epoch has an order of its own.
        """
        digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self.size = size
        self._keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)]
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, index: int) -> int:
        """The element at `index`, both in `range(size)`."""
        assert 0 <= index < self.size
        element = self._turn(index)
        while element >= self.size:
            element = self._turn(element)
        return element

    def _turn(self, value: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = value >> self._half_bits, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self._half_bits | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK_64
    return value ^ value >> 31

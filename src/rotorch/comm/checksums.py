"""Numbers that stand for tensors, and their comparison over ranks without a gather.

[Note: sums and squares]
    For any number of ranks n, the sums over ranks of a number x and of its square tell if x is equal on all: n times
    the sum of squares is the square of the sum if it is, and larger if not (Cauchy-Schwarz). In whole numbers that is
    exact. So ranks compare numbers in the message of another sum, and send each other their own only if they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_CHUNK_BYTES = 1 << 20


def sum_of_bits(values: Tensor) -> Tensor:
    """Sum of a tensor's memory as whole numbers, modulo 2**64 (int64, one element): any single flipped bit changes it.

    One pass over the memory where it lies, in a seventh of the time of a norm in float64.
    """
    octets = values.detach().contiguous().view(-1).view(torch.uint8)
    # Words begin with the tensor: the same values have the same sum on all ranks, wherever they lie.
    words, rest = octets.tensor_split([octets.numel() // _WORD_BYTES * _WORD_BYTES])
    if octets.storage_offset() % _WORD_BYTES == 0:
        total = words.view(torch.int64).sum()
    else:  # torch has no words that begin elsewhere in a storage
        chunks = [chunk.clone().view(torch.int64).sum() for chunk in words.split(_CHUNK_BYTES)]
        total = torch.stack(chunks).sum()
    return total + rest.sum(dtype=torch.int64)


def sum_by_place(words: Tensor) -> Tensor:
    """Sum of whole numbers, each times an odd number of its place, modulo 2**64: their order counts. Flat, int64."""
    places = torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)
    return (words * places).sum()


def cancelling(number: int, *, group: int, num_ranks: int, is_first: bool) -> int:
    """This rank's multiple of a number: those of a group add up to 0 if the number is equal on all its ranks.

    Args:
        number: to be compared.
        group: number of the ranks that compare, among such groups, whose sums are added up too: by odd factors.
        num_ranks: number of them.
        is_first: of one of them.
    """
    return number * (num_ranks - 1 if is_first else -1) * (2 * group + 1)


def with_squares(numbers: Sequence[int]) -> list[int]:
    """The numbers that `differ` needs sums of: squares of at most 48 bits are exact for 65,536 ranks."""
    return [*numbers, *(x * x for x in numbers)]


def differ(sums: Sequence[int], *, num_ranks: int) -> list[bool]:
    """True for each number that is not equal on all ranks, by the ranks' sums of `with_squares`."""
    half = len(sums) // 2
    return [num_ranks * square != x * x for x, square in zip(sums[:half], sums[half:], strict=True)]

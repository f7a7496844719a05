"""Exact choice of items under a limit of their sizes: a knapsack over classes of equal items. No torch.

Sums of sizes and values are built up class by class; a sum that another one beats in both is dropped (Nemhauser and
Ullmann, Management Science 15(9), 1969). Layers of a model are equal, so a few classes have hundreds of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SUMS = 1 << 17
"""Of sums that are kept; beyond it only the best one within each of so many parts of the limit is."""


@dataclass(frozen=True)
class Item:
    """Something to choose.

    Attributes:
        size: counts against the limit; at least 0.
        value: what choosing it is worth.
    """

    size: int
    value: int


@dataclass(frozen=True)
class _Sum:
    size: int
    value: int
    counts: tuple[int, ...]
    """Chosen items of each class so far."""


def most_valuable(items: Sequence[Item], *, limit: int) -> tuple[int, ...]:
    """Returns the numbers of the items whose values have the largest sum while their sizes stay within `limit`.

    Of choices with equal values the smallest counts, of equal items the first ones; items without a value are left. The
    choice is the best one as long as there are no more than `MOST_SUMS` different sums.

    Args:
        items: sizes and values.
        limit: largest sum of sizes.
    """
    members: dict[Item, list[int]] = {}
    for number, item in enumerate(items):
        if item.value > 0 and item.size <= limit:
            members.setdefault(item, []).append(number)
    sums = [_Sum(0, 0, ())]
    for item, numbers in members.items():
        sums = _not_beaten(
            [
                _Sum(kept.size + count * item.size, kept.value + count * item.value, (*kept.counts, count))
                for kept in sums
                for count in range(len(numbers) + 1)
                if kept.size + count * item.size <= limit
            ],
            limit=limit,
        )
    best = sums[-1]
    chosen = [n for numbers, count in zip(members.values(), best.counts, strict=True) for n in numbers[:count]]
    return tuple(sorted(chosen))


def _not_beaten(sums: list[_Sum], *, limit: int) -> list[_Sum]:
    """The sums that no other one beats in size and value, by rising size."""
    kept: list[_Sum] = []
    for each in sorted(sums, key=lambda s: (s.size, -s.value)):
        if not kept or each.value > kept[-1].value:
            kept.append(each)
    if len(kept) <= MOST_SUMS:
        return kept
    return list({each.size * MOST_SUMS // max(limit, 1): each for each in kept}.values())

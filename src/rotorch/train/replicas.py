"""Whether what several ranks hold is the same on all of them: memory that loses a bit, or a transfer, says nothing.

Replicated weights get the same updates, so they stay the same to the bit. Each rank sums its weights' bytes as
integers, which any single flipped bit changes, and one small reduction shows every rank the sums of all.
"""

from __future__ import annotations

import zlib
from collections import Counter

import torch
from torch import Tensor

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import RankFailure
from rotorch.parallel_model import ParallelModel
from rotorch.shard.held import HeldWeight

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(model: ParallelModel) -> None:
    """Compares every weight that several ranks hold. All ranks; sends 16 bytes per weight and rank.

    Raises:
        RankFailure: on all ranks alike, if one differs: names the weight and the ranks.
    """
    num_ranks = model.mesh.size()
    if num_ranks == 1:
        return
    weights = list(model.weights.values())
    table = torch.zeros(2, num_ranks, len(weights), dtype=torch.int64)
    own = model.mesh.get_rank()
    for number, held in enumerate(weights):
        if held.num_holders > 1:
            table[0, own, number] = _which_part(held)
            table[1, own, number] = byte_sum(held.local)
    all_reduce_sum(table, mesh=model.mesh)
    parts, sums = table.tolist()
    for number, held in enumerate(weights):
        for part in sorted({of_rank[number] for of_rank in parts} - {0}):
            holders = [rank for rank in range(num_ranks) if parts[rank][number] == part]
            if difference := _difference([(rank, sums[rank][number]) for rank in holders]):
                raise RankFailure(
                    f"the weight {held.name!r} {difference}: replicas get the same updates and stay the same to the "
                    "bit, unless memory or a transfer lost one. Go on from the last checkpoint with --resume, and "
                    "look at that rank's machine if it happens again"
                )


def byte_sum(tensor: Tensor) -> int:
    """A number that any single flipped bit of a tensor changes, from one pass over it."""
    words = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))


def _which_part(held: HeldWeight) -> int:
    """A number, not 0, for the part of the weight that a rank holds: the same for those that hold the same."""
    return 1 + zlib.crc32(repr([(piece.offsets, piece.sizes) for piece in held.pieces]).encode())


def _difference(sums: list[tuple[int, int]]) -> str:
    """Says which of some ranks differ in their sum; "" if none does."""
    counts = Counter(value for _, value in sums)
    if len(counts) < 2:
        return ""
    usual, times = counts.most_common(1)[0]
    others = [rank for rank, value in sums if value != usual]
    if times <= len(sums) - times:  # two that differ: nobody knows which is right
        return "differs between ranks " + ", ".join(str(rank) for rank, _ in sums)
    which = f"rank {others[0]}" if len(others) == 1 else "ranks " + ", ".join(map(str, others))
    return f"on {which} differs from that on the {times} other ranks that hold it"

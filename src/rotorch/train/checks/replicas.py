"""Check that memory still holds the values computed: a flipped bit, in memory or on the wire, raises no error.

[Note: what is compared]
    A checksum: the sum of a tensor's bytes as 64-bit integers, which any single flipped bit changes, at the speed of
    memory. It is taken of each weight and of its optimizer state, right after an update.
    Over ranks: ranks that hold the same part of a weight apply the same updates, so weight and moments stay equal
    to the bit. Over time: neither changes until the next update, so the checksums are taken again before it;
    for shards that one rank alone holds, as under fsdp and rtp, only this comparison over time exists.

[Note: what is not seen]
    Changes during an update of shards that one rank alone holds; several flips of one tensor whose
    differences add up to 0; activations, gradients and buffers; and steps that are not due: `check_every=K` checks one
    interval between updates in K. A change during an interval is found at its end, when a checkpoint may have been
    written and a forward pass been computed from it, but before the next update.

[Note: what it costs]
    A pass over weights and moments after an update and one before the next, 12 bytes each time per float32 weight
    under AdamW, and 24 bytes sent per weight tensor and rank. With every step looked at, that took 1.8 to 2.4 % of the
    CPU time of a step of 1024 tokens (a Llama of 29 M weights, one process on one core): under 1 % with check_every=3,
    or from about 2500 tokens a step and rank on. If n ranks shard the weights the cost per rank is 1/n.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch.comm.checksums import sum_of_bits
from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import RankFailure
from rotorch.shard.sharded_weight import ShardedWeight
from rotorch.train.state import TrainState, optimizer_values

_KINDS = ("the weight", "the optimizer's state of")


@dataclass(frozen=True)
class Sums:
    """This rank's sums at some moment, one per weight in the order of `ParallelModel.weights`.

    Attributes:
        step: after whose update.
        of_weights: of the part of each that this rank holds.
        of_moments: of all that the optimizer keeps for it.
    """

    step: int
    of_weights: list[int]
    of_moments: list[int]


def check_replicas(state: TrainState) -> Sums:
    """Compares every weight that several ranks hold, and its optimizer state, right after an update. All ranks.

    Sends 24 bytes per weight tensor and rank.

    Returns:
        What `check_unchanged` takes before the next update.

    Raises:
        RankFailure: on all ranks alike, if one differs: names the weight and the ranks.
    """
    sums = _take(state)
    num_ranks = state.num_ranks
    if num_ranks == 1:
        return sums
    weights = list(state.model.weights.values())
    table = torch.zeros(3, num_ranks, len(weights), dtype=torch.int64)
    for number, held in enumerate(weights):
        if held.num_holders > 1:
            table[0, state.rank, number] = _which_part(held)
            table[1, state.rank, number] = sums.of_weights[number]
            table[2, state.rank, number] = sums.of_moments[number]
    all_reduce_sum(table, mesh=state.model.mesh)
    parts, *both = table.tolist()
    for number, held in enumerate(weights):
        for part in sorted({of_rank[number] for of_rank in parts} - {0}):
            holders = [rank for rank in range(num_ranks) if parts[rank][number] == part]
            for what, found in zip(_KINDS, both, strict=True):
                if difference := _difference([(rank, found[rank][number]) for rank in holders]):
                    raise RankFailure(
                        f"{what} {held.name!r} {difference}: replicas get the same updates and stay the same to the "
                        "bit, unless memory or a transfer lost one. Go on from the last checkpoint with --resume, and "
                        "look at that rank's machine if it happens again"
                    )
    return sums


def check_unchanged(state: TrainState, sums: Sums) -> None:
    """Compares this rank's memory with that after the last update. All ranks; sends 8 bytes per rank.

    Raises:
        RankFailure: on all ranks alike, if anything has changed on any: names the weight and the rank.
    """
    now, weights = _take(state), list(state.model.weights)
    pairs = [
        *((sums.of_weights[n], now.of_weights[n]) for n in range(len(weights))),
        *((sums.of_moments[n], now.of_moments[n]) for n in range(len(weights))),
    ]
    changed = torch.zeros(state.num_ranks, dtype=torch.int64)
    changed[state.rank] = next((number for number, (was, is_) in enumerate(pairs, start=1) if was != is_), 0)
    all_reduce_sum(changed, mesh=state.model.mesh)
    for rank, number in enumerate(changed.tolist()):
        if number:
            which, index = divmod(number - 1, len(weights))
            raise RankFailure(
                f"{_KINDS[which]} {weights[index]!r} on rank {rank} has changed "
                f"since the update of step {sums.step}, and nothing did that: memory lost a bit. Remove a checkpoint "
                f"of step {sums.step} if there is one, since it may hold what changed, go on with --resume, and look "
                "at that rank's machine if it happens again"
            )


def _as_int64(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _take(state: TrainState) -> Sums:
    weights = state.model.weights
    moments = dict.fromkeys(weights, 0)
    for held, _, value in optimizer_values(state):
        if isinstance(value, Tensor):
            moments[held.name] += int(sum_of_bits(value.to_local() if isinstance(value, DTensor) else value))
    return Sums(
        step=state.step,
        of_weights=[int(sum_of_bits(held.local)) for held in weights.values()],
        of_moments=[_as_int64(total) for total in moments.values()],
    )


def _which_part(held: ShardedWeight) -> int:
    """A number, not 0, for the part of the weight that a rank holds: the same for all holders of that part."""
    return 1 + zlib.crc32(repr([(chunk.offsets, chunk.sizes) for chunk in held.chunks]).encode())


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

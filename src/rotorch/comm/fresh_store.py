"""A store of their own for ranks that torchrun starts: what those of an earlier start have written is not in it.

[Note: started again]
    torchrun lets ranks use the store through which it finds its own nodes, and that one outlives them. Ranks that are
    started again would find the addresses of those that are gone there: "Gloo connectFullMesh failed". So each start
    has a prefix of its own, which rank 0 makes up. No variable names it: how often it has started them each node counts
    for itself, and ranks that are started because a node came or went count as the same start.

    Another rank must not take the prefix of an earlier start for this one's. It writes a number that nobody has used
    before and waits for an answer to that. Rank 0 answers whatever number it finds, until the rank has taken it.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

from rotorch.core.errors import RankFailure

_LOOK_EVERY_S = 0.01


def fresh_store(shared: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """The part of a store that only the ranks of this start write to. All ranks.

    Args:
        shared: the store, in which there may be anything.
        rank: this one.
        num_ranks: how many there are.
        timeout_s: how long to wait for others.

    Raises:
        RankFailure: a rank did not come.
    """
    store = dist.PrefixStore("rotorch", shared)
    prefix = _invite(store, num_ranks=num_ranks, timeout_s=timeout_s) if rank == 0 else _ask(store, rank=rank)
    return dist.PrefixStore(f"rotorch/{prefix}", shared)


def _invite(store: dist.Store, *, num_ranks: int, timeout_s: float) -> str:
    """Rank 0: tells all others a prefix that nobody has used."""
    prefix, end = secrets.token_hex(8), time.monotonic() + timeout_s
    for rank in range(1, num_ranks):
        while not store.check([f"taken/{prefix}/{rank}"]):
            if store.check([f"asks/{rank}"]):
                asked = store.get(f"asks/{rank}").decode()
                store.set(f"answer/{asked}", prefix)
            if time.monotonic() > end:
                raise RankFailure(f"rank {rank} did not come within {timeout_s:g} s of the start")
            time.sleep(_LOOK_EVERY_S)
    return prefix


def _ask(store: dist.Store, *, rank: int) -> str:
    """Another rank: asks for it; waits as long as the store does."""
    asked = secrets.token_hex(8)
    store.set(f"asks/{rank}", asked)
    prefix = store.get(f"answer/{asked}").decode()
    store.set(f"taken/{prefix}/{rank}", "yes")
    return prefix

"""A store for the ranks of one torchrun start: entries that the ranks of an earlier start have written are not in it.

[Note: started again]
    torchrun lets ranks use the store through which it finds its own nodes, and that store outlives them. Ranks that are
    started again would find the addresses of dead ranks there: "Gloo connectFullMesh failed". So each start
    has a prefix of its own, which rank 0 makes up. No environment variable can serve: each node counts its restarts for
    itself, and ranks that are started again because a node came or went keep the old count.

    Another rank must not take the prefix of an earlier start for this one's. It writes a new random number and waits
    for the answer to that number. Rank 0 answers each number that it finds, until the rank has taken the prefix.
"""

from __future__ import annotations

import secrets
import time

import torch.distributed as dist

from rotorch.comm.agreement import format_ranks
from rotorch.core.errors import RankFailure

_LOOK_EVERY_S = 0.01


def fresh_store(shared: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """Returns the part of a store that only the ranks of this start write to. All ranks.

    Args:
        shared: the store, which may hold anything already.
        rank: this one.
        num_ranks: number of ranks.
        timeout_s: how long to wait for others.

    Raises:
        RankFailure: a rank did not come.
    """
    store = dist.PrefixStore("rotorch", shared)
    prefix = _invite(store, num_ranks=num_ranks, timeout_s=timeout_s) if rank == 0 else _ask(store, rank=rank)
    return dist.PrefixStore(f"rotorch/{prefix}", shared)


def _invite(store: dist.Store, *, num_ranks: int, timeout_s: float) -> str:
    """Tells all other ranks a new prefix; called by rank 0."""
    prefix, end = secrets.token_hex(8), time.monotonic() + timeout_s
    missing = list(range(1, num_ranks))
    answered: dict[int, str] = {}
    while missing:
        # All that have asked are answered before the next pause: a pause per rank would be ten seconds for 1,000.
        missing = [rank for rank in missing if not _has_taken(store, prefix, rank=rank, answered=answered)]
        if missing and time.monotonic() > end:
            raise RankFailure(f"{format_ranks(missing)} did not come within {timeout_s:g} s of the start")
        if missing:
            time.sleep(_LOOK_EVERY_S)
    return prefix


def _has_taken(store: dist.Store, prefix: str, *, rank: int, answered: dict[int, str]) -> bool:
    """Tells a rank the prefix if it asks for it; returns True once it has taken it.

    Args:
        store: of all starts.
        prefix: of this one.
        rank: the rank that is looked at.
        answered: by rank, the number that was answered last; written.
    """
    if store.check([f"taken/{prefix}/{rank}"]):
        return True
    if store.check([f"asks/{rank}"]):
        # May still be a number of an earlier start: another one is answered, too, until the rank has taken the prefix.
        asked = store.get(f"asks/{rank}").decode()
        if answered.get(rank) != asked:
            store.set(f"answer/{asked}", prefix)
            answered[rank] = asked
    return False


def _ask(store: dist.Store, *, rank: int) -> str:
    """Asks rank 0 for the prefix; called by every other rank. Waits as long as the store's timeout."""
    asked = secrets.token_hex(8)
    store.set(f"asks/{rank}", asked)
    prefix = store.get(f"answer/{asked}").decode()
    # Ends rank 0's wait: until then it looks for other numbers of this rank, since it may have found a stale one.
    store.set(f"taken/{prefix}/{rank}", "yes")
    return prefix

"""Ranks that find each other through a store that ranks before them have used."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rotorch.comm import fresh_store as fresh_store_module
from rotorch.comm.fresh_store import fresh_store
from rotorch.core.errors import RankFailure


def start(shared, *, ranks, num_ranks):
    """Each rank of a start writes its rank where the others look."""

    def rank_main(rank):
        store = fresh_store(shared, rank=rank, num_ranks=num_ranks, timeout_s=60)
        before = store.check([f"address/{rank}"])
        store.set(f"address/{rank}", str(rank))
        return before, [int(store.get(f"address/{other}")) for other in range(num_ranks)]

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(rank_main, ranks))


def hash_store(timeout_s=60):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def test_each_start_finds_its_own_ranks_only():
    shared = hash_store()
    for num_ranks in (3, 3, 2, 4, 1):  # also with fewer and more of them
        order = range(num_ranks - 1, -1, -1)
        assert start(shared, ranks=order, num_ranks=num_ranks) == [(False, list(range(num_ranks)))] * num_ranks


def test_a_start_that_was_broken_off_is_not_taken_for_the_next():
    shared = hash_store(0.2)
    with pytest.raises(RankFailure, match=r"rank 2 did not come within 0\.2 s"), ThreadPoolExecutor(1) as thread:
        rank_1 = thread.submit(fresh_store, shared, rank=1, num_ranks=3, timeout_s=0.2)
        fresh_store(shared, rank=0, num_ranks=3, timeout_s=0.2)
    rank_1.result()  # was answered
    with pytest.raises(dist.DistStoreError):  # no rank 0
        fresh_store(shared, rank=1, num_ranks=3, timeout_s=0.2)
    shared.set_timeout(timedelta(seconds=60))
    assert start(shared, ranks=(2, 1, 0), num_ranks=3) == [(False, [0, 1, 2])] * 3


class AllHaveAsked:
    """A store in which every rank has asked, and takes the answer at once."""

    def __init__(self):
        self.taken, self.looks = set(), 0

    def check(self, keys):
        self.looks += 1
        kind, *_, rank = keys[0].split("/")
        return kind == "asks" or rank in self.taken

    def get(self, key):
        return key.split("/")[1].encode()

    def set(self, key, value):
        self.taken.add(key.split("/")[1])


@pytest.mark.parametrize("num_ranks", [64, 1024])
def test_rank_0_answers_all_that_have_asked_before_it_pauses(num_ranks, monkeypatch):
    store, pauses = AllHaveAsked(), []
    # In this module alone: other threads of the process sleep, too.
    monkeypatch.setattr(fresh_store_module, "time", SimpleNamespace(**{**vars(time), "sleep": pauses.append}))
    fresh_store_module._invite(store, num_ranks=num_ranks, timeout_s=60)
    assert len(pauses) == 1 and store.looks == 3 * (num_ranks - 1)

"""Ranks that compare what they are about to do, as threads over one store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from rotorch.comm.agreement import Agreement, Disagreement, describe_differences, format_ranks
from rotorch.core.errors import ConfigError, RankFailure


def outcome(store, *, rank, num_ranks, tables, timeout_s=60.0):
    """Result of a rank that compares these tables one after another: "agreed", or the error's text."""
    agreement = Agreement(store, rank=rank, num_ranks=num_ranks)
    try:
        agreement.enter()
        for number, table in enumerate(tables):
            if isinstance(table, str):
                raise ConfigError(table)
            agreement.compare(table, round_number=number, timeout_s=timeout_s)
    except Disagreement as error:
        agreement.leave(patience_s=60.0)
        return str(error)
    except ConfigError as error:
        agreement.refuse(f"rank {rank}: {error}")
        agreement.leave(patience_s=60.0)
        return f"own: {error}"
    except RankFailure as error:
        return str(error)
    return "agreed"


def outcomes(by_rank, *, order=None, num_ranks=None):
    """The same of all ranks, which start in this order."""
    store, ranks = dist.HashStore(), list(order or by_rank)
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = {}
        for rank in ranks:
            found[rank] = threads.submit(
                outcome, store, rank=rank, num_ranks=num_ranks or len(by_rank), tables=by_rank[rank]
            )
            time.sleep(0.01)
        return [found[rank].result() for rank in sorted(found)]


ONE, OTHER = {"lr": 0.1, "seed": 1, "betas": (0.9, 0.95)}, {"lr": 0.2, "seed": 1, "betas": (0.9, 0.95)}
LR = "ranks were started differently: lr is 0.1 on rank 0 and 0.2 on {}. Start all of them with the same"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_with_the_same_values_go_on(order):
    assert outcomes({rank: [ONE, ONE] for rank in range(3)}, order=order) == ["agreed"] * 3


def test_numbers_that_are_equal_and_written_differently_are_named():
    said = outcomes({0: [{"a": 1, "b": 2}], 1: [{"a": True, "b": 2}]})
    assert said == [LR.replace("lr is 0.1", "a is 1").replace("0.2", "true").format("rank 1")] * 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_hears_which_value_differs_where(order, number):
    tables = {rank: [ONE] * number + [OTHER if rank == 1 else ONE] for rank in range(3)}
    assert outcomes(tables, order=order) == [LR.format("rank 1")] * 3


def test_ranks_of_one_value_are_named_together():
    tables = {0: [ONE], 1: [OTHER], 2: [{**ONE, "lr": 0.3}], 3: [OTHER], 4: [{"lr": 0.1, "seed": 1}]}
    (words,) = set(outcomes(tables))
    assert "betas is [0.9, 0.95] on rank 0 and nothing on rank 4" in words
    assert "lr is 0.1 on rank 0 and 0.2 on ranks 1 and 3 and 0.3 on rank 2" in words


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("refuses", [0, 1])
@pytest.mark.parametrize("number", [0, 1])
def test_every_rank_hears_of_one_that_refused(order, refuses, number):
    tables = {rank: [ONE] * number + (["no such file"] if rank == refuses else [ONE]) for rank in range(3)}
    expected = [f"rank {refuses}: no such file"] * 3
    expected[refuses] = "own: no such file"
    assert outcomes(tables, order=order) == expected


def test_a_difference_is_told_though_a_rank_never_comes(monkeypatch):
    monkeypatch.setattr("rotorch.comm.agreement._FOR_OTHERS_S", 0.1)
    tables = {0: [{**ONE, "ranks": 3}], 1: [{**ONE, "ranks": 2}]}
    (words,) = set(outcomes(tables, num_ranks=3))
    assert "ranks is 3 on rank 0 and 2 on rank 1" in words


def test_a_rank_that_does_not_come_is_named():
    found = outcome(dist.HashStore(), rank=0, num_ranks=3, tables=[ONE], timeout_s=0.1)
    assert found == "rank 0 waited 0 s for ranks 1 and 2 to start"


def test_two_processes_with_one_rank_are_refused():
    store = dist.HashStore()
    first, second = (Agreement(store, rank=1, num_ranks=2) for _ in range(2))
    first.enter()
    with pytest.raises(ConfigError, match="RANK=1 was given to two processes"):
        second.enter()


def test_where_all_agree_rank_0_reads_no_more_for_more_ranks():
    def requests(num_ranks):
        store = Counting(dist.HashStore())
        for rank in range(1, num_ranks):  # what they leave behind when they come first
            outcome(store, rank=rank, num_ranks=num_ranks, tables=[], timeout_s=1)
        dist.PrefixStore("round-0", store).add("arrived", num_ranks - 1)
        store.count = 0
        assert outcome(store, rank=0, num_ranks=num_ranks, tables=[ONE]) == "agreed"
        return store.count

    assert 0 < requests(1000) == requests(2) <= 16


class Counting(dist.Store):
    """A store that counts what is asked of it."""

    def __init__(self, store):
        super().__init__()
        self.store, self.count = store, 0

    def _ask(name):
        def ask(self, *arguments):
            self.count += 1
            return getattr(self.store, name)(*arguments)

        return ask

    set, get, add, check, compare_set, wait = map(_ask, ("set", "get", "add", "check", "compare_set", "wait"))


def test_long_lists_are_cut():
    assert format_ranks([3]) == "rank 3" and format_ranks([1, 2]) == "ranks 1 and 2"
    assert format_ranks(list(range(1, 1000))) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more"
    words = describe_differences({str(k): k for k in range(9)}, {1: {str(k): "-1" for k in range(9)}})
    assert words.count(" on rank 1") == 4 and "; and 5 more." in words

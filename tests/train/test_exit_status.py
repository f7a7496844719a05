"""Failing ranks: the one that a message names."""

import multiprocessing
import os
import time

import pytest

from rotorch.core.errors import ConfigError, FinalFailure, HeardFailure, RankFailure
from rotorch.train.launch.elastic import _kind_of
from rotorch.train.launch.exit_status import RankMonitor, explain
from rotorch.train.launch.status import FailureKind, RankPhase, RankStatus, StatusBoard, in_groups


def failed(rank, *, kind, at_s, message):
    return RankStatus(rank, 100 + rank, 3, RankPhase.FORWARD_BACKWARD, kind, at_s, 0.0, message, "")


def test_a_rank_that_only_heard_of_a_failure_is_not_the_first():
    heard = failed(0, kind=FailureKind.HEARD, at_s=1.0, message="another stage raised")
    cause = failed(1, kind=FailureKind.OWN, at_s=2.0, message="IndexError: too large")
    told = explain([heard, cause], exits={})
    assert isinstance(told, RankFailure) and str(told).startswith("rank 1 failed")
    assert "IndexError: too large" in str(told)


def test_a_failure_of_many_ranks_is_one_short_line():
    waiting = [RankStatus(r, 100 + r, 3, RankPhase.READING, FailureKind.NONE, 0.0, 0.0, "", "") for r in range(1000)]
    saving = [
        RankStatus(r, 100 + r, 3, RankPhase.SAVING, FailureKind.NONE, 0.0, 0.0, "", "") for r in range(1000, 1023)
    ]
    cause = failed(1023, kind=FailureKind.OWN, at_s=2.0, message="IndexError: too large")
    told = str(explain([*waiting, *saving, cause], exits={}))
    assert told.startswith("rank 1023 failed in step 3") and len(told) < 400
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more were in step 3, reading data; ranks 1000, 1001" in told


def test_ranks_that_all_do_something_else_are_counted():
    told = in_groups({rank: f"in step {rank}" for rank in range(100)}, verbs=("was", "were"))
    assert told.startswith("rank 0 was in step 0; rank 1 was in step 1; ")
    assert told.endswith("; rank 7 was in step 7; and 92 ranks more")
    few = in_groups({rank: "leaving" for rank in range(3)}, verbs=("was", "were"))
    assert few == "rank 0 was leaving; rank 1 was leaving; rank 2 was leaving"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2000"),
            FailureKind.HEARD,
        ),
        (HeardFailure("rank 1 has left this step"), FailureKind.HEARD),
        (RuntimeError("shapes cannot be multiplied"), FailureKind.OWN),
        (RankFailure("a neighbour is late"), FailureKind.OWN),
        (FinalFailure("out of memory"), FailureKind.FINAL),
        (ConfigError("no such file"), FailureKind.INPUT),
    ],
)
def test_who_loses_a_connection_has_only_heard_of_a_failure(error, kind):
    assert _kind_of(error) is kind


def test_who_knows_why_may_take_longer_to_say_so_than_who_heard():
    """A post-mortem of memory looks at every tensor; the others know at once that this rank has left the step."""
    board = StatusBoard(2)

    def rank(number, *, after_s, message, kind):
        board.enter(number, pid=os.getpid())
        time.sleep(after_s)
        board.fail(message, kind=kind)
        os._exit(1)

    fork = multiprocessing.get_context("fork")
    told_by = {
        0: dict(after_s=0.0, message="rank 1 has left this step", kind=FailureKind.HEARD),
        1: dict(after_s=2.0, message="out of memory", kind=FailureKind.FINAL),
    }
    ranks = {number: fork.Process(target=rank, args=(number,), kwargs=how) for number, how in told_by.items()}
    for process in ranks.values():
        process.start()
    watch = RankMonitor(board)
    with pytest.raises(FinalFailure, match=r"^rank 1 failed .*out of memory"):
        while True:
            watch.look({number: process.pid for number, process in ranks.items()})
            time.sleep(0.02)
    for process in ranks.values():
        process.join()

import os
import signal
import time

import psutil
import pytest
from bench_cases import children

import rotorch.bench.rank as rank_module
from rotorch.bench.contender import LIMIT, make_contender
from rotorch.bench.ranks import RowRanks
from rotorch.core.errors import RankFailure


def test_idle_ranks_sleep(task):
    ranks = RowRanks(task, row="ddp=2", num_ranks=2)
    try:
        ranks.ask("build")
        ranks.ask("steps", count=1)
        idle = children()
        before = [cpu_s(process) for process in idle]
        time.sleep(0.5)
        assert len(idle) == 2 and [cpu_s(process) for process in idle] == pytest.approx(before, abs=0.05)
    finally:
        ranks.stop()
    assert not idle & children()


def cpu_s(process):
    times = psutil.Process(int(process)).cpu_times()
    return times.user + times.system


def _broken(how):
    def make(task, *, row, rank):
        if rank == 1:
            if how == "raise":
                raise ValueError("no such luck")
            os.kill(os.getpid(), signal.SIGKILL)
        return make_contender(task, row=row, rank=rank)

    return make


@pytest.mark.parametrize(
    ("how", "says"), [("raise", "rank 1 raised.*no such luck"), ("die", "rank 1 was killed by SIGKILL")]
)
def test_a_rank_that_fails_is_named_and_nothing_is_left(task, monkeypatch, how, says):
    monkeypatch.setattr(rank_module, "make_contender", _broken(how))
    before = children()
    ranks = RowRanks(task, row="ddp=2", num_ranks=2)
    with pytest.raises(RankFailure, match=rf"(?s)ddp=2: {says}"):
        ranks.ask("build")
    ranks.close()
    assert children() == before


@pytest.mark.parametrize("how", ["raise", "die"])
def test_the_rank_that_failed_is_named_though_another_heard_of_it_earlier(task, monkeypatch, how):
    def make(task, *, row, rank):
        failed_at = time.monotonic()
        time.sleep(0.1 * rank)
        if rank == 1 and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            monkeypatch.setattr(rank_module.time, "monotonic", lambda: failed_at - 60.0)
        raise RuntimeError(f"rank {rank}: connection reset by peer")

    monkeypatch.setattr(rank_module, "make_contender", make)
    ranks = RowRanks(task, row="ddp=2", num_ranks=2)
    with pytest.raises(RankFailure, match=r"ddp=2: rank 1"):
        ranks.ask("build")
    ranks.close()


def test_ranks_that_hang_are_given_up(task, monkeypatch):
    monkeypatch.setattr(rank_module, "make_contender", lambda *_, **__: signal.pause())
    ranks = RowRanks(task, row="ddp=2", num_ranks=2)
    monkeypatch.setattr(ranks, "_timeout_s", 1.0)  # of the question: how long ranks take to start is up to the machine
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] gave no answer"):
        ranks.ask("build")
    ranks.close()


def test_ranks_started_afresh_measure_their_process(task):
    ranks = RowRanks(task, row=LIMIT, num_ranks=1, fresh=True)
    try:
        ranks.ask("build")
        ranks.ask("steps", count=1)
        ranks.ask("reset_peak")
        ranks.ask("steps", count=1)
        ((before, after),) = ranks.ask("process_memory")
    finally:
        ranks.stop()
    assert 0 < before.private_bytes <= before.pss_bytes <= before.rss_bytes <= before.highest_rss_bytes
    assert after.peak_bytes >= after.pss_bytes > 0

"""The harness itself: results by rank, and the cause of a failure before its consequences."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from rotorch.core.errors import RankFailure
from rotorch.testing.ranks import run_ranks


def total(number):
    tensor = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), float(tensor)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(num_ranks):
    expected = sum(range(10, 10 + num_ranks))
    assert run_ranks(total, 10, num_ranks=num_ranks) == [(r, num_ranks, expected) for r in range(num_ranks)]


def test_ranks_know_themselves_as_under_torchrun():
    def names():
        return [
            os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        ], torch.get_num_threads()

    assert run_ranks(names, num_ranks=2) == [(["0", "0", "2", "2"], 1), (["1", "1", "2", "2"], 1)]


def test_the_parent_is_left_as_it_was():
    before = dict(os.environ), torch.get_num_threads()
    run_ranks(total, 0, num_ranks=2)
    assert (dict(os.environ), torch.get_num_threads()) == before
    assert not dist.is_initialized()


def test_arguments_are_inherited_and_need_no_pickle():
    def call(function):
        return function() + dist.get_rank()

    assert run_ranks(call, lambda: 5, num_ranks=2) == [5, 6]


def test_large_results_come_through():
    def large():
        return torch.full((1 << 20,), float(dist.get_rank()))

    found = run_ranks(large, num_ranks=3)
    assert [float(t.mean()) for t in found] == [0.0, 1.0, 2.0]


def test_the_rank_that_raised_first_is_named_not_one_that_waited_for_it():
    def fail():
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"(?s)^rank 1 raised:.*the cause"):
        run_ranks(fail, num_ranks=3)


def test_a_rank_that_was_killed_is_named_with_its_signal():
    def die():
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"^rank 2 died: exit code -9"):
        run_ranks(die, num_ranks=3)


def test_a_rank_that_leaves_is_named():
    def leave():
        if dist.get_rank() == 0:
            os._exit(7)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"^rank 0 died: exit code 7"):
        run_ranks(leave, num_ranks=2)


def test_late_ranks_are_named_and_all_are_ended():
    pids = []

    def late(tell):
        os.write(tell, f"{os.getpid()} ".encode())
        if dist.get_rank() == 1:
            time.sleep(600)

    heard, tell = os.pipe()
    with pytest.raises(
        RankFailure, match=r"(?s)^ranks \[1\] of 2 have not finished after 3 s\nrank 1 is at\n.*in late"
    ):
        run_ranks(late, tell, num_ranks=2, timeout_s=3)
    os.close(tell)
    pids = [int(pid) for pid in os.read(heard, 1000).split()]
    os.close(heard)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_result_that_cannot_travel_is_an_error_of_its_rank():
    def unpicklable():
        return lambda: None

    with pytest.raises(RankFailure, match=r"(?s)rank 0 raised:.*pickle"):
        run_ranks(unpicklable, num_ranks=1)


def test_a_warning_is_an_error_in_a_rank_too():
    def warn():
        import warnings

        warnings.warn("planted", UserWarning, stacklevel=1)

    with pytest.raises(RankFailure, match=r"(?s)rank 0 raised:.*planted"):
        run_ranks(warn, num_ranks=1)


def test_what_ranks_print_is_not_lost(capfd):
    run_ranks(lambda: sys.stdout.write(f"said by {dist.get_rank()}\n"), num_ranks=2)
    assert sorted(capfd.readouterr().out.split("\n"))[1:] == ["said by 0", "said by 1"]


def test_leaving_early_breaks_nobodys_last_message():
    """A rank that is done keeps its connections until all are."""

    def chain():
        rank, value = dist.get_rank(), torch.zeros(1)
        if rank:
            dist.recv(value, rank - 1)
        if rank < dist.get_world_size() - 1:
            time.sleep(0.2)
            dist.send(value + 1, rank + 1)
        return float(value)

    assert run_ranks(chain, num_ranks=4) == [0.0, 1.0, 2.0, 3.0]

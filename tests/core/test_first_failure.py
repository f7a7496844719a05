import os
import signal

import pytest

from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.core.first_failure import Evidence, Failure, evidence_of, is_ending, is_hearsay


@pytest.mark.parametrize(
    ("error", "evidence"),
    [
        (ValueError("mine"), Evidence.RAISED),
        (RankFailure("mine"), Evidence.RAISED),
        (HeardFailure("rank 1 has left"), Evidence.HEARD),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), Evidence.HEARD),
        (RuntimeError("Read error [127.0.0.1]:4711: Connection reset by peer"), Evidence.HEARD),
        (ValueError("connection reset by peer"), Evidence.RAISED),  # of a file or a store, say
    ],
)
def test_what_was_heard_is_told_from_what_is_a_ranks_own(error, evidence):
    assert evidence_of(error) is evidence


def test_the_cause_does_not_follow_from_who_was_seen_first():
    heard, raised = Failure(Evidence.HEARD, 1.0, 0, "heard"), Failure(Evidence.RAISED, 2.0, 1, "raised")
    later, died = Failure(Evidence.RAISED, 3.0, 2, "too"), Failure(Evidence.DIED, 9.0, 3, "died")
    assert min([heard, later, raised]) is raised
    assert min([heard, later, raised, died]) is died
    assert is_hearsay([heard]) and not is_hearsay([heard, raised])


def test_a_process_that_has_ended_is_seen_before_it_is_reaped():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        assert not is_ending(pid) and not is_ending(os.getpid())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not is_ending(pid)

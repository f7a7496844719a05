"""Threads that carry gloo's messages, of processes whose layouts send by gloo."""

import os
import sys
import time
from pathlib import Path

import pytest
from torch import nn

import rotorch
from rotorch._torch_private import GLOO_THREADS
from rotorch.process.gloo_threads import let_computing_go_first
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")


def names():
    """Of this process's threads, once none has changed for a while: threads name themselves as they begin."""
    found, since = None, time.monotonic()
    while time.monotonic() - since < 0.2:
        now = {
            int(task.parent.name): task.read_text(errors="replace").strip()
            for task in Path("/proc/self/task").glob("*/comm")
        }
        if now != found:
            found, since = now, time.monotonic()
        time.sleep(0.01)
    return found


def threads(of=GLOO_THREADS):
    return {number for number, name in names().items() if name in of}


def policies(numbers):
    return {os.sched_getscheduler(number) for number in numbers}


def policies_around_a_model(layout):
    gloo = threads()
    others = set(names()) - gloo
    before = policies(gloo), policies(others)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = rotorch.parallelize(module, layout, plan={"0": "colwise", "2": "rowwise"}, device="cpu")
    after = policies(gloo), policies(others)
    model.close()
    return before, after, policies(threads(of={"gloo_tcp_loop"}))


@pytest.mark.parametrize("layout", ["ddp=2", "rtp=2[transport=send_receive]"])
def test_a_parallel_model_lets_computing_go_first(layout):
    for before, after, loops in run_ranks(policies_around_a_model, layout, num_ranks=2):
        assert before[0] == {os.SCHED_OTHER}
        assert after[0] == {os.SCHED_BATCH}
        assert after[1] == before[1]
        assert loops <= {os.SCHED_BATCH}  # those of the layout's own groups, too


def with_a_policy_of_its_own():
    gloo = threads()
    idle = min(gloo)
    os.sched_setscheduler(idle, os.SCHED_IDLE, os.sched_param(0))
    return let_computing_go_first(), len(gloo), os.sched_getscheduler(idle)


def test_a_policy_that_someone_has_given_stays():
    waiting, num_gloo, policy = run_ranks(with_a_policy_of_its_own, num_ranks=1)[0]
    assert (waiting, policy) == (num_gloo - 1, os.SCHED_IDLE)


def where_it_is_forbidden():
    def forbidden(*args):
        raise PermissionError("seccomp")

    os.sched_setscheduler = forbidden
    return let_computing_go_first(), policies(threads())


def test_where_it_is_forbidden_nothing_happens():
    assert run_ranks(where_it_is_forbidden, num_ranks=1) == [(0, {os.SCHED_OTHER})]


def with_another_name():
    Path("/proc/self/comm").write_bytes(b"f\xfcr sich")  # in Latin-1, as C libraries may
    num_gloo = len(threads())
    return let_computing_go_first(), num_gloo


def test_threads_have_names_of_any_bytes():
    waiting, num_gloo = run_ranks(with_another_name, num_ranks=1)[0]
    assert waiting == num_gloo > 0

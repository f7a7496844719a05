"""Threads that carry gloo's messages, of processes whose layouts send by gloo."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rotorch
from rotorch._torch_private import GLOO_THREADS
from rotorch.comm.message_threads import let_computing_go_first
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_BATCH is Linux's")


def threads(of=GLOO_THREADS):
    """Numbers of this process's threads of some names."""
    tasks = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text().strip() in of]
    return {int(t.name) for t in tasks}


def policies(numbers):
    return {os.sched_getscheduler(number) for number in numbers}


def policies_around_a_model(layout):
    dist.all_reduce(torch.ones(1))  # a thread names itself when it first runs
    everything = {int(t.name) for t in Path("/proc/self/task").iterdir()}
    gloo = threads()
    before = policies(everything)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = rotorch.parallelize(module, layout, plan={"0": "colwise", "2": "rowwise"}, device="cpu")
    after = policies(gloo), policies(everything - gloo), policies(threads(of={"gloo_tcp_loop"}))
    model.close()
    return len(gloo), before, after


@pytest.mark.parametrize("layout", ["ddp=2", "rtp=2[transport=send_receive]"])
def test_a_parallel_model_lets_computing_go_first(layout):
    for num_gloo, before, (gloo, others, own_groups) in run_ranks(policies_around_a_model, layout, num_ranks=2):
        assert num_gloo and before == others == {os.SCHED_OTHER}
        assert gloo == {os.SCHED_BATCH} and own_groups <= {os.SCHED_BATCH}


def with_a_policy_of_its_own():
    dist.all_reduce(torch.ones(1))
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

    dist.all_reduce(torch.ones(1))
    os.sched_setscheduler = forbidden
    return let_computing_go_first(), policies(threads())


def test_where_it_is_forbidden_nothing_happens():
    assert run_ranks(where_it_is_forbidden, num_ranks=1) == [(0, {os.SCHED_OTHER})]

"""Ranks start from processes that none could be forked from: in a new one, which has only what is sent to it."""

import contextlib
import importlib
import operator
import os
import signal
import sys
import threading
from functools import partial
from types import ModuleType

import psutil
import pytest
import torch
import torch.distributed as dist
from commands import wait_until, write_run

import rotorch.testing.verify as verify_module
from rotorch.bench.process_memory import MALLOC_ENVIRONMENT
from rotorch.bench.ranks import RowRanks
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.process.forking import forking
from rotorch.process.new_interpreter import call_fresh
from rotorch.run_config import load_run_config
from rotorch.strategies import parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train.run import start

fresh = partial(call_fresh, why="it has its reasons")


def test_a_function_runs_in_another_process_and_its_result_comes_back():
    assert fresh(os.getppid) == os.getpid()
    assert fresh(os.getenv, "CUDA_VISIBLE_DEVICES", hide_gpus=True) == ""
    assert fresh(sorted, [2, 1, 3], reverse=True) == [3, 2, 1]


def test_what_it_raises_is_raised_here():
    with pytest.raises(ConfigError) as wrong:
        fresh(parse_parallel, "nonsense=2")
    assert "nonsense" in str(wrong.value) and not hasattr(wrong.value, "__notes__")
    with pytest.raises(ZeroDivisionError) as unexpected:
        fresh(operator.truediv, 1, 0)
    assert "in the process that starts the ranks:\nTraceback" in unexpected.value.__notes__[0]


def test_a_process_that_dies_says_so():
    with pytest.raises(RankFailure, match="the process that starts the ranks ended with exit code 7"):
        fresh(os._exit, 7)


def test_what_cannot_be_sent_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"^ranks cannot be forked from this process: it has its .*lambda"):
        fresh(lambda: 1)


def test_what_is_not_in_a_file_is_refused_by_name(monkeypatch):
    """As functions of a notebook are: they can be sent, and are not found there."""
    notebook = ModuleType("notebook")
    exec("def cell(): pass", notebook.__dict__)
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    with pytest.raises(ConfigError, match=r"cannot be sent to a new one .*notebook.*Define it in a module of its own"):
        fresh(notebook.cell)


def test_a_new_process_starts_no_other_one():
    with pytest.raises(ConfigError, match="it has others, though it is a new one"):
        fresh(partial(call_fresh, os.getpid, why="it has others"))


@pytest.fixture
def until_asked(tmp_path, monkeypatch):
    """A function of a module that does without torch."""
    (tmp_path / "light.py").write_text("""
import pathlib, signal, time

def until_asked(ready):
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    pathlib.Path(ready).touch()
    while not asked:
        time.sleep(0.02)
    return "asked"
""")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("light").until_asked
    del sys.modules["light"]


def test_a_signal_to_this_process_goes_to_the_new_one(until_asked, tmp_path):
    def asks():
        wait_until((tmp_path / "ready").exists, what="the new process")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # a shell ignores it for what it starts in the background
    asker = threading.Thread(target=asks)
    asker.start()
    assert fresh(until_asked, str(tmp_path / "ready")) == "asked"
    asker.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_it_ends_with_the_process_that_started_it(until_asked, tmp_path):
    with forking():
        pid = os.fork()
    if pid == 0:
        fresh(until_asked, str(tmp_path / "ready"))
        os._exit(1)
    wait_until((tmp_path / "ready").exists, what="the new process")
    (found,) = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(lambda: found.status() == psutil.STATUS_ZOMBIE, what="its end")


@pytest.fixture
def in_a_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)


def gradient():
    weight = torch.ones(1, requires_grad=True)
    (weight * (1 + dist.get_rank())).sum().backward()
    return weight.grad.item(), dist.get_world_size()


@pytest.mark.slow  # the run of the next test starts in the same way
def test_ranks_start_from_a_process_that_is_in_a_group(in_a_group):
    assert run_ranks(gradient, num_ranks=2) == [(1.0, 2), (2.0, 2)]


def test_ranks_of_a_local_function_are_refused_in_a_process_that_is_in_a_group(in_a_group):
    with pytest.raises(ConfigError, match=r"it is rank 0 of 1 of a process group already, and .*local object"):
        run_ranks(lambda: gradient(), num_ranks=2)


def test_a_run_starts_from_a_process_that_is_in_a_group(in_a_group, tmp_path):
    config = load_run_config(write_run(tmp_path), overrides=["train.steps=2", "parallel.layout=rtp=2"])
    assert start(config, nproc=2)
    assert [*(tmp_path / "run" / "checkpoints").iterdir()]


def test_a_bench_starts_its_ranks_afresh_from_a_process_that_is_in_a_group(in_a_group, monkeypatch):
    started = []
    monkeypatch.setattr(RowRanks, "_start", lambda *_, environment: started.append(environment))
    monkeypatch.setattr(RowRanks, "_answers", lambda self: [])
    for fresh_ones in (False, True):
        RowRanks(None, row="ddp=2", num_ranks=2, fresh=fresh_ones).close()
    assert started == [{}, MALLOC_ENVIRONMENT]


@pytest.mark.slow
def test_a_model_is_verified_where_no_gpu_is_in_sight(tiny, monkeypatch):
    monkeypatch.setattr(verify_module, "gpu_in_sight", lambda: True)
    assert verify_module.verify(tiny("llama"), parallel="rtp=2", steps=1).ok

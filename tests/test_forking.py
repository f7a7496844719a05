"""Threads and locks of a process do not stop the ranks that it forks."""

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rotorch.bench.rank as bench_rank
from rotorch.bench.ranks import RowRanks
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.parallelize import load_step_code
from rotorch.process.forking import (
    call_forked,
    check_semaphores,
    forking,
    start_autograd,
    why_no_ranks,
    why_no_ranks_on_cpu,
)
from rotorch.run_config import OptimizerSection
from rotorch.testing.ranks import run_ranks
from rotorch.train.launch.elastic import launch

TINY = Path(__file__).parents[1] / "configs" / "tiny" / "llama.json"


class Remains:
    """Destroyed by a collection of garbage only. Says in which process that was."""

    def __init__(self, note):
        self.itself, self.note = self, note

    def __del__(self):
        self.note.write_text(str(os.getpid()))


@pytest.fixture
def remains(tmp_path):
    """Leaves garbage; yields where it is noted that it was destroyed. In the end it is, here."""
    gc.collect()
    gc.disable()
    Remains(tmp_path / "destroyed-in")
    yield tmp_path / "destroyed-in"
    gc.enable()
    gc.collect()
    assert (tmp_path / "destroyed-in").read_text() == str(os.getpid())


def start_by_launcher(work):
    def work_and_wait(board):
        done = bool(work())
        dist.barrier()  # a rank that leaves while the other one still connects to it ends the job
        return done

    launch(work_and_wait, num_ranks=2)


def start_by_tests(work):
    run_ranks(work, num_ranks=2)


def tiny_task():
    sizes = dict(vocabulary=64, num_ranks=2, micro_batch=2, sequence_length=16)
    return Task(name="tiny", model=json.loads(TINY.read_text()), optimizer=OptimizerSection(lr=1e-2), **sizes)


def start_by_bench(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_rank, "load_code", lambda task: work())
        RowRanks(tiny_task(), row="ddp=2", num_ranks=2).stop()


def load_for_bench():
    bench_rank.load_code(tiny_task())


def load_for_every_other():
    load_step_code(["rtp"])


every_start = pytest.mark.parametrize("start", [start_by_launcher, start_by_tests, start_by_bench])


@every_start
def test_ranks_leave_garbage_alone_that_was_there_before_them(start, remains, tmp_path):
    def collect():
        gc.collect()
        (tmp_path / f"collected-in-{os.getpid()}").touch()
        return True

    start(collect)
    assert not remains.exists()
    assert len([*tmp_path.glob("collected-in-*")]) == 2


def compute():
    """With two threads; a process that waits for ever is ended."""
    signal.alarm(600)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)
    torch.set_num_threads(before)
    signal.alarm(0)
    return True


@every_start
def test_ranks_compute_with_threads_that_the_process_before_them_had(start, tmp_path):
    def computes():
        compute()
        (tmp_path / f"computed-in-{os.getpid()}").touch()
        return True

    compute()
    start(computes)
    assert len([*tmp_path.glob("computed-in-*")]) == 2
    compute()


def in_a_fork(work, *, inside=True):
    """Result of a process that is forked inside or outside of a block; it has left the block then."""
    reader, writer = os.pipe()
    with forking() if inside else contextlib.nullcontext():
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(work()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        return stream.read()


def wrong_input():
    raise ConfigError("there is no such model")


def test_a_forked_call_answers_for_another_process():
    assert call_forked(os.getpid) != os.getpid()
    assert call_forked(lambda: compute() and [1, 2]) == [1, 2]
    with pytest.raises(ConfigError, match="there is no such model"):
        call_forked(wrong_input)
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        call_forked(lambda: 1 // 0)
    with pytest.raises(RankFailure, match="a forked process of the launcher was ended"):
        call_forked(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_rank_may_compute_and_fork_ranks_itself():
    compute()
    assert in_a_fork(lambda: compute() and in_a_fork(compute)) == "True"


def test_a_process_that_others_forked_may_fork_ranks():
    """It has not got the threads that it would end."""

    def forks():
        signal.alarm(600)
        threading.Thread(target=signal.pause, daemon=True).start()  # so it cannot be told by their number
        return in_a_fork(lambda: True)

    compute()
    assert in_a_fork(forks, inside=False) == "True"
    assert in_a_fork(lambda: compute() and in_a_fork(forks, inside=False)) == "True"


def frozen():
    with forking():
        pass
    return gc.get_freeze_count()


def test_garbage_is_collected_again_here_and_not_in_ranks():
    assert int(in_a_fork(frozen)) > 10_000
    assert gc.get_freeze_count() < 1000  # Python 3.12 freezes a few by itself
    with forking():
        with forking():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < 1000


def test_garbage_of_a_rank_does_not_pile_up_with_those_that_it_forks(tmp_path):
    def forks():
        Remains(tmp_path / "destroyed")
        with forking():
            return (tmp_path / "destroyed").exists()

    assert in_a_fork(forks) == "True"


def no_gradients(*_, **__):
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


def test_a_process_forked_now_says_what_it_could_not_do(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    assert why_no_ranks(on_gpu=False) == ""
    assert why_no_ranks(on_gpu=True) == "it has used a GPU, or asked torch for one"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    assert why_no_ranks(on_gpu=True) == ""
    monkeypatch.setattr(Tensor, "backward", no_gradients)
    assert why_no_ranks(on_gpu=False) == "it has computed gradients with a GPU in sight"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_threads_of_autograd_are_seen():
    def has_them():
        (Path(f"/proc/self/task/{os.getpid()}") / "comm").write_text("pt_autograd_0")
        return why_no_ranks_on_cpu()

    assert why_no_ranks_on_cpu() == ""
    assert in_a_fork(has_them) == "it has computed gradients with a GPU in sight"


def test_an_answer_that_cannot_be_had_is_no(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_is_in_bad_fork")
    assert why_no_ranks(on_gpu=True).startswith("it has used a GPU")


@pytest.mark.parametrize("load", [load_for_bench, load_for_every_other])
def test_what_is_loaded_before_ranks_are_forked_leaves_gpus_alone(load, monkeypatch):
    """A step of an optimizer, or a backward pass, would start CUDA where there is one."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.optim.AdamW, "step", no_gradients)
    monkeypatch.setattr(Tensor, "backward", no_gradients)
    load()


def gradients_after_fake_tensors():
    """As after torch.compile; names of this process's threads and what became of a process forked after that."""
    with FakeTensorMode():
        torch.empty(2)
    torch.ones(1, requires_grad=True).sum().backward()
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    return sorted(name for name in threads if "autograd" in name), in_a_fork(a_gradient)


def a_gradient():
    torch.ones(1, requires_grad=True).sum().backward()
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_autograd_starts_no_threads_without_a_gpu_whatever_computed_before():
    start_autograd()
    assert in_a_fork(gradients_after_fake_tensors) == "([], 'True')"
    assert in_a_fork(a_gradient) == "True"


def test_without_room_for_locks_shared_memory_is_named(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(16 << 10, 0, 16 << 10))
    check_semaphores(-2)
    if not Path("/dev/shm").is_dir():
        pytest.skip("locks lie elsewhere")
    with pytest.raises(
        ConfigError,
        match=r"^shared memory: to start 2 ranks takes 48\.0 KiB in /dev/shm \(16\.0 KiB free of 16\.0 KiB\)\. "
        r"Make it larger \(docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm\), or remove what fills it$",
    ):
        check_semaphores(2)

"""What a process leaves behind when it forks ranks does not stop them."""

import gc
import json
import os
import signal
from pathlib import Path

import pytest
import torch

import rotorch.bench.rank as bench_rank
from rotorch.bench.ranks import RowRanks
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError
from rotorch.forking import check_ranks_can_be_forked, forking
from rotorch.run_config import OptimizerSection
from rotorch.testing.ranks import run_ranks
from rotorch.train.launch import launch

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
    launch(lambda board: bool(work()), num_ranks=2)


def start_by_tests(work):
    run_ranks(work, num_ranks=2)


def start_by_bench(work):
    sizes = dict(vocabulary=64, num_ranks=2, micro_batch=2, sequence_length=16)
    task = Task(name="tiny", model=json.loads(TINY.read_text()), optimizer=OptimizerSection(lr=1e-2), **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_rank, "load_code", lambda task: work())
        RowRanks(task, row="ddp=2", num_ranks=2).stop()


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


@every_start
def test_ranks_compute_with_threads_that_the_process_before_them_had(start, tmp_path):
    def compute():
        signal.alarm(60)  # ends a rank that waits for ever
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        signal.alarm(0)
        (tmp_path / f"computed-in-{os.getpid()}").touch()
        return True

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        start(compute)
        torch.ones(1 << 20).add_(1)
    finally:
        torch.set_num_threads(before)
    assert len([*tmp_path.glob("computed-in-*")]) == 2


def frozen():
    """How many objects are left alone in a process forked now, after it has left the block that forked it."""
    reader, writer = os.pipe()
    with forking():
        pid = os.fork()
    if pid == 0:
        try:
            with forking():
                pass
            os.write(writer, str(gc.get_freeze_count()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        return int(stream.read())


def test_garbage_is_collected_again_here_and_not_in_ranks():
    assert frozen() > 10_000
    assert gc.get_freeze_count() < 1000  # Python 3.12 freezes a few by itself
    with forking():
        with forking():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() < 1000


@pytest.mark.parametrize("lost", [False, True])
def test_a_process_forked_now_says_whether_it_could_use_a_gpu(monkeypatch, lost):
    parent = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: lost and os.getpid() != parent)
    check_ranks_can_be_forked(on_gpu=False)
    if not lost:
        check_ranks_can_be_forked(on_gpu=True)
        return
    with pytest.raises(ConfigError, match="it has used a GPU, or asked torch for one"):
        check_ranks_can_be_forked(on_gpu=True)


def test_an_answer_that_cannot_be_had_is_no(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_is_in_bad_fork")
    with pytest.raises(ConfigError, match="it has used a GPU"):
        check_ranks_can_be_forked(on_gpu=True)

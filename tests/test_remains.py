"""What a process leaves in garbage when it forks ranks: they leave it alone, since its threads are not there."""

import gc
import json
import os
from pathlib import Path

import pytest

import rotorch.bench.rank as bench_rank
from rotorch.bench.ranks import RowRanks
from rotorch.bench.task import Task
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


def collect(*_, **__):
    gc.collect()
    return True


def start_bench(monkeypatch):
    monkeypatch.setattr(bench_rank, "load_code", collect)
    sizes = dict(vocabulary=64, num_ranks=2, micro_batch=2, sequence_length=16)
    task = Task(name="tiny", model=json.loads(TINY.read_text()), optimizer=OptimizerSection(lr=1e-2), **sizes)
    ranks = RowRanks(task, row="ddp=2", num_ranks=2)
    ranks.ask("build")
    ranks.stop()


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(lambda _: launch(collect, num_ranks=2), id="launch"),
        pytest.param(lambda _: run_ranks(collect, num_ranks=2), id="run_ranks"),
        pytest.param(start_bench, id="bench"),
    ],
)
def test_ranks_leave_garbage_alone_that_was_there_before_them(start, remains, monkeypatch):
    start(monkeypatch)
    assert not remains.exists()

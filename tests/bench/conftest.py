from pathlib import Path

import pytest
import torch
from bench_cases import TINY, write_run

from rotorch.bench.task import Task
from rotorch.run_config import OptimizerSection


@pytest.fixture
def benchmarks(monkeypatch, warm):
    """Programs in benchmarks/ can be imported. They set the number of threads, which is put back behind the test."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def task():
    return Task(
        name="tiny",
        model=TINY,
        vocabulary=64,
        num_ranks=2,
        micro_batch=2,
        sequence_length=16,
        optimizer=OptimizerSection(lr=1e-2),
    )


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path)

"""Peak memory of a pipeline's ranks: the simulator's number for their table."""

import dataclasses
import json
from pathlib import Path

import pytest
from bench_cases import TINY

from rotorch.bench.stage_costs import measured_and_predicted_peak
from rotorch.bench.task import Task
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

MODEL = {**TINY, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TASK = Task(name="small", model=MODEL, vocabulary=256, num_ranks=2, micro_batch=1, accumulation=5, sequence_length=32)


@pytest.mark.parametrize(
    ("parallel", "shards"),
    [
        ("zeropp=2x2", 2),
        pytest.param("zeropp=2x1[chunks=2,unit=2]", 1, marks=pytest.mark.slow),
        pytest.param("zeropp=2x1[unit=3]", 1, marks=pytest.mark.slow),
        pytest.param("zeropp=2x2[chunks=2,unit=2]", 2, marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2", 2, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_step_is_the_simulated_one(parallel, shards):
    task = dataclasses.replace(TASK, num_ranks=2 * shards)
    found = run_ranks(measured_and_predicted_peak, task, parallel, shards, num_ranks=task.num_ranks)
    assert max(abs(measured / predicted - 1) for measured, predicted in found) <= 0.05, found


ROOT = Path(__file__).resolve().parents[2]


def test_peaks_were_within_those_that_were_simulated():
    """The record that the page shows."""
    record = json.loads((ROOT / "benchmarks" / "results" / "pipelines-4ranks.json").read_text("utf-8"))
    off = [abs(r["measured"] / r["simulated"] - 1) for ranks in record["pipelines"]["peaks"].values() for r in ranks]
    assert len(off) == 12 and max(off) <= 0.02

"""What ranks of a pipeline hold at most is what the simulator says of their table."""

import dataclasses

import pytest
from bench_cases import TINY

from rotorch.bench.contender import UnderLayout
from rotorch.bench.stage_costs import predicted_transient_bytes
from rotorch.bench.task import Task
from rotorch.bench.tensor_memory import OPTIMIZER, WEIGHTS, measure_tensors
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")

MODEL = {**TINY, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TASK = Task(name="small", model=MODEL, vocabulary=256, num_ranks=2, micro_batch=1, accumulation=5, sequence_length=32)


def measured_and_predicted(task, parallel, shards):
    contender = UnderLayout(task, parallel=parallel)
    for step in range(2):
        contender.forward_backward(step)
        contender.update()
    model = contender.model
    batches = task.batches(0, share=model.batch_rank, num_shares=model.num_batch_ranks)
    transient = predicted_transient_bytes(
        model, batches[:2], num_micro_batches=task.accumulation, ranks_per_stage=shards
    )
    found = measure_tensors(contender, step=2)
    contender.close()
    return found.peak_bytes, found.resident[WEIGHTS] + found.resident[OPTIMIZER] + transient


@pytest.mark.parametrize(
    ("parallel", "shards", "within"),
    [
        ("zeropp=2x1[chunks=2,unit=2]", 1, 0.05),
        pytest.param("zeropp=2x2", 2, 0.05, marks=pytest.mark.slow),
        # The first stages hold 5.9 % more than simulated, about one chunk; where that lies is not known.
        pytest.param("zeropp=2x2[chunks=2,unit=2]", 2, 0.07, marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2", 2, 0.05, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_step_is_the_simulated_one(parallel, shards, within):
    task = dataclasses.replace(TASK, num_ranks=2 * shards)
    found = run_ranks(measured_and_predicted, task, parallel, shards, num_ranks=task.num_ranks)
    assert max(abs(measured / predicted - 1) for measured, predicted in found) <= within, found

"""A limit of a rank's memory, counted: what is chosen keeps to it in real steps, and takes what there is."""

from dataclasses import replace

import pytest
from bench_cases import TINY
from real_peaks import peak_of, planned

from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError
from rotorch.core.precision import dtype_of_passes, itemsize_of_passes
from rotorch.core.traffic import MicroBatch
from rotorch.models.hf import config_from_dict
from rotorch.planner.held_model import HeldModel
from rotorch.strategies import format_parallel, num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train.checks.preflight import check_model

pytestmark = pytest.mark.usefixtures("warm")

MODEL = {
    **TINY,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
}
TASK = Task(name="six", model=MODEL, vocabulary=512, num_ranks=2, micro_batch=2, accumulation=4, sequence_length=64)
ROWS = 4  # of a micro-batch, which both ranks of a pipeline pass on


def chosen(text, model=MODEL):
    """The layout that a limit comes to."""
    strategies, _ = check_model(
        config_from_dict(model, source=__file__),
        strategies=parse_parallel(text),
        batch=MicroBatch(ROWS, TASK.sequence_length),
        num_micro_batches=TASK.accumulation,
    )
    return format_parallel(strategies)


def test_no_more_layers_are_computed_again_than_a_limit_takes():
    free = max(run_ranks(peak_of, TASK, "pp=2[layers=3-3]", num_ranks=2))
    found = {}
    for share, fills in ((1.03, 0.95), (0.8, 0.95), (0.66, 0.9)):
        limit = int(share * free)
        found[share] = layout = chosen(f"pp=2[rank_memory={limit},recompute=auto]")
        peaks = run_ranks(peak_of, TASK, layout, num_ranks=2)
        assert fills * limit <= max(peaks) <= limit, (layout, peaks, limit)
    assert found[1.03] == "pp=2[layers=3-3]" == chosen("pp=2[rank_memory=1GiB,recompute=auto]")
    assert found[0.8] == "pp=2[layers=3-3,recompute=1-0]" and found[0.66] not in (found[0.8], found[1.03])
    with pytest.raises(ConfigError, match=r"no cut of 6 layers into 2 stages keeps each within"):
        chosen(f"pp=2[rank_memory={int(0.3 * free)},recompute=auto]")


def test_stages_end_inside_of_layers_where_that_is_faster():
    """A head as large as three layers."""
    model = {**MODEL, "vocab_size": 2048}
    task = replace(TASK, model=model, vocabulary=2048)
    free = max(run_ranks(peak_of, task, "pp=2[layers=4-2]", num_ranks=2))
    limit = int(1.1 * free)
    whole, half = (chosen(f"pp=2[rank_memory={limit},recompute=auto{more}]", model) for more in ("", ",halves=true"))
    assert ".5-" not in whole and ".5-" in half, (whole, half)
    peaks = run_ranks(peak_of, task, half, num_ranks=2)
    assert max(peaks) <= limit, (half, peaks, limit)


@pytest.mark.parametrize(
    ("parallel", "rows", "bound", "precision"),
    [
        ("pp=4[layers=1-2-2-1]", 4, 0.02, "bfloat16"),
        ("pp=4[layers=1-2-2-1]", 4, 0.01, "float32"),
        ("pp=2[layers=4-2,recompute=2-0]", 4, 0.01, "float32"),
        ("zeropp=2x2", 2, 0.02, "float32"),
        pytest.param("pp=2[layers=3-3,recompute=3-1]", 4, 0.01, "float32", marks=pytest.mark.slow),
        pytest.param("pp=2[layers=3-3,recompute=block]", 2, 0.01, "float32", marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2", 2, 0.01, "bfloat16", marks=pytest.mark.slow),
        pytest.param("pp=2[layers=3-3,recompute=3-1]", 4, 0.02, "bfloat16", marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2", 2, 0.01, "float32", marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2[recompute=block]", 2, 0.01, "float32", marks=pytest.mark.slow),
        pytest.param("pp=2[schedule=zb_h1]", 2, 0.02, "float32", marks=pytest.mark.slow),
        pytest.param("pp=2[schedule=zbv,layers=1-2-2-1]", 2, 0.02, "float32", marks=pytest.mark.slow),
    ],
)
def test_peaks_of_all_stages_are_the_planned_ones(parallel, rows, bound, precision):
    """Not only that of the rank that holds most. In bfloat16 norms keep no input of a layer as it is."""
    strategies = parse_parallel(parallel)
    ranks, inside = num_ranks(strategies), num_ranks(strategies) // strategies[0].stages
    task = replace(TASK, num_ranks=inside, micro_batch=rows, precision=precision)
    config, batch = config_from_dict(MODEL, source=__file__), MicroBatch(rows, 64, itemsize_of_passes(precision))
    asked = planned(config, rows=rows * TASK.accumulation, tokens=64, precision=precision)
    strategies = [strategy.at_precision(dtype_of_passes(precision)) for strategy in strategies]
    held = HeldModel.of(asked.spec, folded=asked.folded, short=asked.model, strategies=strategies)
    found = held.peaks(asked.traced, batch=batch, accumulation=TASK.accumulation, device="cpu")
    measured = run_ranks(peak_of, task, parallel, num_ranks=ranks)
    assert [memory.total_bytes for memory in found] == pytest.approx(measured[::inside], rel=bound)

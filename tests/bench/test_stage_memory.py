"""A limit of a rank's memory, counted: what is chosen keeps to it in real steps, and takes what there is."""

import pytest
from bench_cases import TINY
from real_peaks import peak_of

from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError
from rotorch.core.traffic import MicroBatch
from rotorch.models.hf import config_from_dict
from rotorch.strategies import format_parallel, parse_parallel
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


def chosen(text):
    """The layout that a limit comes to."""
    strategies, _ = check_model(
        config_from_dict(MODEL, source=__file__),
        strategies=parse_parallel(text),
        batch=MicroBatch(ROWS, TASK.sequence_length),
        num_micro_batches=TASK.accumulation,
    )
    return format_parallel(strategies)


def test_no_more_layers_are_computed_again_than_a_limit_takes():
    free = max(run_ranks(peak_of, TASK, "pp=2[layers=3-3]", num_ranks=2))
    assert chosen("pp=2[rank_memory=1GiB,recompute=auto]") == "pp=2[layers=3-3]"
    again = set()
    for share in (1.01, 0.9, 0.8, 0.7):
        layout = chosen(f"pp=2[rank_memory={int(share * free)},recompute=auto]")
        again.add(layout)
        peaks = run_ranks(peak_of, TASK, layout, num_ranks=2)
        assert max(peaks) <= share * free * 1.01, (layout, share, peaks, free)
    assert len(again) >= 3 and all("recompute=" in layout for layout in again - {chosen("pp=2[rank_memory=1GiB]")})
    with pytest.raises(ConfigError, match=r"no cut of 6 layers into 2 stages keeps each within"):
        chosen(f"pp=2[rank_memory={int(0.3 * free)},recompute=auto]")

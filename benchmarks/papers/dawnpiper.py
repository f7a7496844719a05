"""Largest micro-batch of a pipeline within a fixed memory per rank, as DawnPiper's paper asks (arXiv 2505.05856).

    python benchmarks/papers/dawnpiper.py        # writes benchmarks/results/papers/dawnpiper.json: some minutes

Four stages of a Llama of 12 layers with a vocabulary of 32,000 and 8 micro-batches, under 1F1B: the first stages keep
most micro-batches, the last one has the logits. For each way to cut the layers, and to compute some of them again, the
largest micro-batch is found whose measured peak is within the limit on every rank, by halving. Four real ranks run real
steps; only arithmetic on large tensors is left out (`WithoutArithmetic`), so bytes are exact and values are not looked
at. Slowest stage: operations of the stage that has most, computed again included, by those of equal layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

from rotorch.bench.contender import UnderLayout
from rotorch.bench.record import describe_origin, load_average
from rotorch.bench.task import Task
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import layer_costs
from rotorch.core.stages import whole_layers
from rotorch.core.traffic import MicroBatch
from rotorch.models.hf import config_from_dict
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.strategies import format_parallel, parse_parallel
from rotorch.testing.operations import WithoutArithmetic
from rotorch.testing.ranks import run_ranks
from rotorch.train.checks.preflight import check_model

OUT = Path(__file__).resolve().parents[1] / "results" / "papers" / "dawnpiper.json"
STAGES, TOKENS, MICRO_BATCHES = 4, 64, 8
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
    "use_cache": False,
}
EQUAL = "pp=4[layers=3-3-3-3]"
ROWS = (
    EQUAL,
    "pp=4[layers=3-3-3-3,recompute=block]",
    "pp=4[rank_memory={limit},recompute=auto]",
    "pp=4[rank_memory={limit},recompute=auto,halves=true]",
)
LIMITS = (400 << 20, 512 << 20, 1 << 30)
"""Bytes of a rank: weights take most of the first, and activations and logits most of the last."""
MOST_ROWS = 47


def peaks_of(task: Task, layout: str) -> int:
    """Bytes of this rank's tensors at the highest moment of a step. All ranks."""
    with WithoutArithmetic():
        contender = UnderLayout(task, parallel=layout)
        contender.forward_backward(0)
        contender.update()
        found = measure_tensors(contender, step=1).peak_bytes
        contender.close()
    return found


def layout_of(text: str, *, rows: int, limit: int) -> tuple[str, ModelSpec]:
    """The layout that a text comes to for a micro-batch of so many rows."""
    strategies, spec = check_model(
        config_from_dict(MODEL, source=__file__),
        strategies=parse_parallel(text.format(limit=limit)),
        batch=MicroBatch(rows, TOKENS),
        num_micro_batches=MICRO_BATCHES,
    )
    return format_parallel(strategies), spec


def measured(layout: str, *, rows: int) -> list[int]:
    """Peak of each rank."""
    task = Task(
        name="dawnpiper",
        model=MODEL,
        vocabulary=MODEL["vocab_size"],
        num_ranks=1,  # of different data: all stages have the same
        micro_batch=rows,
        accumulation=MICRO_BATCHES,
        sequence_length=TOKENS,
    )
    return run_ranks(peaks_of, task, layout, num_ranks=STAGES, timeout_s=600)


def slowest(layout: str, spec: ModelSpec) -> float:
    """Operations of the stage that has most, for a row of a micro-batch."""
    (stages,) = parse_parallel(layout)
    assert isinstance(stages, StageStrategy)
    costs = layer_costs(spec, batch=MicroBatch(1, TOKENS), halves=True)
    found = []
    for number, places in enumerate(stages.places_of(spec)):
        again = stages.recomputed(number, part=whole_layers(places))
        found.append(sum(costs[p].flops for p in places) + sum(costs[2 * n].again_flops for n in again))
    return float(max(found))


def largest(text: str, *, limit: int) -> dict[str, Any]:
    """The largest micro-batch of a way to cut, with its peaks."""
    low, high = 0, MOST_ROWS + 1
    best: dict[str, Any] = {"limit_bytes": limit, "asked": text.format(limit=f"{limit >> 20}MiB"), "rows": 0}
    while high - low > 1:
        rows = (low + high) // 2
        fits = False
        try:
            layout, spec = layout_of(text, rows=rows, limit=limit)
        except ConfigError:
            layout = ""  # no cut keeps to the limit
        if layout:
            peaks = measured(layout, rows=rows)
            fits = max(peaks) <= limit
            print(f"    {rows:3} rows  {layout:50} {[round(p / 2**20) for p in peaks]} MiB", flush=True)
        if fits:
            low = rows
            evenness = max(peaks) / min(peaks)
            best |= {"rows": rows, "layout": layout, "peaks": peaks, "max_by_min": evenness}
            best["slowest"] = slowest(layout, spec) / slowest(EQUAL, spec)
        else:
            high = rows
    return best


def main() -> int:
    """Measures all rows, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=OUT, help="where the record goes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {**describe_origin(), "model": MODEL, "tokens": TOKENS, "micro_batches": MICRO_BATCHES}
    record["rows"] = []
    for limit, text in product(LIMITS, ROWS):
        print(f"{limit >> 20} MiB: {text}", flush=True)
        record["rows"].append(largest(text, limit=limit))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**record, "load_average_after": load_average()}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

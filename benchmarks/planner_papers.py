"""Step times of published tables, predicted by the planner's own estimator.

    python benchmarks/planner_papers.py [--record FILE]

**Korthikanti et al., arXiv 2205.05198, table 5**: seconds of an iteration of GPT models of 22B to 1T parameters on 8 to
512 A100, with full recomputation, and with what the paper brings (sequence parallelism, attention cores recomputed
alone). The four rows of full recomputation fit two constants of the cluster; the other four are predicted.

**Tesseract, arXiv 2105.14500, table 1 (strong scaling)**: twelve arrangements of 4 to 64 A100. The speed of products is
fitted to the first row, four ranks of one node; seconds are not compared, the order is, by Spearman's rank correlation.
The paper says neither how many layers the model has nor how long a sequence is; 24 and 512 are taken, and numbers of
four bytes. The authors' public code does not sum gradients over the grids behind one another: `without_depth_sums`
leaves that out. The paper measures [8, 8] and [8, 8, 1], one algorithm, at 0.53 and 0.70 s: no prediction can order all
rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planner_truth import gpt

from rotorch.bench.record import describe_origin
from rotorch.core.traffic import MicroBatch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.planner.cluster import load_cluster
from rotorch.planner.planned import Planned
from rotorch.planner.speeds import LinkSpeed, Speeds, speeds_of
from rotorch.planner.step_time import StepTime, step_time
from rotorch.planner.workload import FoldedModel, Numerics, fold
from rotorch.shard.materialize import on_meta
from rotorch.strategies import batch_ranks, parse_parallel

# ---------------------------------------------------------------- Korthikanti et al.


@dataclass(frozen=True)
class Iteration:
    """A row of table 5 with its model of table 3: 2,048 tokens, a vocabulary of 51,200, tensors over 8 ranks."""

    name: str
    layers: int
    hidden: int
    heads: int
    stages: int
    chunks: int
    global_batch: int
    micro_batch: int
    full_s: float
    present_s: float


TABLE_5 = (
    Iteration("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    Iteration("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    Iteration("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    Iteration("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
)


def iteration_s(row: Iteration, speeds: Speeds, *, present: bool) -> float:
    """Predicted seconds of an iteration.

    Args:
        row: of the table.
        speeds: of the cluster.
        present: with sequence parallelism and attention cores recomputed alone, instead of whole layers.
    """
    tensors = "megatron=8[sequence_parallel=true]" if present else "megatron=8"
    strategies, parts = parse_parallel(tensors), ()
    if row.stages > 1:
        number = row.stages * row.chunks
        each, more = divmod(row.layers, number)
        sizes = [each + (place < more) for place in range(number)]
        schedule = f"schedule=interleaved_1f1b,chunks={row.chunks}," if row.chunks > 1 else ""
        stages = parse_parallel(f"pp={row.stages}[{schedule}layers={'-'.join(map(str, sizes))}]")
        strategies = (
            *stages,
            *strategies,
        )  # not to be trained so: rotorch refuses sequence parallelism inside of stages
        parts = tuple(range(a, b) for a, b in pairwise(accumulate([0, *sizes])))
    plan = Planned(
        model=gpt(layers=row.layers, hidden=row.hidden, sequence=2048, vocabulary=51200),
        strategies=strategies,
        batch=MicroBatch(row.micro_batch, 2048, itemsize=2),
        accumulation=row.global_batch // row.micro_batch,
        speeds=speeds,
        numerics=Numerics(fused_attention=False, heads=row.heads, recompute=not present, recompute_attention=present),
        parts=parts,
    )
    return step_time(plan).step_s


def fitted(speeds: Speeds) -> Speeds:
    """Returns the speeds whose products and memory fit the rows of full recomputation best, on a grid of 1 %."""

    def error(flops: float, moved: float) -> float:
        tried = replace(speeds, flops_per_s=flops, bytes_per_s=moved)
        return sum(abs(iteration_s(row, tried, present=False) / row.full_s - 1) for row in TABLE_5)

    peak, memory = 312e12, 2.039e12
    _, flops, moved = min(
        (error(peak * a / 100, memory * b / 100), peak * a / 100, memory * b / 100)
        for a in range(50, 101, 1)
        for b in range(40, 101, 5)
    )
    return replace(speeds, flops_per_s=flops, bytes_per_s=moved)


def korthikanti() -> dict[str, Any]:
    """Predictions beside table 5."""
    speeds = fitted(speeds_of(load_cluster("a100x64"), dtype="float16"))
    rows = []
    for row in TABLE_5:
        for present, measured in ((False, row.full_s), (True, row.present_s)):
            predicted = iteration_s(row, speeds, present=present)
            rows.append(
                {
                    "model": row.name,
                    "recompute": "attention cores" if present else "layers",
                    "is_fitted": not present,
                    "measured_s": measured,
                    "predicted_s": round(predicted, 3),
                    "error": round(predicted / measured - 1, 4),
                }
            )
    return {
        "fitted": {"flops_per_s": speeds.flops_per_s, "bytes_per_s": speeds.bytes_per_s},
        "rows": rows,
        "all": _errors([abs(row["error"]) for row in rows]),
        "predicted": _errors([abs(row["error"]) for row in rows if not row["is_fitted"]]),
    }


def _errors(errors: Sequence[float]) -> dict[str, float]:
    return {"mean": round(float(np.mean(errors)), 4), "max": round(float(np.max(errors)), 4)}


# ---------------------------------------------------------------- Tesseract

STRONG_SCALING = (
    ("megatron=4", 12, 0.1225, 0.4749),
    ("megatron=16", 12, 0.1143, 0.4293),
    ("megatron=64", 12, 0.1195, 0.5306),
    ("summa=2x2", 12, 0.1676, 0.5019),
    ("summa=4x4", 12, 0.2099, 0.6159),
    ("summa=8x8", 12, 0.1329, 0.3986),
    ("tesseract=2x2x1", 12, 0.1666, 0.5014),
    ("tesseract=2x2x2", 12, 0.0999, 0.3002),
    ("tesseract=4x4x1", 12, 0.1444, 0.4343),
    ("tesseract=4x4x2", 12, 0.1244, 0.3727),
    ("tesseract=4x4x4", 16, 0.0869, 0.2636),
    ("tesseract=8x8x1", 12, 0.1799, 0.5178),
)
"""Layout, rows of a batch, seconds of forward and of backward; hidden 3,072, 64 heads."""

_LAYERS, _TOKENS = 24, 512


def meluxina() -> Speeds:
    """Speeds of the paper's machine: nodes of four A100, two links of HDR InfiniBand each."""
    speeds = speeds_of(load_cluster("a100x64"), dtype="float16")
    node, network = speeds.links
    links = (
        LinkSpeed(4, node.bytes_per_s, node.latency_s, node.hop_s),
        LinkSpeed(1 << 20, network.bytes_per_s / 2, network.latency_s, network.hop_s),
    )
    return replace(speeds, links=links)


def a_transformer() -> FoldedModel:
    """A GPT of the paper's width, with the cuts that a grid needs."""
    with on_meta():
        config = config_from_dict(
            {
                "model_type": "gpt_neox",
                "hidden_size": 3072,
                "intermediate_size": 4 * 3072,
                "num_attention_heads": 64,
                "num_hidden_layers": _LAYERS,
                "max_position_embeddings": _TOKENS,
                "vocab_size": 51200,
                "dtype": "float16",
            },
            source="benchmarks/planner_papers.py",
        )
        return fold(describe(causal_lm(config), features=True))


def tesseract() -> dict[str, Any]:
    """Predicted and measured order of the twelve arrangements."""
    speeds, model = meluxina(), a_transformer().short()

    def predicted(text: str, rows: int, speeds: Speeds) -> StepTime:
        strategies = parse_parallel(text)
        plan = Planned(
            model=model.under(strategies[-1]),
            strategies=strategies,
            batch=MicroBatch(rows / batch_ranks(strategies), _TOKENS, itemsize=4),  # type: ignore[arg-type]
            accumulation=1,
            speeds=speeds,
            numerics=Numerics(fused_attention=False, heads=64, optimizer_bytes=0.0),
        )
        return step_time(plan)

    text, rows, *measured = STRONG_SCALING[0]
    least, most = 10e12, 156e12  # TF32 of an A100
    for _ in range(40):
        middle = (least + most) / 2
        slow = predicted(text, rows, replace(speeds, flops_per_s=middle)).step_s > sum(measured)
        least, most = (middle, most) if slow else (least, middle)
    speeds = replace(speeds, flops_per_s=least)
    found = []
    for text, rows, forward_s, backward_s in STRONG_SCALING:
        time = predicted(text, rows, speeds)
        found.append(
            {
                "parallel": text,
                "rows": rows,
                "measured_s": round(forward_s + backward_s, 4),
                "predicted_s": round(time.step_s, 4),
                "without_depth_sums_s": round(time.step_s - time.sums_s, 4),
            }
        )
    measured_s = [row["measured_s"] for row in found]
    return {
        "fitted": {"flops_per_s": speeds.flops_per_s},
        "rows": found,
        "spearman": round(spearman(measured_s, [row["predicted_s"] for row in found]), 3),
        "spearman_without_depth_sums": round(spearman(measured_s, [row["without_depth_sums_s"] for row in found]), 3),
    }


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values)
    return np.array([((array < value).sum() + (array <= value).sum()) / 2 for value in array], dtype=np.float64)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    record = {
        **describe_origin(),
        "korthikanti": korthikanti(),
        "tesseract": tesseract(),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.record is not None:
        arguments.record.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

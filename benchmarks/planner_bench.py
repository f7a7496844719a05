"""Predicted peaks of memory and step times beside measured ones: of rows of `rotorch bench --json`.

    python benchmarks/planner_bench.py --run RUN.toml [--set KEY=VALUE ...] --bench bench.json [--record OUT.json]
    python benchmarks/planner_bench.py --suite configs/bench/planner.toml --results DIR [--record OUT.json]

The run and its overrides are those that the bench was told of; of a suite, all cases that DIR has a result of.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

from rotorch.bench.record import describe_origin
from rotorch.bench.suite import load_suite
from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision, copies_itemsize, dtype_of_passes
from rotorch.core.spec import ModelSpec
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.planner.cluster import load_cluster
from rotorch.planner.search import Batch, Task, judged
from rotorch.planner.speeds import speeds_of
from rotorch.planner.traced import Traced
from rotorch.planner.workload import fold
from rotorch.run_config import load_run_config
from rotorch.shard.materialize import on_meta
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.traced.passes import trace_memory, traced_parts


def planned_task(config: Any, *, rows: int, tokens: int, precision: Precision) -> Task:
    """A model and a batch of so many rows, as the planner's search takes them.

    Args:
        config: of the model, transformers' own.
        rows: sequences of a step, over all ranks.
        tokens: of each.
        precision: of passes.
    """
    with on_meta():
        spec = describe(causal_lm(config), features=True, tokens=True)

    def shared(num_ranks: int) -> tuple[ModelSpec, Traced]:
        spec, traced = traced_parts(config, tokens=tokens, num_ranks=num_ranks, precision=precision)
        return spec.with_copies(copies_itemsize(precision)), traced

    cluster = load_cluster("cpu2")
    return Task(
        spec=spec.with_copies(copies_itemsize(precision)),
        traced=trace_memory(config, fold(spec), tokens=tokens, precision=precision),
        cluster=cluster,
        speeds=speeds_of(cluster, dtype=dtype_of_passes(precision) or "float32"),
        batch=Batch(rows, tokens),
        precision=precision,
        budget_bytes=float("inf"),
        shared=shared,
    )


def compared(run: Path, overrides: list[str], found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row of what a bench has found, with what was predicted."""
    config = load_run_config(run, overrides=overrides)
    tokens = config.data.sequence_length
    task = planned_task(
        config_from_dict(config.model.config or {}, source=str(run)),
        rows=found["tokens_per_step"] // tokens,
        tokens=tokens,
        precision=config.train.precision,
    )
    rows = []
    for row in found["rows"]:
        try:
            strategies = parse_parallel(row["parallel"])
        except ConfigError:
            continue  # another library's
        if row.get("error") or not row.get("peak_bytes_per_rank"):
            continue
        accumulation = found["task"]["accumulation"]
        rows_each = task.batch.rows // batch_ranks(strategies) // accumulation
        plan = judged(task, row["parallel"], rows=rows_each, accumulation=accumulation)
        memory = plan.memory
        measured = row["peak_bytes_per_rank"]
        rows.append(
            {
                "parallel": row["parallel"],
                "num_ranks": num_ranks(strategies),
                "rows": rows_each,
                "tokens": tokens,
                "measured_bytes": measured,
                "predicted_bytes": round(memory.total_bytes),
                "error": memory.total_bytes / measured - 1,
                "predicted_by_category": {name: round(value) for name, value in memory.by_category.items() if value},
                "measured_by_category": row["peak_by_category"],
                "measured_s": row["step_s_median"],
                "predicted_s": plan.step_s,
            }
        )
    return rows


def order(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Kendall's tau of predicted and measured step times, and how much slower the row is that would be chosen."""
    pairs = list(combinations(rows, 2))
    agree = [
        (a["measured_s"] - b["measured_s"]) * (a["predicted_s"] - b["predicted_s"]) > 0
        for a, b in pairs
        if a["measured_s"] != b["measured_s"]
    ]
    chosen = min(rows, key=lambda row: row["predicted_s"])
    best = min(row["measured_s"] for row in rows)
    return {
        "rows": len(rows),
        "tau": 2 * sum(agree) / max(1, len(agree)) - 1,
        "regret": chosen["measured_s"] / best - 1,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, help="of one bench")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the run")
    parser.add_argument("--bench", type=Path, help="what `rotorch bench --json` has written")
    parser.add_argument("--suite", type=Path, help="many benches")
    parser.add_argument("--results", type=Path, help="what `rotorch suite --out` has written")
    parser.add_argument("--record", type=Path, help="JSON file; the rows of one bench are added to it")
    arguments = parser.parse_args()
    if arguments.suite is not None and arguments.results is not None:
        benches = [
            (case.run, list(case.overrides), file)
            for case in load_suite(arguments.suite)
            if (file := arguments.results / f"{case.name}.json").exists()
        ]
        record: dict[str, Any] = {}
    elif arguments.run is not None and arguments.bench is not None:
        benches = [(arguments.run, arguments.set, arguments.bench)]
        old = arguments.record
        record = json.loads(old.read_text("utf-8")) if old is not None and old.exists() else {}
    else:
        parser.error("give --run and --bench, or --suite and --results")
    for run, overrides, bench in benches:
        found = json.loads(bench.read_text("utf-8"))
        rows, origin = compared(run, overrides, found), {name: found[name] for name in ("commit", "date")}
        for row in rows:
            measured, predicted = (row[f"{name}_bytes"] / 2**20 for name in ("measured", "predicted"))
            print(
                f"{row['parallel']:28} {row['rows']:4} x {row['tokens']:<5} "
                f"measured {measured:8.2f} MiB predicted {predicted:8.2f} MiB {100 * row['error']:+.2f} %  "
                f"{row['measured_s']:.4f} s measured {row['predicted_s']:.4f} s predicted"
            )
        ordered = {"bench": bench.stem, **order(rows)}
        print(ordered)
        record.setdefault("rows", []).extend({"run": run.stem, **row} for row in rows)
        origin["load"] = found["machine"]["load_average"][0]
        record.setdefault("orders", []).append({**ordered, "measured": origin})
    if arguments.record is not None:
        errors = sorted(abs(row["error"]) for row in record["rows"])
        record |= describe_origin()
        record["errors"] = {"rows": len(errors), "mean": sum(errors) / len(errors), "max": errors[-1]}
        record["errors"]["median"] = errors[len(errors) // 2]
        arguments.record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"planner_bench: {error}")

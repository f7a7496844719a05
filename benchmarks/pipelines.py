"""Pipelines on 2 x 2 ranks side by side: zeropp, pp over fsdp, rtp and megatron, and torch's own 1F1B with fully_shard.

    python benchmarks/pipelines.py --json benchmarks/results/pipelines-4ranks.json

Rows train the same model on the same global batch with AdamW, in turns within the same processes, over gloo; losses are
held against one process, and the weights that ranks hold against what a row says that it cuts (`rotorch bench` has the
method). With more ranks than cores times measure oversubscription too, so gathers and bytes sent stand beside them.

Predicted peaks are `pipelining/simulate.py`'s: what stages keep of one micro-batch is measured in a step of two, what
the table of the whole step makes of it is computed.

The paper's condition (arXiv 2402.03791): gathering weights once per unit sends less than tensor parallelism sends
activations if 2 s U b > 9 h (s tokens, U micro-batches per unit of b samples, h features).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from rotorch.bench.bar import parse_bar
from rotorch.bench.command import DOES_NOT_HOLD, OK, BenchOptions, check_model, exit_code, measure, read_layouts
from rotorch.bench.contender import LIMIT
from rotorch.bench.rank import load_code
from rotorch.bench.stage_costs import measured_and_predicted_peak, micro_batches_to_measure
from rotorch.bench.table import render
from rotorch.bench.task import Task, task_from_run
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.run_config import load_run_config
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule
from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PEER, EXPERT = "pipeline-fsdp2", "pipeline-fsdp2-keep"
"""torch's pipeline as it comes, and with weights that stay gathered from the first micro-batch to the last."""
PEERS = (PEER, EXPERT)
ZEROPP = "zeropp=2x2"
LAYOUTS = (ZEROPP, "zeropp=2x2[chunks=2,unit=2]", "pp=2,fsdp=2", "pp=2,rtp=2", "pp=2,megatron=2")
FASTER, LARGER = 1.2, 1.1
"""Tokens per second and peak bytes of `ZEROPP`, at least and at most, of those of `PEER`."""
OFF = 0.05
"""By which a measured peak may differ from the simulated one."""


def main(arguments: list[str] | None = None) -> int:
    """Runs all rows, prints the table and what it says of the bars; returns the exit code of a bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "configs" / "bench" / "llama-h384.toml", help="the model")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sample (64)")
    parser.add_argument("--micro-batches", type=int, default=6, help="of a step (6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a row per turn (3)")
    parser.add_argument("--parallel", action="append", help=f"rows (default: {', '.join(LAYOUTS)})")
    parser.add_argument("--json", type=Path, help="where every figure goes")
    given = parser.parse_args(arguments)
    for name in given.parallel or LAYOUTS:
        needed = micro_batches_to_measure(name)
        if given.micro_batches < needed:
            parser.error(f"--micro-batches {given.micro_batches}: to measure {name} takes {needed} or more")
    overrides = [
        f"data.sequence_length={given.sequence}",
        "train.micro_batch=1",
        f"train.accumulation={given.micro_batches}",
    ]
    layouts, num_ranks = read_layouts(given.parallel or LAYOUTS, peers=PEERS, nproc=4)
    task = task_from_run(load_run_config(given.run, overrides=overrides), name=given.run.stem, num_ranks=num_ranks)
    bars = [parse_bar(f"{ZEROPP} >= {FASTER} * {PEER}", rows=[LIMIT, *layouts, *PEERS])] if ZEROPP in layouts else []
    options = BenchOptions(rounds=given.rounds, steps=given.steps, process_memory=False)
    console = Console(width=160)
    spec = check_model(task, layouts=layouts, peers=PEERS)
    record = measure(task, spec, layouts=layouts, peers=PEERS, bars=bars, options=options, console=console)
    record["pipelines"] = said = {
        "messages": {row["parallel"]: row.get("messages_by_kind", {}) for row in record["rows"]},
        "condition": condition(task, unit=unit_of(given.micro_batches)),
        "peaks": {},
        "misses": [],
    }
    console.print(render(record))
    for line in lines(record, said):
        console.print(line, highlight=False, markup=False)
    _write(record, given.json)
    said["misses"] += larger_peaks(record)
    for name, strategies in layouts.items():
        if isinstance(strategies[0], StageStrategy) and strategies[-1].gathers_weights:
            shards = num_ranks // strategies[0].stages
            said["peaks"][name] = ranks = against_simulation(task, name, shards=shards)
            ratios = [rank["measured"] / rank["simulated"] for rank in ranks]
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            console.print(f"{name}: measured peak of each rank over the simulated one: {shown}", markup=False)
            if max(abs(ratio - 1) for ratio in ratios) > OFF:
                said["misses"].append(f"{name}: peaks are {shown} of the simulated ones, and may be off by {OFF:.0%}")
            _write(record, given.json)
    for miss in said["misses"]:
        console.print(f"does not hold: {miss}", highlight=False, markup=False)
    return exit_code(record) or (DOES_NOT_HOLD if said["misses"] else OK)


def _write(record: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def against_simulation(task: Task, parallel: str, *, shards: int) -> list[dict[str, float]]:
    """Measured and simulated peak bytes, by rank."""
    load_code(task)
    found = run_ranks(measured_and_predicted_peak, task, parallel, shards, num_ranks=task.num_ranks)
    return [{"measured": measured, "simulated": simulated} for measured, simulated in found]


def larger_peaks(record: dict[str, Any]) -> list[str]:
    """Says so if `ZEROPP` holds more than it may, beside `PEER`."""
    peaks = {row["parallel"]: row.get("peak_bytes_per_rank") for row in record["rows"]}
    ours, theirs = peaks.get(ZEROPP), peaks.get(PEER)
    if ours is None or theirs is None or ours <= LARGER * theirs:
        return []
    return [f"{ZEROPP} has x{ours / theirs:.2f} the peak bytes of {PEER}, and may have x{LARGER}"]


def unit_of(num_micro_batches: int) -> int:
    """Micro-batches per gather that `ZEROPP` takes by itself."""
    return make_zeropp_schedule(num_ranks=2, num_micro_batches=num_micro_batches).unit


def condition(task: Task, *, unit: int) -> dict[str, Any]:
    """The paper's condition for zeropp's default unit on two stages, and whether it holds."""
    samples = task.micro_batch * task.num_ranks // 2
    left, right = 2 * task.sequence_length * unit * samples, 9 * int(task.model["hidden_size"])
    return {"2 s U b": left, "9 h": right, "holds": left > right}


def lines(record: dict[str, Any], said: dict[str, Any]) -> list[str]:
    """Results of the bars, in words."""
    rows = {row["parallel"]: row for row in record["rows"]}
    found = []
    if {"tokens_per_s", "peak_bytes_per_rank"} <= rows[PEER].keys():
        for name, row in rows.items():
            if name != PEER and {"tokens_per_s", "peak_bytes_per_rank"} <= row.keys():
                faster = row["tokens_per_s"] / rows[PEER]["tokens_per_s"]
                larger = row["peak_bytes_per_rank"] / rows[PEER]["peak_bytes_per_rank"]
                found.append(f"{name}: x{faster:.2f} tokens/s and x{larger:.2f} peak bytes of {PEER}")
    numbers = said["condition"]
    return [*found, f"2 s U b = {numbers['2 s U b']}, 9 h = {numbers['9 h']}: the condition holds: {numbers['holds']}"]


if __name__ == "__main__":
    raise SystemExit(main())

"""Tensor parallelism that sums a part of its channels, as CAAT-Net's paper trains it (arXiv 2506.19645).

    python benchmarks/papers/caat_net.py                 # writes benchmarks/results/papers/caat_net.json: ten minutes

`megatron=4[sync_fraction=p]` sums a fraction p of the channels over ranks; the others stay each rank's own, which makes
another model. The demo's Llama (`configs/demo.toml`, hidden size 256) is trained on Python's own standard library with
each fraction and three seeds, all with the same settings; the loss is that of text that was held out, in bits per byte.
Bytes are what the Layouts say that a rank sends in a step, which tests hold to the meter. The paper trains 130M to 7B
parameters on 8 to 64 ranks, and finds the loss of p = 0.5 as low as that of p = 1.

A learning rate that suits one fraction need not suit another; none was tuned here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rotorch.bench.record import describe_origin, load_average
from rotorch.core.traffic import MicroBatch
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.planner.prediction import predict
from rotorch.run_config import load_run_config
from rotorch.shard.materialize import on_meta
from rotorch.strategies import parse_parallel

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "configs" / "demo.toml"
OUT = ROOT / "benchmarks" / "results" / "papers" / "caat_net.json"
RANKS, FRACTIONS, SEEDS = 4, (1.0, 0.5, 0.25), (1, 2, 3)
SETTINGS = {
    "train.steps": "150",
    "train.micro_batch": "4",
    "data.sequence_length": "128",
    "train.eval_every": "0",
    "train.eval_windows": "512",
    "train.checkpoint_every": "0",
    "sample.length": "0",
    "train.tensorboard": "false",
}

Row = dict[str, Any]


def layout_of(fraction: float) -> str:
    """The `--parallel` text."""
    return f"megatron={RANKS}" + ("" if fraction == 1 else f"[sync_fraction={fraction:g}]")


def sent_bytes(fraction: float) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind."""
    config = load_run_config(RUN, overrides=[f"{key}={value}" for key, value in SETTINGS.items()])
    with on_meta():
        spec = describe(causal_lm(config_from_dict(config.model.config or {}, source="demo")))
    batch = MicroBatch(config.train.micro_batch, config.data.sequence_length)
    return predict(spec, strategies=parse_parallel(layout_of(fraction)), rank=0, batch=batch).sent_bytes


def trained(fraction: float, *, seed: int) -> Row:
    """Trains once; a process of its own, as a user starts it."""
    with tempfile.TemporaryDirectory() as directory:
        numbers = Path(directory) / "numbers.json"
        settings = {**SETTINGS, "train.seed": str(seed), "train.out": f"{directory}/run"}
        command = [sys.executable, "-m", "rotorch", "train", str(RUN), "--parallel", layout_of(fraction)]
        command += [*(f"{key}={value}" for key, value in settings.items()), "--json", str(numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{layout_of(fraction)}, seed {seed}: {done.stderr.strip()}")
        found = json.loads(numbers.read_text())
    return {
        "parallel": layout_of(fraction),
        "fraction": fraction,
        "seed": seed,
        "steps": found["step"],
        "held_out_bits_per_byte": found["held_out_bits_per_byte"],
    }


def measured() -> Iterator[Row]:
    """Rows of all fractions; those of one seed after each other, so that a run that is broken off has whole seeds."""
    for seed in SEEDS:
        for fraction in FRACTIONS:
            yield trained(fraction, seed=seed)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Mean and range over seeds, and bytes, by fraction."""
    found = []
    for fraction in FRACTIONS:
        bits = [row["held_out_bits_per_byte"] for row in rows if row["fraction"] == fraction]
        if bits:
            sent = sent_bytes(fraction)
            found.append(
                {
                    "parallel": layout_of(fraction),
                    "fraction": fraction,
                    "mean_bits_per_byte": mean(bits),
                    "least_bits_per_byte": min(bits),
                    "most_bits_per_byte": max(bits),
                    "seeds": len(bits),
                    "sent_bytes": sum(sent.values()),
                    "sent_by_kind": sent,
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, trains, and writes the record after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    record: Row = {**describe_origin(), "run": RUN.name, "settings": SETTINGS, "rows": []}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    for row in measured():
        print(json.dumps(row), flush=True)
        record["rows"].append(row)
        record |= {"summary": summary(record["rows"]), "load_average_after": load_average()}
        options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

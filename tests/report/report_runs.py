"""Directories of runs for tests of `rotorch report`, written by hand: no torch."""

import json
import math
from pathlib import Path

VERSIONS = {"python": "3.11.7", "torch": "2.15.0", "rotorch": "0.1.0"}


def record(step, **other):
    """A line of metrics as `rotorch train` writes it."""
    return {
        "step": step,
        "loss": 5.5 * math.exp(-step / 120) + 0.3 * math.sin(step) ** 2 + 1.2,
        "tokens": 512 * step,
        "tokens_per_s": 1500.0 + 40 * math.sin(step / 5),
        "grad_norm": 1.0 + 1 / step,
        "lr": 5e-3 * min(1.0, step / 20),
        "peak_bytes": 300_000_000 + 10_000 * step,
        "step_s": 0.34,
    } | other


def write_run(directory: Path, records, *, about=None, checkpoints=(), failure="", events=(), trace=None) -> Path:
    """Writes a run's directory.

    Args:
        directory: to make.
        records: lines of metrics.
        about: contents of run.json; by default a small configuration.
        checkpoints: steps that have one.
        failure: text of failure.txt.
        events: lines of events.jsonl.
        trace: events of a trace.
    """
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = {"model": {"config": "llama"}, "train": {"steps": 300, "out": str(directory)}, "optimizer": {"lr": 5e-3}}
    about = {"parallel": "rtp=2", "command": "rotorch train run.toml --resume", "config": config} | (about or {})
    (directory / "run.json").write_text(json.dumps(about))
    for step in checkpoints:
        saved = directory / "checkpoints" / f"step-{step:08d}"
        saved.mkdir(parents=True)
        (saved / "rank-00000.safetensors").write_bytes(bytes(2048))
        (saved / "manifest.json").write_text(json.dumps({"parallel": "rtp=2", "num_ranks": 2, "versions": VERSIONS}))
    if failure:
        (directory / "failure.txt").write_text(failure)
    if events:
        (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    if trace is not None:
        (directory / "trace").mkdir()
        (directory / "trace" / "rtp-2.trace.json").write_text(json.dumps({"traceEvents": trace}))
    return directory


def traced(num_ranks=2, num_steps=3):
    """Events of a trace: each step of 10 ms computes 6, waits 2 and updates 2; rank 1 waits longer."""
    for rank in range(num_ranks):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rtp=2 rank {rank}"}}
        for step in range(num_steps):
            start = 10_000 * step
            for category, since, length in [
                ("forward", 0, 4_000),
                ("slice", 1_000, 1_000 * (1 + rank)),
                ("backward", 4_000, 4_000),
                ("gradient", 7_000, 1_000),
                ("optimizer", 8_000, 2_000),
            ]:
                yield {"name": category, "cat": category, "ph": "X", "ts": start + since, "dur": length, "pid": rank}


def eventful(directory: Path) -> Path:
    """A run with a skipped step, a spike, a failure, checkpoints, a trace and held-out text."""
    records = [record(step) for step in range(1, 301)]
    for step in (50, 100, 150, 200, 250, 300):
        records[step - 1] |= {"held_out_bits_per_byte": 3 + 50 / step, "held_out_loss": 2.4 + 50 / step}
    records[119] |= {"loss": None, "grad_norm": None, "skipped": True}
    records[199] |= {"loss": 42.0, "grad_norm": 900.0}
    return write_run(
        directory,
        records,
        checkpoints=(100, 200, 300),
        failure="2026-11-23 12:00:00\nrank 1 was killed by SIGKILL in step 217, in backward\n\nrank 0: waits\n",
        trace=list(traced()),
    )

"""`rotorch train` on a GPU as its user meets it: a model of 1B, its first step, saves, and a run that goes on.

See gpu.py. Four runs of Llama-3.2-1B's shapes on one GPU, in bfloat16, of text as bytes; by the clock of who waits for
the lines of metrics.jsonl:

    plain    no saves: seconds from the command to the end of the first step, and from step to step; it also reads
             the text, which the others find in a cache
    saves    a checkpoint in the middle, and seconds that the step behind it came later for it
    async    the same with `train.async_save`, and seconds a step takes while the checkpoint is written
    resumed  the run before goes on: seconds from the command to the end of its next step
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

LLAMA_3_2_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    **LLAMA_3_2_1B, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_AFTER = 4
"""Steps behind a save; as many are in front of it, the first ones among them."""
_LIMIT_S = 900.0


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """A row per run; `steps`: more of them on either side of a save."""
    half = _AFTER + steps
    with tempfile.TemporaryDirectory() as directory:
        config = write_config(Path(directory), device=device, tokens=tokens, steps=2 * half)
        save = f"train.checkpoint_every={half}"
        plain, _ = row("plain", config, [])
        rows = [plain]
        shutil.rmtree(config.parent / "plain")  # checkpoints of 15 GB each
        for name, options in (("saves", [save]), ("async", [save, "train.async_save=true"])):
            found, times = row(name, config, options)
            stall_s = max(0.0, times[half] - times[half - 1] - plain["step_s"])
            rows.append({**found, "stall_s": stall_s, "beside_s": times[half + 1] - times[half]})
        shutil.rmtree(config.parent / "saves")
        resumed, _ = row("resumed", config, [f"train.steps={2 * half + _AFTER}"], run="async", resume=True)
        rows.append(resumed)
    return {"model": TINY if device == "cpu" else LLAMA_3_2_1B, "tokens": tokens, "save_behind": half, "rows": rows}


def write_config(directory: Path, *, device: str, tokens: int, steps: int) -> Path:
    """A run configuration for one device."""
    model = TINY if device == "cpu" else LLAMA_3_2_1B
    tables = {
        "model.config": model,
        "parallel": {"layout": "single"},
        "data": {"source": "stdlib", "tokenizer": "bytes", "sequence_length": tokens, "cache_dir": str(directory)},
        "train": {"steps": steps, "micro_batch": 1, "device": device, "precision": "bfloat16", "keep": 1},
        "optimizer": {"lr": 1e-4, "warmup_steps": 1},
    }
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    path = directory / "run.toml"
    path.write_text("\n".join(lines), "utf-8")
    return path


def row(
    name: str, config: Path, options: list[str], *, run: str = "", resume: bool = False
) -> tuple[dict[str, Any], list[float]]:
    """One run in a directory of its own, or that of `run`, and the seconds at which its steps ended, by its lines.

    Raises:
        RuntimeError: the run fails, with its last line, or takes too long.
    """
    out = config.parent / (run or name)
    metrics, printed = out / "metrics.jsonl", config.parent / f"{name}.txt"
    known = len(lines_of(metrics))
    command = [sys.executable, "-m", "rotorch", "train", str(config), "--nproc", "1", *(["--resume"] if resume else [])]
    begun, times = time.monotonic(), []
    with printed.open("w") as output:
        process = subprocess.Popen([*command, f"train.out={out}", *options], stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            now = time.monotonic() - begun
            times += [now] * (len(lines_of(metrics)) - known - len(times))
            if now > _LIMIT_S:
                process.terminate()  # the launcher takes its rank with it
                process.wait()
                raise RuntimeError(f"{name}: not at its end after {_LIMIT_S:.0f} s")
            time.sleep(0.005)
    if process.returncode:
        last = printed.read_text("utf-8", "replace").strip().splitlines() or ["no word"]
        raise RuntimeError(f"{name}: exit code {process.returncode}: {last[-1]}")
    steps = [later - earlier for earlier, later in pairwise(times)]
    saved = sorted((out / "checkpoints").glob("step-*"))
    found = {
        "run": name,
        "first_step_s": times[0],
        "step_s": statistics.median(steps),
        "all_s": time.monotonic() - begun,
        "checkpoint_bytes": sum(file.stat().st_size for file in saved[-1].rglob("*") if file.is_file()),
    }
    return found, times


def lines_of(path: Path) -> list[str]:
    """Whole lines of a file that may not be there yet."""
    try:
        return path.read_text("utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []

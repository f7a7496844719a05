"""Takes a few steps with the whole SmolLM2-135M-Instruct under several layouts, and compares losses with one process's.

    python examples/finetune_smollm2/same_losses.py
    python examples/finetune_smollm2/same_losses.py --parallel rtp=4 --samples 4 --lora 8

Six samples of 64 tokens a step, from the speech of 2015, shared by the ranks. A step takes a core some twenty seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fetch import CACHE, Unavailable, smollm2, speeches

from rotorch import cli
from rotorch.strategies import batch_ranks, parse_parallel

TOLERANCE = 1e-5


def main() -> int:
    """Trains under each layout, compares, prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", action="append", help="a layout; several times; rtp=2 and rtp=3 by default")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=6, help="of a step; the ranks of each layout must divide it")
    parser.add_argument("--lora", type=int, help="train adapters of this rank only")
    options = parser.parse_args()
    try:
        gguf, folder = smollm2(), speeches()
    except Unavailable as error:
        print(f"skipped: an input cannot be had here: {error}")
        return 0
    alone, worst = None, 0.0
    for layout in ["single", *(options.parallel or ["rtp=2", "rtp=3"])]:
        losses = train(gguf, folder / "2015_barack_obama_d.txt", layout=layout, options=options)
        alone = alone or losses
        difference = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        worst = max(worst, difference)
        print(f"{layout}: losses {', '.join(f'{loss:.6f}' for loss in losses)}; off by {difference:.1e}", flush=True)
    return 0 if worst <= TOLERANCE else 1


def train(gguf: Path, text: Path, *, layout: str, options: argparse.Namespace) -> list[float]:
    """Runs `rotorch train`; returns the loss of each step, before its update."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        settings = {
            "model.init": gguf,
            "data.kind": "text",
            "data.source": text,
            "data.sequence_length": 64,
            "data.cache_dir": CACHE,
            "train.steps": options.steps,
            "train.global_batch": options.samples,
            "train.micro_batch": max(1, options.samples // batch_ranks(parse_parallel(layout))),
            "train.eval_windows": 1,
            "train.out": Path(folder) / "run",
            **({"lora.rank": options.lora} if options.lora else {}),
        }
        overrides = [f"{key}={value}" for key, value in settings.items()]
        code = cli.run(["train", str(Path(__file__).with_name("run.toml")), "--parallel", layout, *overrides])
        if code:
            sys.exit(code)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


if __name__ == "__main__":
    sys.exit(main())

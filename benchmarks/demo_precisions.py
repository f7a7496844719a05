"""Held-out loss of the demo in each precision, in the whole of its length: `make train` once for each.

    python benchmarks/demo_precisions.py [--json FILE] [--seeds 0 1 2] [--only TEXT]

Rows differ in `train.precision` and in `train.seed`; all else is that of configs/demo.toml. One seed's runs differ by
about as much as two seeds' do, so the means over seeds compare. `held_out_bits_per_byte` is the last line's of the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rotorch.bench.record import describe_origin

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("float32", "bfloat16")


def measured(precision: str, *, seed: int, steps: int) -> dict[str, Any]:
    """One run, and what it ends with."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "rotorch", "train", str(ROOT / "configs" / "demo.toml"), "--nproc", "2"]
        command += ["--json", f"{directory}/run.json", f"train.out={directory}/run", f"train.seed={seed}"]
        command += [f"train.precision={precision}", f"train.steps={steps}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{precision}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        found = json.loads(Path(directory, "run.json").read_text())
    names = ("steps", "held_out_bits_per_byte", "held_out_loss")
    return {"precision": precision, "seed": seed, **{name: found[name] for name in names}}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per run; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default: 300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="rows whose precision contains this")
    options = parser.parse_args(arguments)
    rows = []
    for seed in options.seeds:
        for precision in (each for each in PRECISIONS if options.only in each):
            rows.append(measured(precision, seed=seed, steps=options.steps))
            bits = rows[-1]["held_out_bits_per_byte"]
            print(f"{precision}, seed {seed}: {bits:.4f} bits per byte held out", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**describe_origin(), "rows": rows}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

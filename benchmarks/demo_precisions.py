"""Held-out loss of the demo in each precision, in the whole of its length: `make train` once for each.

    python benchmarks/demo_precisions.py [--json FILE] [--only TEXT]

Rows differ in `train.precision`, and one in how gradients travel (`hops=bfloat16`, over messages); seeds, data and all
else are those of configs/demo.toml. `held_out_bits_per_byte` is the last line's of the run.
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
MESSAGES = "rtp=2[transport=send_receive]"
ROWS = (
    ("rtp=2", "float32"),
    ("rtp=2", "bfloat16"),
    (MESSAGES.replace("]", ",hops=bfloat16]"), "bfloat16"),
)


def measured(parallel: str, precision: str, *, steps: int) -> dict[str, Any]:
    """One run, and what it ends with."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "rotorch", "train", str(ROOT / "configs" / "demo.toml"), "--nproc", "2"]
        command += ["--parallel", parallel, "--json", f"{directory}/run.json", f"train.out={directory}/run"]
        command += [f"train.precision={precision}", f"train.steps={steps}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{parallel} {precision}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        found = json.loads(Path(directory, "run.json").read_text())
    names = ("steps", "held_out_bits_per_byte", "held_out_loss")
    return {"parallel": parallel, "precision": precision, **{name: found[name] for name in names}}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line per run; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--steps", type=int, default=300, help="of a run (default: 300)")
    parser.add_argument("--only", default="", help="rows that contain this")
    options = parser.parse_args(arguments)
    rows = []
    for parallel, precision in ROWS:
        if options.only in f"{parallel} {precision}":
            rows.append(measured(parallel, precision, steps=options.steps))
            print(f"{parallel} {precision}: {rows[-1]['held_out_bits_per_byte']:.4f} bits per byte", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**describe_origin(), "rows": rows}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

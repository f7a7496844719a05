"""Costs and savings of rotation on a GPU. Needs one; without one it says so and ends with exit code 0.

    python benchmarks/gpu.py                    # everything, about 25 minutes; writes benchmarks/results/gpu-*.json
    python benchmarks/gpu.py --only slices      # one of: one_rank, shared, run, slices, parts

    one_rank  a step of one rank of 8 for the shapes of Llama-3-8B, by the clock, on the host, on the GPU, and its peak:
              FSDP2 as its documentation and as its experts have it, and rtp over memory without peers, in bfloat16 and
              under autocast, compiled, and recorded as CUDA graphs; at half, all and twice of `--tokens`. The other
              ranks are faked, so nothing is sent and nothing is waited for: this is what a rank computes and holds if
              communication hides entirely. A few layers are measured, and the growth from layer to layer is taken for
              the rest.
    shared    2 and 4 ranks that share the GPU, over symmetric memory and a gloo group: rtp's losses and gradients
              against one process in float64, and each rank's peak memory. No speed: ranks take turns on the GPU.
    run       `rotorch train` of a model of 1B: its first step, what saves cost, a run that is resumed. Takes 45 GB of
              the disk that holds temporary files.
    slices    what cutting a matrix product into 8 slices costs, and what fused matrices, two streams and two slices at
              a time win back.
    parts     weight gradients by one product, attention of few heads, copies and waits beside products, what a call
              costs the host, and first values of weights on the GPU and on the CPU.

It has not run on a GPU yet; its parts run on CPU in tests/bench/test_gpu_benchmark.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpu_one_rank  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_run  # noqa: E402
import gpu_shared  # noqa: E402
import gpu_slices  # noqa: E402

from rotorch.bench.record import describe_origin  # noqa: E402

PARTS = {
    "one_rank": gpu_one_rank.measure,
    "shared": gpu_shared.measure,
    "run": gpu_run.measure,
    "slices": gpu_slices.measure,
    "parts": gpu_parts.measure,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts that were asked for and writes one file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--tokens", type=int, default=4096, help="of one rank and step (default: 4096)")
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that are not (default: 5)")
    parser.add_argument("--out", type=Path, default=None, help="file (default: benchmarks/results/gpu-DEVICE.json)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the script")
    options = parser.parse_args(arguments)
    if options.tokens < 1 or options.steps < 1:
        parser.error("--tokens and --steps are positive numbers")
    if options.device == "cuda" and not torch.cuda.device_count():  # asks the driver's list: ranks are forked later
        print("gpu: torch sees no CUDA device; nothing measured")
        return 0
    found: dict[str, Any] = {
        "device": _device_name(options.device),
        **describe_origin(),
        "parts": {},
    }
    found["versions"]["cuda"] = torch.version.cuda
    # `slices` and `parts` last: they touch CUDA here, and ranks are forked.
    for name in (name for name in PARTS if name in (options.only or PARTS)):
        print(f"gpu: {name}", flush=True)
        try:
            found["parts"][name] = PARTS[name](device=options.device, tokens=options.tokens, steps=options.steps)
        except Exception as error:  # the other parts are worth having
            found["parts"][name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"gpu: {name}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            show(found["parts"][name])
    out = options.out or HERE / "results" / f"gpu-{found['device'].lower().replace(' ', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"gpu: wrote {out}")
    return 3 if '"error": ' in json.dumps(found["parts"]) else 0


def show(part: dict[str, Any]) -> None:
    """Prints one line for every row; the file has the rest."""
    for rows in part.values():
        for row in rows if isinstance(rows, list) else []:
            print("  " + "  ".join(f"{k} {_short(v)}" for k, v in row.items() if k not in ("measured", "seconds")))
    sys.stdout.flush()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={_short(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _device_name(device: str) -> str:
    """The GPU's name, asked for in a process of its own: this one forks, and must not have touched CUDA."""
    if device == "cpu":
        return "cpu"
    code = "import torch; print(torch.cuda.get_device_name(0))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

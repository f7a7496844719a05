"""One rank of 8 on a GPU, the others faked: time, host time, launches and peak memory of a step (see gpu.py).

    python benchmarks/gpu_one_rank.py --row "rtp=8[transport=symmetric_memory,visits=8]" bfloat16 false --layers 2

Rows are one process, FSDP2 (as its documentation has it, and as its experts set it up), and rtp over memory without
peers: the streams, events, copies and launches of a symmetric ring, but copies cross no link and signals wait for
nobody. Passes compute in bfloat16 with float32 masters and gradients, by copies of weights (`bfloat16`) or under
autocast, as written, compiled, or recorded. A step is forward and backward without the optimizer, which is as large in
every row. Each row is measured in a process of its own.

    step_s_median    seconds of a step, by the clock, until the GPU is done
    host_s_median    seconds of the process for a step of 16 tokens, where the GPU waits for it: hidden if the GPU has
                     more to do. At other lengths the process would wait for the GPU
    gpu_busy_s       seconds in which a kernel or a copy ran, by torch's profiler, of one step more
    kernels, copies  their numbers in that step, and `launches`: calls of the host for them, one for a recorded graph
    peak_bytes       of the allocator, in the timed steps; memory of recorded graphs is in `reserved_bytes` only
    reserved_bytes   the most that the allocator has had, since the row began

[Note: scaled up]
    Cases run with 2 and with 4 layers. What a layer adds is half of the difference; the whole model has 32. Memory and
    time of embedding, head and loss are in the measured part. Peaks grow by the layer as long as the peak is where it
    was: the two depths say so if they agree with a third, which one case by itself with `--layers 8` gives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_rank import LLAMA_3_8B, NULL, NUM_RANKS, PEER, PEER_IN_CHUNKS, TINY, Contender, in_group_of  # noqa: E402

from rotorch.core.compiling import RECORDED, Compile  # noqa: E402

BY_DEFAULT = NULL.replace("]", f",visits={NUM_RANKS}]")
"""As between GPUs."""
ROWS: tuple[tuple[str, str, Compile], ...] = (
    ("single", "bfloat16", False),
    (PEER, "bfloat16", False),
    (PEER_IN_CHUNKS, "bfloat16", False),
    (BY_DEFAULT, "bfloat16", False),
    (NULL.replace("]", ",visits=4]"), "bfloat16", False),
    (BY_DEFAULT, "autocast_bfloat16", False),
    (BY_DEFAULT.replace("[", "[recompute=slice,"), "bfloat16", False),
    (f"rtp={NUM_RANKS}[transport=send_receive,visits={NUM_RANKS}]", "bfloat16", False),
    (PEER, "bfloat16", True),
    (BY_DEFAULT, "bfloat16", True),
    (BY_DEFAULT, "bfloat16", RECORDED),
)
"""Layouts, the precision of their passes, and how their blocks run."""
DEPTHS = (2, 4)
SETTLED = 3
"""Steps that do not count: buffers are made, the order of passes is known, and graphs are recorded."""
LENGTHS = (0.5, 1, 2)
"""Tokens of a step, of those that were asked for: 2,048, 4,096 and 8,192 by default."""
HOST_TOKENS = 16
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_TIMEOUT_S = 240.0
_COMPILES = {"false": False, "true": True, RECORDED: RECORDED}


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """All rows at three lengths, each with what was measured and what the whole model would take by it."""
    shapes = LLAMA_3_8B if device == "cuda" else TINY
    lengths = sorted({max(int(share * tokens), 16) for share in LENGTHS})
    rows = []
    for parallel, mode, compiled in ROWS:
        cases = [in_a_process(parallel, mode, compiled, layers, device, lengths, steps) for layers in DEPTHS]
        for number, length in enumerate(lengths):
            measured = [case[number] if isinstance(case, list) else case for case in cases]
            row = {"parallel": parallel, "mode": mode, "compile": compiled, "tokens": length}
            rows.append({**row, **scaled(measured, layers=shapes["num_hidden_layers"]), "measured": measured})
    return {
        "ranks": NUM_RANKS,
        "model": "Llama-3-8B" if device == "cuda" else "tiny",
        "method": "one rank, the others faked: nothing sent, nothing waited for; scaled from "
        f"{DEPTHS[0]} and {DEPTHS[1]} layers to {shapes['num_hidden_layers']}",
        "rows": rows,
    }


def in_a_process(
    parallel: str, mode: str, compiled: Compile, layers: int, device: str, lengths: Sequence[int], steps: int
) -> list[dict[str, Any]] | dict[str, Any]:
    """Runs `one_case` in a process that has done nothing before; gives its result, or its error."""
    row = [parallel, mode, str(compiled).lower()]
    command = [sys.executable, __file__, "--row", *row, "--layers", str(layers), "--device", device]
    command += ["--steps", str(steps), "--tokens", *map(str, lengths)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"layers": layers, "error": f"it took more than {_TIMEOUT_S:.0f} s"}
    if done.returncode:
        return {"layers": layers, "error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


SCALED = (
    "step_s_median",
    "host_s_median",
    "gpu_busy_s",
    "kernels",
    "copies",
    "launches",
    "peak_bytes",
    "reserved_bytes",
)


def scaled(measured: Sequence[dict[str, Any]], *, layers: int) -> dict[str, Any]:
    """Figures of `layers` layers, from those of two smaller numbers of layers (see [Note: scaled up])."""
    if any("error" in case for case in measured):
        return {}
    less, more = measured
    found = {}
    for name in SCALED:
        if less[name] is not None:
            each = (more[name] - less[name]) / (more["layers"] - less["layers"])
            found[f"{name}_scaled"] = less[name] + each * (layers - less["layers"])
    return found


def one_case(
    parallel: str,
    mode: str,
    compiled: Compile,
    *,
    shapes: dict[str, Any],
    layers: int,
    device: str,
    lengths: Sequence[int],
    steps: int,
) -> list[dict[str, Any]]:
    """Times and peaks of this process as rank 3 of 8, per length."""
    found = []
    with in_group_of(parallel):
        contender = Contender(
            parallel, mode, shapes=shapes, layers=layers, tokens=lengths[0], device=device, compile=compiled
        )
        contender.fill()
        contender.give(HOST_TOKENS)
        host_s = host_seconds(contender, steps=steps)
        for tokens in lengths:
            contender.give(tokens)
            measured = timed(contender, device=device, steps=steps)
            found.append({"layers": layers, "tokens": tokens, "host_s_median": host_s, **measured})
        del contender
    return found


def host_seconds(contender: Contender, *, steps: int) -> float:
    """Seconds of this process, all threads', for a step of few tokens; the median."""
    for _ in range(SETTLED):
        contender.forward_backward()
    times = []
    for _ in range(steps):
        start_s = time.process_time()
        contender.forward_backward()
        times.append(time.process_time() - start_s)
    return statistics.median(times)


def timed(contender: Contender, *, device: str, steps: int) -> dict[str, Any]:
    """Times of some steps, what the GPU did in another one, and the peak."""
    for _ in range(SETTLED):
        contender.forward_backward()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        reserved = torch.cuda.max_memory_reserved()  # graphs are recorded now
        torch.cuda.reset_peak_memory_stats()
    by_clock = []
    for _ in range(steps):
        start_s = time.perf_counter()
        contender.forward_backward()
        if on_gpu:
            torch.cuda.synchronize()
        by_clock.append(time.perf_counter() - start_s)
    return {
        "step_s_median": statistics.median(by_clock),
        "step_s_all": by_clock,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": reserved if on_gpu else None,
        **(work_of_gpu(contender) if on_gpu else dict.fromkeys(("gpu_busy_s", "kernels", "copies", "launches"))),
    }


def work_of_gpu(contender: Contender) -> dict[str, Any]:
    """Kernels and copies of a step, and the seconds in which any of them ran."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contender.forward_backward()
        torch.cuda.synchronize()
    events = list(profiler.events())
    # Blocks that code has named span the time in between as well.
    work = [each for each in events if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
    copies = sum(each.name.startswith(("Memcpy", "Memset")) for each in work)
    spans = [(each.time_range.start, each.time_range.end) for each in work]
    return {
        "gpu_busy_s": 1e-6 * covered(spans),
        "kernels": len(work) - copies,
        "copies": copies,
        "launches": sum(each.device_type == DeviceType.CPU and each.name.startswith(_LAUNCHES) for each in events),
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans of time."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main(arguments: list[str] | None = None) -> None:
    """One row; prints it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=3, required=True, metavar=("LAYOUT", "PRECISION", "COMPILE"))
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes (default: cuda)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    parallel, mode, compiled = options.row
    warnings.simplefilter("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    found = one_case(
        parallel,
        mode,
        _COMPILES[compiled],
        shapes=LLAMA_3_8B if options.device == "cuda" else TINY,
        layers=options.layers,
        device=options.device,
        lengths=options.tokens,
        steps=options.steps,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

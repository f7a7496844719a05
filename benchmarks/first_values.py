"""Time that a rank of 8 takes to make the first values of Llama-3-8B: `materialize`, on CPU.

    python benchmarks/first_values.py [--json FILE] [--rounds 3] [--tiny]

One rank over torch's fake process group, under fsdp=8: an eighth of each weight, a billion float32 numbers, most of
them normal. Rounds with one thread and with all cores take turns.

    ns_per_element    process time (all threads') of a round per number, in nanoseconds; the median over rounds
    s                 seconds by the clock for this rank's part, the median over rounds
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_rank import LLAMA_3_8B, NUM_RANKS, TINY  # noqa: E402

import rotorch  # noqa: E402
from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.models.hf import causal_lm, config_from_dict  # noqa: E402
from rotorch.testing.fake import as_rank  # noqa: E402

LAYOUT = f"fsdp={NUM_RANKS}"


def measure(shapes: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """Rows by number of threads."""
    threads = sorted({1, len(os.sched_getaffinity(0))})
    times: dict[int, list[tuple[float, float]]] = {number: [] for number in threads}
    with as_rank(3, num_ranks=NUM_RANKS):
        with rotorch.on_meta():
            module = causal_lm(config_from_dict(shapes, source="benchmarks/first_values.py"))
        model = rotorch.parallelize(module, LAYOUT, device="cpu")
        elements = sum(held.local.numel() for held in model.weights.values())
        model.materialize(seed=0)  # pages are there from now on
        for seed in range(rounds):
            for number in threads:
                torch.set_num_threads(number)
                start, of_process = time.perf_counter(), time.process_time()
                model.materialize(seed=seed)
                times[number].append((time.perf_counter() - start, time.process_time() - of_process))
        model.close()
    rows = [
        {
            "threads": number,
            "ns_per_element": statistics.median(1e9 * of_process / elements for _, of_process in found),
            "s": statistics.median(s for s, _ in found),
            "s_all": [s for s, _ in found],
        }
        for number, found in times.items()
    ]
    return {"parallel": LAYOUT, "dtype": "float32", "elements": elements, "rows": rows}


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of threads (default: 3)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this script")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds is 1 or more")
    shapes = TINY if options.tiny else LLAMA_3_8B
    origin = describe_origin()
    found = measure(shapes, rounds=options.rounds)
    print(f"{found['elements']} numbers")
    for row in found["rows"]:
        print(f"{row['threads']:3} threads  {row['ns_per_element']:6.1f} ns of processor time each  {row['s']:7.1f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"model": shapes, "ranks": NUM_RANKS, **origin, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

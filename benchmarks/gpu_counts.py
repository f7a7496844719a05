"""Counts of one layer's forward and backward, as a GPU would get it, on CPU: operations, casts, bytes, host time.

    python benchmarks/gpu_counts.py [--json FILE] [--tokens 2048] [--rounds 5] [--only TEXT]

One rank of 8 over torch's fake process group, in the shapes of Llama-3-8B but for its vocabulary, of which layers see
nothing. What a layer adds is the difference between two depths, in a step after the first ones. Counts need no
arithmetic (`rotorch.testing.operations`), so neither memory nor time of the model are taken. Host time is process time
of real steps of a tiny model of the same kind; rows take turns, and the median over rounds counts.

[Note: host time in wider numbers]
    A GPU's product is one call more for the host, like any other. On a CPU a small product in bfloat16 takes 17 us by
    itself, and one in float32 takes 3 us, about as long as other calls. So host time of passes in bfloat16 with weights
    in float32 is that of passes in float32 with weights in float64: the same calls, casts and messages. (A gradient of
    weights is a product and a sum in either, where CUDA has one call.) Autocast has no such pair: its rows are measured
    as they are, to be compared among themselves. "host_wider" of a row says which it is.

    ops_per_layer                operations that are no views, allocations or messages: at least one launch each
    casts_per_layer              those of them that only change a dtype
    copies_per_layer             those of them that only copy
    elementwise_bytes_per_layer  read and written by operations that are no products and no attention
    lane_calls_per_layer         copies, sums, marks, waits and signals of a symmetric ring, where a copy engine and
                                 other streams work
    host_s_per_layer             seconds of the host (see [Note: host time in wider numbers])
    sync_calls_per_step          calls between the first and the last micro-batch for which the host waits for the GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_rank import LLAMA_3_8B, NULL, NUM_RANKS, PEER, TINY, Contender, in_group_of  # noqa: E402

from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.ops import running_sum  # noqa: E402
from rotorch.testing.operations import WithoutArithmetic  # noqa: E402

ROWS = (
    ("single", "autocast_bfloat16"),
    (PEER, "bfloat16"),
    (f"rtp={NUM_RANKS}[transport=send_receive]", "autocast_bfloat16"),
    (NULL, "autocast_bfloat16"),
    ("single", "bfloat16"),
    (f"rtp={NUM_RANKS}[transport=send_receive]", "bfloat16"),
    *((f"rtp={NUM_RANKS}[transport=send_receive,visits={g}]", "bfloat16") for g in (8, 4, 2, 1)),
    (NULL, "bfloat16"),
    *((NULL.replace("]", f",visits={g}]"), "bfloat16") for g in (8, 4)),
)
"""Layouts, each with the precision of its passes: under autocast, or with weights in bfloat16. `symmetric_memory` is
over memory without peers."""
SHAPES = {**LLAMA_3_8B, "vocab_size": 4096}
DEPTHS = (1, 3)
SETTLED = 2
"""Steps before one that counts: buffers are made and the order of passes is known."""


def count_rows(rows: tuple[tuple[str, str], ...], *, shapes: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Counts that a layer adds to those of a step, for some rows."""
    found = []
    for parallel, mode in rows:
        counts = []
        for layers in DEPTHS:
            with in_group_of(parallel):
                # Made with arithmetic: a tiny model of the same kind is tried first, and its values decide.
                contender = Contender(parallel, mode, shapes=shapes, layers=layers, tokens=tokens)
                # Products with wider sums are there on CUDA only, and need no arithmetic here.
                on_cuda = mock.patch.object(running_sum, "_WIDENS", ("cpu",))
                with WithoutArithmetic(), on_cuda:
                    for _ in range(SETTLED):
                        contender.forward_backward()
                    counts.append(contender.counted())
                del contender
        less, more = counts
        a_layer = {name: (more[name] - less[name]) / (DEPTHS[1] - DEPTHS[0]) for name in less}
        found.append({"parallel": parallel, "mode": mode, **{f"{k}_per_layer": v for k, v in a_layer.items()}})
    return found


def time_rows(rows: tuple[tuple[str, str], ...], *, rounds: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Host time of a layer and synchronising calls of a step of a tiny model, for some rows, in turn."""
    contenders: dict[tuple[str, str], list[Contender]] = {}
    alone = [row for row in rows if row[0] == "single"]
    with ExitStack() as stack:
        for group in (alone, [row for row in rows if row not in alone]):
            # One process, so one group at a time: what is alone needs none during its steps.
            made = ExitStack() if group is alone else stack
            if group:
                made.enter_context(in_group_of(group[0][0]))
            for row in group:
                contenders[row] = [
                    Contender(*row, shapes=TINY, layers=layers, tokens=8, wider=is_wider(row[1])) for layers in DEPTHS
                ]
            made.close() if group is alone else None
        for contender in (each for pair in contenders.values() for each in pair):
            contender.fill()
            for _ in range(SETTLED):
                contender.forward_backward()
        times: dict[tuple[str, str], list[list[float]]] = {row: [[], []] for row in contenders}
        for _ in range(rounds):
            for row, pair in contenders.items():
                for contender, of_depth in zip(pair, times[row], strict=True):
                    start_s = time.process_time()
                    contender.forward_backward()
                    of_depth.append(time.process_time() - start_s)
        found = {}
        for row, (less, more) in times.items():
            each = [(b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(less, more, strict=True)]
            waits = contenders[row][0].sync_calls()
            found[row] = {
                "host_s_per_layer": statistics.median(each),
                "host_s_per_layer_all": each,
                "host_wider": is_wider(row[1]),
                "sync_calls": waits,
            }
    return found


def is_wider(mode: str) -> bool:
    """True if host time of a precision is measured in wider numbers (see the module's note)."""
    return not mode.startswith("autocast")


def measure(*, shapes: dict[str, Any], tokens: int, rounds: int, only: str = "") -> dict[str, Any]:
    """All rows: counts for `shapes`, host time and synchronising calls of a tiny model."""
    rows = tuple(row for row in ROWS if only in " ".join(row))
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = count_rows(rows, shapes=shapes, tokens=tokens)
        timed = time_rows(rows, rounds=rounds)
    for row in counted:
        row |= timed[row["parallel"], row["mode"]]
    own = [sum(row["sync_calls"].values()) for row in counted if row["parallel"] != PEER]
    return {"rows": counted, "sync_calls_per_step": max(own, default=0)}


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--tokens", type=int, default=2048, help="of one rank and micro-batch (default: 2048)")
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps (default: 5)")
    parser.add_argument("--only", default="", help="rows whose layout or precision contains this")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or options.rounds < 1:
        parser.error("--tokens is 2 or more, --rounds 1 or more")
    found = measure(shapes=SHAPES, tokens=options.tokens, rounds=options.rounds, only=options.only)
    print(
        f"{'a layer, forward and backward':44} {'ops':>6} {'casts':>6} {'copies':>7} {'MB':>8} {'lanes':>6} {'ms':>7}"
    )
    for row in found["rows"]:
        print(
            f"{row['parallel'] + '  ' + row['mode']:44} {row['ops_per_layer']:7.0f} {row['casts_per_layer']:7.0f} "
            f"{row['copies_per_layer']:7.0f} {row['elementwise_bytes_per_layer'] / 1e6:7.0f} "
            f"{row['lane_calls_per_layer']:7.0f} {1e3 * row['host_s_per_layer']:7.2f}  waits: {row['sync_calls']}"
        )
    if options.json:
        record = {
            "model": SHAPES,
            "depths": DEPTHS,
            "ranks": NUM_RANKS,
            "tokens": options.tokens,
            **describe_origin(),
            **found,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

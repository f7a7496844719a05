"""First-order model of a step of Llama-3-8B on 8 H100, by the planner's lanes, before any GPU has measured it.

    python benchmarks/gpu_step_model.py [--json FILE] [--tokens 2048 4096 8192]

Passes compute in bfloat16, with one sequence per rank. Links carry weights in bfloat16 and gradients in float32, as
with `train.precision = "bfloat16"` and FSDP2's own policy (`links="mixed"`), or both in bfloat16, where that is the
model's own dtype.

Every assumption is a figure of `planner/clusters/h100x8.toml` and stands in the record; docs/speed.md says which
measurement replaces it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from gpu_rank import LLAMA_3_8B, NUM_RANKS, TINY  # noqa: E402

from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.core.precision import copies_itemsize  # noqa: E402
from rotorch.models.describe import describe  # noqa: E402
from rotorch.models.hf import causal_lm, config_from_dict  # noqa: E402
from rotorch.planner.cluster import load_cluster  # noqa: E402
from rotorch.planner.search import Batch, Task, judged  # noqa: E402
from rotorch.planner.speeds import speeds_of  # noqa: E402
from rotorch.planner.workload import fold  # noqa: E402
from rotorch.shard.materialize import on_meta  # noqa: E402
from rotorch.traced.passes import trace_memory  # noqa: E402

CLUSTER = "h100x8"
LINKS = ("mixed", "bfloat16")
"""What crosses links: weights in bfloat16 and gradients in float32 (`param_dtype`); both in bfloat16."""
PEER = f"fsdp={NUM_RANKS}"
LAYOUTS = (
    PEER,
    *(
        f"rtp={NUM_RANKS}[recompute=none,transport={transport},visits={g}]"
        for transport in ("symmetric_memory", "send_receive")
        for g in (8, 4, 2, 1)
    ),
)
"""The first one is what the others are compared with; none computes anything again."""


def modelled(shapes: dict[str, Any], *, tokens: int, links: str) -> list[dict[str, Any]]:
    """Rows of all layouts for sequences of so many tokens, one per rank."""
    config = config_from_dict({**shapes, "use_cache": False}, source=__file__)
    with on_meta():
        module = causal_lm(config).to(torch.float32 if links == "mixed" else torch.bfloat16)
        spec = describe(module, features=True, tokens=True).with_copies(copies_itemsize("bfloat16"))
    cluster = load_cluster(CLUSTER)
    task = Task(
        spec=spec,
        traced=trace_memory(config, fold(spec), tokens=tokens, precision="bfloat16"),
        cluster=cluster,
        speeds=speeds_of(cluster, dtype="bfloat16"),
        batch=Batch(NUM_RANKS, tokens),
        precision="bfloat16",
        budget_bytes=float("inf"),
    )
    plans = [judged(task, layout, rows=1, accumulation=1) for layout in LAYOUTS]
    return [
        {
            "parallel": plan.parallel,
            "links": links,
            "tokens": tokens,
            "step_s": plan.step_s,
            "of_fsdp": plans[0].step_s / plan.step_s,
            "compute_s": plan.time.compute_s,
            "copies_s": plan.time.copies_s,
            "waiting_s": plan.time.waiting_s,
            "optimizer_s": plan.time.optimizer_s,
            "busy_s": {str(lane): seconds for lane, seconds in plan.time.busy_s.items()},
        }
        for plan in plans
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], help="of one rank")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of Llama-3-8B")
    options = parser.parse_args(arguments)
    shapes = TINY if options.tiny else LLAMA_3_8B
    rows = [row for links in LINKS for tokens in options.tokens for row in modelled(shapes, tokens=tokens, links=links)]
    print(f"{'layout':62} {'links':9} {'tokens':>7} {'ms':>8} {'of fsdp':>8} {'waiting':>8}")
    for row in rows:
        print(
            f"{row['parallel']:62} {row['links']:9} {row['tokens']:7} {1e3 * row['step_s']:8.1f} {row['of_fsdp']:8.2f} "
            f"{1e3 * row['waiting_s']:8.1f}"
        )
    if options.json:
        record = {
            "model": shapes,
            "cluster": CLUSTER,
            "assumptions": asdict(speeds_of(load_cluster(CLUSTER), dtype="bfloat16")),
            **describe_origin(),
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

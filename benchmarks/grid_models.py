"""One model under layouts of as many ranks, forward and backward apart: what Tesseract's table of strong scaling shows.

    python benchmarks/grid_models.py --json benchmarks/results/grid-models-8ranks.json

The model is that of configs/bench/llama-h384.toml with 8 key/value heads, the global batch 16 sequences of 64 tokens,
shared by as many ranks as a layout gives batches of their own. Layouts take turns within the same processes. Forward
is the time from the batch to the loss, with what autograd keeps; backward is the rest of `forward_backward`, sums of
gradients included. All rows are layouts, whose processes `parallelize` sets alike. Times are medians over the rounds
of the slowest rank's time; with more ranks than cores they measure all ranks' work together, so a layout wins by
doing and moving less, not by waiting less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rotorch
from rotorch.bench.record import describe_origin, load_average
from rotorch.comm.meter import Meter
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.models.losses import causal_lm_loss, count_targets
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import code_of
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "bench" / "llama-h384.toml"
LAYOUTS = ["tesseract=2x2x2", "megatron=8", "ddp=2,summa=2x2", "atp=2x4", "rtp=8"]
PHASES = ("forward_s", "backward_s", "step_s")


class TimedLoss:
    """The model's own loss; remembers when forward was done."""

    count_targets = staticmethod(count_targets)

    def __init__(self) -> None:
        self.forward_done = 0.0

    def __call__(self, module: nn.Module, batch: dict[str, Tensor], num_targets: int) -> Tensor:
        loss = causal_lm_loss(module, batch, num_targets)
        self.forward_done = time.perf_counter()
        return loss


def measure(config: dict[str, Any], layouts: Sequence[str], rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """This rank's measurements of every layout."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config["vocab_size"], (rows, tokens), generator=generator)
    models: dict[str, tuple[ParallelModel, TimedLoss, dict[str, Tensor]]] = {}
    results: dict[str, Any] = {}
    for layout in layouts:
        loss = TimedLoss()
        with rotorch.on_meta():
            module = causal_lm(config_from_dict(config, source="bench")).train()
        model = rotorch.parallelize(module, layout, device="cpu", loss=loss).materialize(seed=0)
        mine = ids[model.batch_rank :: model.num_batch_ranks]
        models[layout] = model, loss, {"input_ids": mine, "labels": mine}
        one_step(*models[layout])
        with Meter() as meter:
            value = one_step(*models[layout])[0]
        results[layout] = {
            "loss": value,
            "transport": model.sharded.transport,
            "sent_bytes": meter.total_sent_bytes,
            "resident_bytes": sum(held.local.nbytes for held in model.weights.values()),
            **{phase: [] for phase in PHASES},
        }
    for number in range(rounds):
        turn = number % len(layouts)
        for layout in [*layouts[turn:], *layouts[:turn]]:
            _, *times = one_step(*models[layout])
            for phase, seconds in zip(PHASES, times, strict=True):
                results[layout][phase].append(seconds)
    for model, *_ in models.values():
        model.close()
    return results


def one_step(model: ParallelModel, loss: TimedLoss, batch: dict[str, Tensor]) -> tuple[float, float, float, float]:
    """Loss; seconds of forward, of what follows, and of both."""
    for parameter in model.parameters():
        parameter.grad = None
    dist.barrier()
    begin = time.perf_counter()
    value = float(model.forward_backward(batch))
    end = time.perf_counter()
    return value, loss.forward_done - begin, end - loss.forward_done, end - begin


def main() -> int:
    """Measures all layouts and prints them as a table; 1 if their losses differ."""
    import tomllib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", action="append", help=f"a layout, as often as you like ({' '.join(LAYOUTS)})")
    parser.add_argument("--batch", type=int, default=16, help="sequences of the global batch (16)")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence (64)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where every figure goes")
    given = parser.parse_args()
    origin = describe_origin()
    layouts = given.parallel or LAYOUTS
    config = {**tomllib.loads(CONFIG.read_text("utf-8"))["model"]["config"], "num_key_value_heads": 8}
    sizes = {num_ranks(parse_parallel(layout)) for layout in layouts}
    if len(sizes) != 1:
        parser.error(f"layouts of {sorted(sizes)} ranks: give layouts of as many ranks each")
    load_code(config, layouts)
    by_rank = run_ranks(measure, config, layouts, given.batch, given.tokens, given.rounds, num_ranks=sizes.pop())
    rows = [summary(layout, [ranks[layout] for ranks in by_rank]) for layout in layouts]
    first = rows[0]
    print(f"{given.batch} x {given.tokens} tokens on {len(by_rank)} ranks, float32")
    print(f"{'':20} {'forward':>11} {'backward':>11} {'step':>11} {'sent a rank':>12} {'weights':>12}   transport")
    for row in rows:
        times = " ".join(f"{1e3 * row[f'{phase}_median']:8.1f} ms" for phase in PHASES)
        print(
            f"{row['layout']:20} {times} {row['sent_bytes_per_rank']:12,} {row['resident_bytes_per_rank']:12,}   "
            f"{row['transport']}"
        )
    for row in rows[1:]:
        row["first_is_faster_by"] = {phase: ratio(first, row, phase) for phase in PHASES}
        said = ", ".join(f"{phase.removesuffix('_s')} x{r:.2f}" for phase, r in row["first_is_faster_by"].items())
        print(f"{first['layout']} against {row['layout']}: {said}")
    if given.json:
        shape = {"batch": given.batch, "tokens": given.tokens, "rounds": given.rounds}
        record = {**origin, "load_average_after": load_average(), "config": config, **shape, "rows": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    same = all(abs(row["loss"] - first["loss"]) <= 1e-5 * abs(first["loss"]) for row in rows)
    if not same:
        print(f"losses differ: { {row['layout']: row['loss'] for row in rows} }")
    return 0 if same else 1


def load_code(config: dict[str, Any], layouts: Sequence[str]) -> None:
    """Imports, before ranks fork, what each of them would import for itself."""
    for layout in layouts:
        for strategy in parse_parallel(layout):
            code_of(strategy)
    causal_lm(config_from_dict({**config, "num_hidden_layers": 1}, source="bench"))


def summary(layout: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks: the slowest rank's time of every round."""
    slowest = {p: [max(times) for times in zip(*(r[p] for r in ranks), strict=True)] for p in PHASES}
    return {
        "layout": layout,
        "loss": ranks[0]["loss"],
        "transport": ranks[0]["transport"],
        "sent_bytes_per_rank": max(r["sent_bytes"] for r in ranks),
        "resident_bytes_per_rank": max(r["resident_bytes"] for r in ranks),
        **{f"{p}_median": statistics.median(times) for p, times in slowest.items()},
        **{f"{p}_all": times for p, times in slowest.items()},
    }


def ratio(first: dict[str, Any], other: dict[str, Any], phase: str) -> float:
    """Speed of the first relative to the second: the median of the rounds' ratios."""
    both = zip(other[f"{phase}_all"], first[f"{phase}_all"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in both)


if __name__ == "__main__":
    raise SystemExit(main())

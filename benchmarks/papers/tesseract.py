"""Tensor parallelism in one, two and two and a half dimensions, as Tesseract's paper scales it (arXiv 2105.14500).

    python benchmarks/papers/tesseract.py        # writes benchmarks/results/papers/tesseract.json: 15 minutes

Ranks are on hosts of their own (`rotorch.bench.hosts`), and their products take FLOPs / rate on a device's clock
(`rotorch.bench.device_clock`); messages are real. The rate is so low that real computing and other load of the machine
are a small part of a step. Forward lasts from the first rank's start until the last one's device has done what comes
before its backward; backward until all gradients are complete. Losses are held against one process.

    strong     the same global batch on 8 hosts, 1-D, 2.5-D, and 2-D in two replicas, which sends what 2.5-D does; over
               tokens per feature (T / D) and over rates of links; `ratio` is a rank's products over the time in which
               links carry what 1-D sends at that size
    weak       as many tokens per rank on 4 hosts and on 8, with the links of 8

Elements that a rank sends per layer, by the formulas of `docs/grids.md`: 1-D 8 (p - 1) / p T D. On a grid activations
take 21 (q - 1) / (d q^2) T D, weights 36 (q - 1) / q^2 D^2, and sums over depth 24 (d - 1) / (d q^2) D^2. So 2.5-D on
2 x 2 x 2 sends less than 1-D on 8 from T = 2.7 D on. The paper's table has 64 GPUs of 16 hosts, on links that stay as
they are while its models grow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import zeropp  # noqa: E402
from links import alone, facts_of  # noqa: E402

from rotorch.bench.hosts import Hosts, why_no_hosts  # noqa: E402
from rotorch.bench.rank import StepTime, load_code  # noqa: E402
from rotorch.bench.ranks import RowRanks  # noqa: E402
from rotorch.bench.record import describe_origin, load_average  # noqa: E402
from rotorch.bench.task import Task  # noqa: E402

OUT = HERE.parents[1] / "benchmarks" / "results" / "papers" / "tesseract.json"
ONE_D, TWO_D, TWO_AND_A_HALF_D = "megatron=8", "ddp=2,summa=2x2", "tesseract=2x2x2"
STRONG = (ONE_D, TWO_D, TWO_AND_A_HALF_D)
WEAK = {4: ("megatron=4", "tesseract=2x2x1"), 8: (ONE_D, TWO_AND_A_HALF_D)}
"""Rows by hosts."""
WIDTH, LAYERS = zeropp.WIDTH, 3
SIZES = {1.25: (1.0,), 2.5: (1.0,), 5.0: (2.0, 1.0, 0.5), 10.0: (1.0,)}
"""Ratios at each size: tokens of the global batch per feature."""
WEAK_TOKENS_PER_FEATURE = 0.625
"""Of a rank."""
BUSY_S = 3.0
"""Seconds of the products of a rank that shares them evenly."""
WARM_UP_STEPS, STEPS = 1, 3
FAST, PACKET_BYTES = 1e9, 9000
"""Bytes per second of links while nothing is timed; packets so small that no message of a row is one of them."""

Row = dict[str, Any]


def task_of(*, num_ranks: int, tokens: int) -> Task:
    """A step with one sequence for each rank."""
    return zeropp.task_of(layers=LAYERS, tokens=tokens // num_ranks, micro_batches=1, num_ranks=num_ranks, heads=8)


def one_d_bytes(*, num_ranks: int, tokens: int) -> float:
    """Bytes that a rank of 1-D sends in a step."""
    return LAYERS * 4 * 8 * (num_ranks - 1) / num_ranks * tokens * WIDTH


def grid_bytes(*, side: int, depth: int, tokens: int) -> float:
    """The same of a rank of a grid of side x side x depth; the last terms are those of weights."""
    activations = 21 * (side - 1) / (depth * side**2) * tokens * WIDTH
    weights = 36 * (side - 1) / side**2 + 24 * (depth - 1) / (depth * side**2)
    return LAYERS * 4 * (activations + weights * WIDTH**2)


def crossing_by_formula() -> float:
    """Tokens per feature from which 2.5-D on 2 x 2 x 2 sends less than 1-D on 8, by the formulas."""
    per_token = one_d_bytes(num_ranks=8, tokens=1) - (
        grid_bytes(side=2, depth=2, tokens=1) - grid_bytes(side=2, depth=2, tokens=0)
    )
    return grid_bytes(side=2, depth=2, tokens=0) / per_token / WIDTH


def phases_of(steps: Sequence[Sequence[StepTime]]) -> dict[str, list[float]]:
    """Seconds of forward, of backward and of both, of each timed step; `steps` are by rank."""
    found: dict[str, list[float]] = {"forward_s_all": [], "backward_s_all": [], "step_s_all": []}
    for step in list(zip(*steps, strict=True))[WARM_UP_STEPS:]:
        start = min(t.start_s for t in step)
        if any(t.forward_s is None for t in step):
            raise AssertionError("a rank has no backward, or no device's clock")
        forward, gradients = max(t.forward_s or 0.0 for t in step), max(t.gradients_s for t in step)
        found["forward_s_all"].append(forward - start)
        found["backward_s_all"].append(gradients - forward)
        found["step_s_all"].append(gradients - start)
    return found


def measured(parallels: Sequence[str], *, num_ranks: int, tokens: int, links: Mapping[float, float]) -> Iterator[Row]:
    """Rows of one size at all rates of links, by ratio, in bytes per second."""
    task = task_of(num_ranks=num_ranks, tokens=tokens)
    load_code(task)
    losses, flops, _ = alone(task)
    rate = flops / BUSY_S
    with Hosts(num_ranks, bytes_per_s=FAST, packet_bytes=PACKET_BYTES) as hosts:
        for parallel in parallels:
            ranks = RowRanks(task, row=parallel, num_ranks=num_ranks, hosts=hosts, flops_per_s=rate)
            try:
                ranks.ask("build")
                facts: Row = {}
                for ratio, link in links.items():
                    hosts.limit(link)
                    before = hosts.sent_bytes()
                    steps = ranks.ask("steps", count=WARM_UP_STEPS + STEPS)
                    sent = [after - was for after, was in zip(hosts.sent_bytes(), before, strict=True)]
                    hosts.limit(FAST)
                    facts = facts or facts_of(ranks, steps, losses, task=task)
                    phases = phases_of(steps)
                    yield {
                        "parallel": parallel,
                        "hosts": num_ranks,
                        "tokens_per_feature": tokens / WIDTH,
                        "ratio": ratio,
                        "link_bytes_per_s": link,
                        "products_s": facts["flops"] / rate,
                        **{name.removesuffix("_all"): median(seconds) for name, seconds in phases.items()},
                        **phases,
                        "sent_bytes": facts["asked_bytes"],
                        "wire_bytes": max(sent) / (WARM_UP_STEPS + STEPS),
                        **{key: facts[key] for key in ("invalid",) if key in facts},
                    }
            finally:
                ranks.close()


def strong() -> Iterator[Row]:
    """Rows of 8 hosts over sizes and rates of links."""
    for of_width, ratios in SIZES.items():
        tokens = round(of_width * WIDTH)
        links = {ratio: one_d_bytes(num_ranks=8, tokens=tokens) * ratio / BUSY_S for ratio in ratios}
        yield from measured(STRONG, num_ranks=8, tokens=tokens, links=links)


def weak() -> Iterator[Row]:
    """Rows of 4 and of 8 hosts with as many tokens a rank, on the same links."""
    link = one_d_bytes(num_ranks=8, tokens=round(8 * WEAK_TOKENS_PER_FEATURE * WIDTH)) / BUSY_S
    for num_ranks, parallels in WEAK.items():
        tokens = round(num_ranks * WEAK_TOKENS_PER_FEATURE * WIDTH)
        yield from measured(parallels, num_ranks=num_ranks, tokens=tokens, links={1.0: link})


PARTS = {"strong": strong, "weak": weak}


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Speed of 2.5-D relative to the other rows, by size and rate of links."""
    found = []
    by_place: dict[tuple[float, float], dict[str, Row]] = {}
    for row in rows:
        if "invalid" not in row:
            by_place.setdefault((row["tokens_per_feature"], row["ratio"]), {})[row["parallel"]] = row
    for (size, ratio), here in by_place.items():
        for other in (ONE_D, TWO_D):
            if other in here and TWO_AND_A_HALF_D in here:
                ours, theirs = here[TWO_AND_A_HALF_D], here[other]
                phases = {name: theirs[name] / ours[name] for name in ("forward_s", "backward_s", "step_s")}
                found.append({"against": other, "tokens_per_feature": size, "ratio": ratio, "faster_by": phases})
    return found


def crossings(rows: Sequence[Row]) -> dict[str, float | None]:
    """Tokens per feature from which 2.5-D takes no more than 1-D at ratio 1, by figure; None if not within."""
    at_one = [row for row in rows if row["ratio"] == 1.0 and "invalid" not in row]
    found: dict[str, float | None] = {}
    for key in ("sent_bytes", "wire_bytes", "forward_s", "step_s"):
        ours, theirs = (
            {row["tokens_per_feature"]: row[key] for row in at_one if row["parallel"] == name}
            for name in (TWO_AND_A_HALF_D, ONE_D)
        )
        found[key] = zeropp.crossing(ours, theirs)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, and writes the record after each row; 1 if a row's losses are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if reason := why_no_hosts():
        print(f"tesseract: skipped: {reason}")
        return 0
    options.record.parent.mkdir(parents=True, exist_ok=True)
    record: Row = {**describe_origin(), "width": WIDTH, "layers": LAYERS, "busy_s": BUSY_S}
    for name, part in PARTS.items():
        found: list[Row] = []
        for row in part():
            found.append(row)
            print(json.dumps({"part": name, **row}), flush=True)
            record[name] = found
            if name == "strong":
                record |= {"ratios": ratios(found), "crossings": crossings(found)}
                record["crossing_by_formula"] = crossing_by_formula()
            record["load_average_after"] = load_average()
            options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    wrong = [row for name in PARTS for row in record.get(name, ()) if "invalid" in row]
    for row in wrong:
        print(f"{row['parallel']}: {row['invalid']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

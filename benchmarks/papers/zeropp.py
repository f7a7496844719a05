"""Pipelines as ZeroPP's paper compares them (arXiv 2402.03791): bubbles, and gathers beside tensor parallelism.

    python benchmarks/papers/zeropp.py                   # writes benchmarks/results/papers/zeropp.json: 20 minutes
    python benchmarks/papers/zeropp.py --only bubbles    # one part of it, the others kept
    python benchmarks/papers/zeropp.py --go-on           # without the rows that the record has

Four ranks whose products take FLOPs / rate on a device's clock (`rotorch.bench.device_clock`); messages are real. The
rate is so low that real computing and other load of the machine are a small part of a step. Losses are held against one
process.

    bubbles    each schedule of the project on 4 stages of equal cost: 1 - busy / step, busy being a rank's products on
               its device's clock, and a step lasting from the first rank's start to the last one's complete gradients;
               beside what the table says for the FLOPs of each computation, messages taking no time, and the formula
               of its paper. Messages go over the loopback interface
    sizes      2 x 2 ranks on hosts of their own (`rotorch.bench.hosts`), over lengths of sequences at which 2 s U b
               passes 9 h: step time, peak of tensors, bytes. Device and links keep their ratio at all lengths: links
               take `SUMS_OF_PRODUCTS` of the time of a rank's products for the sums of tensor parallelism. Without
               namespaces this part is left out, with the reason
    again      one row of each part once more, and one schedule on a device of half the rate: real computing between
               products, which the table does not have, weighs half as much there

The paper's count per layer, of `B` micro-batches of `b` rows of `s` tokens, times (n - 1) / n: tensor parallelism sends
8 B b s h elements, and gathers and sums of 12 h^2 weights once per unit of U send 36 B h^2 / U, which is less if
2 s U b > 9 h. There a rank of each has as many rows; at the same global batch a rank under tensor parallelism passes n
times as many, and gathering is less from 1 / n of that on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from links import alone, facts_of  # noqa: E402
from pipelines import EXPERT, PEER, condition, unit_of  # noqa: E402

from rotorch.bench.hosts import Hosts, why_no_hosts  # noqa: E402
from rotorch.bench.rank import StepTime, load_code  # noqa: E402
from rotorch.bench.ranks import RowRanks  # noqa: E402
from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.bench.task import Task  # noqa: E402
from rotorch.pipelining.actions import Action, ActionKind, Schedule  # noqa: E402
from rotorch.pipelining.simulate import StageCosts, simulate  # noqa: E402
from rotorch.pipelining.stage_strategy import StageStrategy  # noqa: E402
from rotorch.run_config import OptimizerSection  # noqa: E402
from rotorch.strategies import parse_parallel  # noqa: E402

OUT = HERE.parents[1] / "benchmarks" / "results" / "papers" / "zeropp.json"
RANKS = 4
WARM_UP_STEPS = 1
"""Not timed: receivers do not know the shapes of messages yet."""
WIDTH, VOCABULARY = 96, 16
"""Features, and tokens in the vocabulary: so few that the head takes less than 1 % of the last stage's products."""

BUBBLES_BUSY_S, BUBBLES_MICRO_BATCHES, BUBBLES_TOKENS, BUBBLES_STEPS = 9.6, 8, 8, 3
"""Seconds of a rank's products in a step, micro-batches of a step, tokens of a sequence, and timed steps of a row."""
SCHEDULES = (
    "pp=4[schedule=gpipe]",
    "pp=4",
    "pp=4[schedule=interleaved_1f1b]",
    "pp=4[schedule=looped_bfs]",
    "pp=4[schedule=zb_h1]",
    "pp=4[schedule=zbv]",
    "zeropp=4x1[unit=8]",
    "zeropp=4x1[chunks=2,unit=4]",
)

BUSY_S = {18: 3.0, 36: 3.0, 72: 3.0, 144: 6.0}
"""Seconds of a rank's products in a step, by tokens of a sequence: of the longest, real computing takes most."""
MICRO_BATCHES, STEPS = 6, 2
SUMS_OF_PRODUCTS = 0.5
THREE_D, ZEROPP = "pp=2,megatron=2[transport=messages]", "zeropp=2x2"
"""Sums by messages, as between hosts."""
ROWS = (
    ZEROPP,
    "zeropp=2x2[chunks=2]",
    "pp=2,fsdp=2",
    "pp=2[schedule=interleaved_1f1b],fsdp=2",
    "pp=2[schedule=zbv],fsdp=2",
    PEER,
    EXPERT,
    THREE_D,
)
SHARDS, LAYERS = 2, 4
FAST, PACKET_BYTES = 1e9, 9000
"""Bytes per second of links while nothing is timed; packets so small that no message of a row is one of them."""

AGAIN = (("pp=4", BUBBLES_BUSY_S), ("zeropp=4x1[chunks=2,unit=4]", 2 * BUBBLES_BUSY_S))
"""Schedules, with seconds of a rank's products in a step."""
AGAIN_AT = (ZEROPP, 36)
"""A layout, and tokens of a sequence."""

Row = dict[str, Any]


def task_of(*, layers: int, tokens: int, micro_batches: int, num_ranks: int = RANKS, heads: int = 4) -> Task:
    """A step on a Llama whose layers have 12 h^2 weights, as the papers count them."""
    model = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 8 * WIDTH // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return Task(
        name="paper",
        model=model,
        vocabulary=VOCABULARY,
        num_ranks=num_ranks,
        micro_batch=1,
        accumulation=micro_batches,
        sequence_length=tokens,
        optimizer=OptimizerSection(lr=1e-3, clip_norm=0),
    )


@dataclass(frozen=True)
class Subject:
    """A task with what one process says of it.

    Attributes:
        task: of all rows.
        losses: of the first steps.
        flops: products of one rank in a step, averaged over ranks.
    """

    task: Task
    losses: list[float]
    flops: int

    @classmethod
    def of(cls, *, layers: int, tokens: int, micro_batches: int) -> Subject:
        """Runs the task on one process."""
        task = task_of(layers=layers, tokens=tokens, micro_batches=micro_batches)
        load_code(task)
        losses, flops, _ = alone(task)
        return cls(task, losses, flops)


def seconds_of(steps: Sequence[Sequence[StepTime]]) -> list[float]:
    """Seconds of each timed step, from the first rank's start to the last one's complete gradients.

    The optimizer has no products, so it is not on the device's clock.
    """
    timed = list(zip(*steps, strict=True))[WARM_UP_STEPS:]
    return [max(t.gradients_s for t in step) - min(t.start_s for t in step) for step in timed]


# ---------------------------------------------------------------- bubbles


def bubbles(done: Sequence[Row]) -> Iterator[Row]:
    """Rows of all schedules but those that are done."""
    left = [name for name in SCHEDULES if name not in {row["parallel"] for row in done}]
    subject = bubble_subject() if left else None
    for name in left:
        assert subject is not None
        yield bubble(subject, name)


def bubble_subject() -> Subject:
    """Two layers for each of four ranks, or one for each of eight stages."""
    return Subject.of(layers=2 * RANKS, tokens=BUBBLES_TOKENS, micro_batches=BUBBLES_MICRO_BATCHES)


def bubble(subject: Subject, parallel: str, *, busy_s: float = BUBBLES_BUSY_S) -> Row:
    """Idle part of a step under one schedule: measured, by its table, and by its paper's formula.

    Args:
        subject: the task.
        parallel: a pipeline without another strategy inside.
        busy_s: seconds of a rank's products in a step, averaged over ranks, which decide the device's rate.
    """
    rate = subject.flops / busy_s
    ranks = RowRanks(subject.task, row=parallel, num_ranks=RANKS, flops_per_s=rate)
    try:
        ranks.ask("build")
        steps = ranks.ask("steps", count=WARM_UP_STEPS + BUBBLES_STEPS)
        facts = facts_of(ranks, steps, subject.losses, task=subject.task)
        computed = ranks.ask("action_flops")
    finally:
        ranks.close()
    (strategy,) = parse_parallel(parallel)
    assert isinstance(strategy, StageStrategy)
    table = strategy.table(subject.task.accumulation)
    found = simulate(table, costs=costs_of(computed, num_stages=table.num_stages, flops_per_s=rate))
    products_s = mean(sum(flops for _, flops in of_rank) for of_rank in computed) / rate
    steps_s = seconds_of(steps)
    return {
        "parallel": parallel,
        "schedule": table.name,
        "chunks": table.num_chunks,
        "unit": table.unit,
        "busy_s": products_s,
        "step_s_all": steps_s,
        "table_s": found.makespan_s,
        "bubble_all": [1 - products_s / step_s for step_s in steps_s],
        "bubble": median(1 - products_s / step_s for step_s in steps_s),
        "bubble_of_table": found.bubble_ratio,
        "bubble_of_equal_costs": simulate(table).bubble_ratio,
        "bubble_of_formula": formula(table),
        "computations": max(len(of_rank) for of_rank in computed),
        **{name: facts[name] for name in ("invalid",) if name in facts},
    }


def costs_of(
    computed: Sequence[Sequence[tuple[Action, int]]], *, num_stages: int, flops_per_s: float
) -> list[StageCosts]:
    """Seconds of each stage's computations on the device's clock, averaged over micro-batches.

    Args:
        computed: by rank: its computations with their FLOPs.
        num_stages: of the pipeline.
        flops_per_s: of the device.
    """
    flops: dict[tuple[ActionKind, int], list[int]] = {}
    for of_rank in computed:
        for action, count in of_rank:
            flops.setdefault((action.kind, action.stage), []).append(count)

    def seconds(stage: int, *kinds: ActionKind) -> float:
        return sum(mean(flops[kind, stage]) for kind in kinds if (kind, stage) in flops) / flops_per_s

    return [
        StageCosts(
            forward_s=seconds(stage, ActionKind.FORWARD),
            backward_input_s=seconds(stage, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT),
            backward_weight_s=seconds(stage, ActionKind.BACKWARD_WEIGHT),
        )
        for stage in range(num_stages)
    ]


def formula(table: Schedule) -> float:
    """Idle part of a step by the schedule's paper: forward, input and weight gradient take one slot each.

    ZBV's paper counts a rank's time from its own first to its own last computation, in which nothing is idle. ZeroPP's
    is that of filling the pipeline, P - 1 slots of a chunk (`strategies/zeropp/schedule.py`).
    """
    ranks, chunks, number = table.num_ranks, table.num_chunks, table.num_micro_batches
    busy, filling = 3 * chunks * number, ranks - 1
    idle = {"zb_h1": filling, "zeropp": filling, "zbv": 0}.get(table.name, 3 * filling)
    return idle / (busy + idle)


# ---------------------------------------------------------------- sizes


def sizes(done: Sequence[Row]) -> Iterator[Row]:
    """Rows of all layouts at all lengths of sequences, but those that are done."""
    there = {(row["parallel"], row["tokens"]) for row in done}
    for tokens in BUSY_S:
        left = [name for name in ROWS if (name, tokens) not in there]
        if left:
            yield from at_length(tokens, left)


def at_length(tokens: int, names: Sequence[str]) -> Iterator[Row]:
    """Rows of one length."""
    subject = Subject.of(layers=LAYERS, tokens=tokens, micro_batches=MICRO_BATCHES)
    with Hosts(RANKS, bytes_per_s=FAST, packet_bytes=PACKET_BYTES) as hosts:
        for name in names:
            yield beside_tensor_parallelism(subject, name, hosts=hosts)


def beside_tensor_parallelism(subject: Subject, parallel: str, *, hosts: Hosts) -> Row:
    """One row: step time, peak of tensors and bytes sent, of the rank with the most."""
    task = subject.task
    busy_s = BUSY_S[task.sequence_length]
    rate, link = subject.flops / busy_s, bytes_by_formula(task)[THREE_D] / (busy_s * SUMS_OF_PRODUCTS)
    ranks = RowRanks(task, row=parallel, num_ranks=RANKS, hosts=hosts, flops_per_s=rate)
    try:
        ranks.ask("build")
        hosts.limit(link)
        before = hosts.sent_bytes()
        steps = ranks.ask("steps", count=WARM_UP_STEPS + STEPS)
        wire = max(after - was for after, was in zip(hosts.sent_bytes(), before, strict=True))
        hosts.limit(FAST)
        facts = facts_of(ranks, steps, subject.losses, task=task)
        traffic = ranks.ask("traffic")
        peaks = [found.peak_bytes for found in ranks.ask("tensors")]
    finally:
        ranks.close()
    most = max(traffic, key=lambda found: sum(found.sent_bytes.values()))
    steps_s, products_s = seconds_of(steps), facts.pop("flops") / rate
    return {
        "parallel": parallel,
        "tokens": task.sequence_length,
        **condition_of(task),
        "step_s": median(steps_s),
        "step_s_all": steps_s,
        "products_s": products_s,
        "link_bytes_per_s": link,
        "peak_bytes": max(peaks),
        "peak_bytes_by_rank": peaks,
        "sent_bytes": facts.pop("asked_bytes"),
        "sent_by_kind": most.sent_bytes,
        "messages_by_kind": most.num_messages,
        "wire_bytes": wire / (WARM_UP_STEPS + STEPS),
        "formula_bytes": bytes_by_formula(task).get(parallel),
        **facts,
    }


def condition_of(task: Task) -> dict[str, float]:
    """The ratio of 2 s U b to 9 h for zeropp's own unit; b are the rows of a micro-batch of one of its ranks."""
    found = condition(task, unit=unit_of(task.accumulation))
    return {"of_condition": found["2 s U b"] / found["9 h"]}


def bytes_by_formula(task: Task) -> dict[str, float]:
    """Bytes that a rank sends in a step of the same global batch, by the paper's count; boundaries are left out."""
    layers, width, micro_batches = task.model["num_hidden_layers"] / 2, task.model["hidden_size"], task.accumulation
    sent = layers * (SHARDS - 1) / SHARDS * 4  # bytes of an element
    rows = task.micro_batch * task.num_ranks  # of a micro-batch, in all that ranks of a stage pass
    units = -(-micro_batches // unit_of(micro_batches))
    return {
        THREE_D: sent * 8 * micro_batches * rows * task.sequence_length * width,
        ZEROPP: sent * 36 * units * width**2,
    }


def crossings(rows: Sequence[Row]) -> dict[str, float | None]:
    """The sizes, 2 s U b / 9 h, from which `ZEROPP` takes no more than `THREE_D`, by figure; None if not within."""
    found: dict[str, float | None] = {}
    timed = [{**row, "step_of_products": row["step_s"] / row["products_s"]} for row in rows if "invalid" not in row]
    for key in ("sent_bytes", "wire_bytes", "step_of_products", "peak_bytes"):
        by_row = {
            name: {row["of_condition"]: row[key] for row in timed if row["parallel"] == name}
            for name in (ZEROPP, THREE_D)
        }
        found[key] = crossing(by_row[ZEROPP], by_row[THREE_D])
    return found


def crossing(ours: Mapping[float, float], theirs: Mapping[float, float]) -> float | None:
    """The size from which ours is no more than theirs, by straight lines between neighbours; None if not within."""
    more = [(size, ours[size] - theirs[size]) for size in sorted(ours.keys() & theirs.keys())]
    for (left, above), (right, below) in pairwise(more):
        if above > 0 >= below:
            return left + (right - left) * above / (above - below)
    return None


# ---------------------------------------------------------------- the record


def again(done: Sequence[Row]) -> Iterator[Row]:
    """Rows that stand in the other parts already."""
    there = {(row["parallel"], round(row.get("busy_s", 0.0), 3)) for row in done}
    left = [(name, busy_s) for name, busy_s in AGAIN if (name, busy_s) not in there]
    if left:
        subject = bubble_subject()
        for name, busy_s in left:
            yield {"part": "bubbles", **bubble(subject, name, busy_s=busy_s)}
    if AGAIN_AT[0] not in {name for name, _ in there} and not why_no_hosts():
        name, tokens = AGAIN_AT
        for row in at_length(tokens, [name]):
            yield {"part": "sizes", **row}


PARTS: dict[str, Callable[[Sequence[Row]], Iterator[Row]]] = {"bubbles": bubbles, "sizes": sizes, "again": again}
NEEDS_HOSTS = {"sizes"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, and writes the record after each row; 1 if a row's losses are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--go-on", action="store_true", help="keep the rows that the record has")
    parser.add_argument("--record", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(options.record.read_text("utf-8")) if options.record.exists() else {}
    record = {**kept, **earlier_runs(kept), **describe_origin(), **constants()}
    reason = why_no_hosts() if NEEDS_HOSTS & set(options.only) else ""
    for name in (name for name in PARTS if name in options.only):
        if name in NEEDS_HOSTS and reason:
            print(f"{name}: left out: {reason}")
            continue
        found = list(record.get(name, ())) if options.go_on else []
        for row in PARTS[name](tuple(found)):
            found = sorted([*found, row], key=place)
            print(json.dumps({"part": name, **row}), flush=True)
            record[name] = found
            if name == "sizes":
                record["crossings"] = crossings(found)
            options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    wrong = [row for name in PARTS for row in record.get(name, ()) if "invalid" in row]
    for row in wrong:
        print(f"{row['parallel']}: {row['invalid']}")
    return 1 if wrong else 0


def place(row: Row) -> tuple[int, int]:
    """The place of a row in its part, whenever it was measured."""
    names = [*SCHEDULES, *ROWS]
    return row.get("tokens", 0), names.index(row["parallel"]) if row["parallel"] in names else 0


def earlier_runs(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Origins of the rows that a record has already."""
    origin = [{name: kept[name] for name in ("commit", "date", "command", "machine")}] if "commit" in kept else []
    return {"earlier_runs": [*kept.get("earlier_runs", ()), *origin]}


def constants() -> dict[str, Any]:
    """Sizes that all rows of a part share."""
    return {
        "ranks": RANKS,
        "width": WIDTH,
        "bubbles_setting": {"micro_batches": BUBBLES_MICRO_BATCHES, "tokens": BUBBLES_TOKENS, "busy_s": BUBBLES_BUSY_S},
        "sizes_setting": {
            "layers": LAYERS,
            "micro_batches": MICRO_BATCHES,
            "unit": unit_of(MICRO_BATCHES),
            "busy_s_by_tokens": BUSY_S,
            "sums_of_products": SUMS_OF_PRODUCTS,
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())

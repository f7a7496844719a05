"""Layouts between hosts whose links are as slow as one likes: how much of a step is neither computing nor sending.

    python benchmarks/links.py --emulate                  # make bench-links: 2, 4 and 8 hosts, ratios 2, 1 and 0.5
    python benchmarks/links.py --hosts 2 --ratio 1        # computes for real: two hosts on two cores

Hosts are network namespaces of this machine, on one switch or two (`rotorch.bench.hosts`). Rows train the same model on
the same global batch with AdamW, in turns; losses are held against one process. The parameter is the ratio of compute
to wire time: links get the rate at which what weights and gradients take on the wire, 3 (n - 1) / n of the model's
bytes from each host, lasts as long as the products of one rank, divided by the ratio.

    compute_s    the products of a row's slowest rank: by the device's clock with `--emulate`
                 (`rotorch.bench.device_clock`), else the step of replicas that send nothing, in turn with the rows
    wire_bytes   what the busiest link carried in a step in one direction, by the interface's counter
    wire_s       those bytes at the link's rate
    efficiency   max(compute_s, wire_s) / step_s: 1 is a step in which the busier one of device and link never pauses
    asked_bytes  what the row's busiest rank asks the network for, by the meter
    exchange     beside the rows: two neighbours send each other 6 MB at the same time, in terms of wire time one way

Without namespaces it says why and ends with exit code 0. Exit code 1: a row's losses are
wrong, or an exchange takes more than 1.15 of its wire time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from rotorch.bench.command import DOES_NOT_HOLD, OK, read_layouts
from rotorch.bench.contender import LIMIT, REFERENCE, build
from rotorch.bench.gate import judge
from rotorch.bench.hosts import Hosts, why_no_hosts
from rotorch.bench.peers import PEERS
from rotorch.bench.rank import StepTime, load_code
from rotorch.bench.ranks import RowRanks
from rotorch.bench.record import describe_origin
from rotorch.bench.task import Task, task_from_run
from rotorch.models.describe import describe
from rotorch.run_config import load_run_config
from rotorch.shard.materialize import on_meta

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "links" / "links.json"
ROWS = (
    "torch-ddp",
    "fsdp2",
    "rtp={n}[transport=send_receive]",
    "rtp={n}[recompute=none,transport=send_receive]",
    "rtp={n}[recompute=none,transport=send_receive,ahead=2]",
)
EXCHANGE_BYTES, EXCHANGES, LONGEST_EXCHANGE = 6_000_000, 3, 1.15
"""Of one tensor that neighbours send each other at the same time: size, number, and share of wire time at most."""
GATE_STEPS, WARM_UP_STEPS, STEPS_TO_WAKE = 3, 2, 1


def main(arguments: list[str] | None = None) -> int:
    """Measures every number of hosts at every ratio, prints a table and writes one file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], help="(2 4 8)")
    parser.add_argument("--switches", type=int, nargs="+", default=[1, 2], help="of these two, 2 from 4 hosts on (1 2)")
    parser.add_argument("--ratio", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="compute / wire time (2 1 0.5)")
    parser.add_argument("--row", action="append", help=f"layout or peer; {{n}}: hosts ({', '.join(ROWS)})")
    parser.add_argument("--emulate", action="store_true", help="products take FLOPs / rate on a device's clock")
    parser.add_argument("--compute", type=float, default=2.0, help="with --emulate: seconds of a rank's products (2)")
    parser.add_argument("--own-loop", action="store_true", help="layouts in a loop of one's own: model(..), backward()")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each row (3)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn (2)")
    parser.add_argument("--run", type=Path, default=ROOT / "configs" / "bench" / "links.toml", help="the model")
    parser.add_argument("--json", type=Path, default=OUT, help="where every figure goes")
    parser.add_argument("overrides", nargs="*", help="of the run: data.sequence_length=64")
    given = parser.parse_intermixed_args(arguments)
    if min(given.hosts) < 2 or min(given.ratio) <= 0 or not set(given.switches) <= {1, 2}:
        parser.error("--hosts are 2 or more, ratios are positive, and there are 1 or 2 switches")
    console = Console(width=160)
    reason = why_no_hosts()
    if reason:
        console.print(f"bench-links: skipped: {reason}", markup=False)
        return OK
    found: dict[str, Any] = {**describe_origin(), "emulated": given.emulate, "model": str(given.run.name), "rows": []}
    found["exchange"] = []
    for count in given.hosts:
        run = load_run_config(given.run, overrides=given.overrides)
        task = replace(task_from_run(run, name=given.run.stem, num_ranks=count), own_loop=given.own_loop)
        names = [name.replace("{n}", str(count)) for name in given.row or ROWS]
        read_layouts([n for n in names if n not in PEERS], peers=[n for n in names if n in PEERS], nproc=count)
        load_code(task)
        for switches in sorted(set(given.switches)):
            if switches == 1 or count >= 4:
                rows, exchanges = measure(task, names, switches=switches, options=given, console=console)
                found["rows"] += rows
                found["exchange"] += exchanges
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    wrong = [row for row in found["rows"] if "invalid" in row]
    for row in wrong:
        console.print(f"{row['row']} on {row['hosts']} hosts: {row['invalid']}", markup=False)
    slow = [one for one in found["exchange"] if one["of_wire_time"] > LONGEST_EXCHANGE]
    for one in slow:
        console.print(f"an exchange on {one['hosts']} hosts takes {one['of_wire_time']:.2f} of its wire time")
    return DOES_NOT_HOLD if wrong or slow else OK


def measure(
    task: Task, names: Sequence[str], *, switches: int, options: argparse.Namespace, console: Console
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of one set of hosts at every ratio, and bare exchanges over the same links."""
    losses, flops, step_s = alone(task)
    compute_s = options.compute if options.emulate else step_s
    rate = flops / compute_s if options.emulate else None
    found: list[dict[str, Any]] = []
    exchanges: list[dict[str, Any]] = []
    with Hosts(task.num_ranks, bytes_per_s=1e9, switches=switches) as hosts:
        ranks: dict[str, RowRanks] = {}
        try:
            facts: dict[str, dict[str, Any]] = {}
            for name in [*names] if options.emulate else [LIMIT, *names]:
                ranks[name] = RowRanks(task, row=name, num_ranks=task.num_ranks, hosts=hosts, flops_per_s=rate)
                ranks[name].ask("build")
                facts[name] = first_steps(ranks[name], losses, task=task)
            for ratio in options.ratio:
                link = wire_bytes_of(task) * ratio / compute_s
                hosts.limit(link)
                if switches == 1:  # a shared uplink carries more than one exchange
                    exchanges.append(exchange(ranks[names[0]], link=link, task=task, console=console))
                turns = take_turns(ranks, hosts, options=options)
                for name in names:
                    products_s = facts[name]["flops"] / rate if rate else median(turns[LIMIT]["step_s_all"])
                    row = {"hosts": task.num_ranks, "switches": switches, "ratio": ratio, "row": name}
                    found.append(row | figures(turns[name], compute_s=products_s, link=link) | facts[name])
                console.print(table(found[-len(names) :]))
        finally:
            for row_ranks in ranks.values():
                row_ranks.close()
    return found, exchanges


def exchange(row: RowRanks, *, link: float, task: Task, console: Console) -> dict[str, Any]:
    """Time in which two neighbours send each other a tensor at the same time."""
    taken = row.ask("exchanges", num_bytes=EXCHANGE_BYTES, count=EXCHANGES)
    seconds = min(max(times) for times in zip(*taken, strict=True))
    of_wire_time = seconds / (EXCHANGE_BYTES / link)
    console.print(f"bare exchange, {EXCHANGE_BYTES / 1e6:.0f} MB both ways: {of_wire_time:.2f} of wire time")
    return {
        "hosts": task.num_ranks,
        "num_bytes": EXCHANGE_BYTES,
        "link_bytes_per_s": link,
        "seconds": seconds,
        "of_wire_time": of_wire_time,
    }


def alone(task: Task) -> tuple[list[float], int, float]:
    """Losses of one process, FLOPs of one rank of the limit in a step, and the seconds of such a step when all run."""
    row = RowRanks(task, row=REFERENCE, num_ranks=1)
    try:
        row.ask("build")
        losses = [step.loss for step in row.ask("steps", count=GATE_STEPS)[0]]
    finally:
        row.close()
    row = RowRanks(task, row=LIMIT, num_ranks=task.num_ranks)
    try:
        row.ask("build")
        flops = max(row.ask("product_flops"))
        return losses, flops, median(seconds_of(row.ask("steps", count=WARM_UP_STEPS + GATE_STEPS))[WARM_UP_STEPS:])
    finally:
        row.close()


def first_steps(row: RowRanks, reference: Sequence[float], *, task: Task) -> dict[str, Any]:
    """Facts of a row that no link changes, and whether its losses are right, from its first steps."""
    return facts_of(row, row.ask("steps", count=GATE_STEPS), reference, task=task)


def facts_of(
    row: RowRanks, steps: Sequence[Sequence[StepTime]], reference: Sequence[float], *, task: Task
) -> dict[str, Any]:
    """The same from first steps that were run before, `GATE_STEPS` or more, by rank."""
    losses = [[step.loss for step in at_once] for at_once in zip(*steps, strict=True)]
    verdict = judge(
        losses,
        reference=reference,
        precision=task.precision,
        alone=row.row == LIMIT,
        shares=row.row in PEERS or task.own_loop,
    )
    facts: dict[str, Any] = {"flops": max(row.ask("product_flops"))}
    facts["asked_bytes"] = max(sum(traffic.sent_bytes.values()) for traffic in row.ask("traffic"))
    return facts if verdict.reason is None else {**facts, "invalid": verdict.reason}


def take_turns(
    ranks: Mapping[str, RowRanks], hosts: Hosts, *, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Times of all rows, in turns; who begins changes from round to round."""
    found: dict[str, dict[str, Any]] = {name: {"step_s_all": [], "link": [], "uplink": []} for name in ranks}
    names = list(ranks)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            count = STEPS_TO_WAKE + options.steps
            before, up_before = hosts.sent_bytes(), hosts.uplink_bytes()
            steps = ranks[name].ask("steps", count=count)
            sent = [after - was for after, was in zip(hosts.sent_bytes(), before, strict=True)]
            found[name]["link"].append(max(sent) / count)
            found[name]["uplink"].append((hosts.uplink_bytes() - up_before) / count)
            found[name]["step_s_all"] += seconds_of(steps)[STEPS_TO_WAKE:]
    return found


def seconds_of(steps: Sequence[Sequence[StepTime]]) -> list[float]:
    """From the first rank's start to the last one's end, of each step."""
    return [max(t.end_s for t in step) - min(t.start_s for t in step) for step in zip(*steps, strict=True)]


def wire_bytes_of(task: Task) -> float:
    """Bytes that each host sends if weights go out twice and gradients once."""
    with on_meta():
        model_bytes = sum(weight.num_bytes for weight in describe(build(task)).weights)
    return 3 * (task.num_ranks - 1) / task.num_ranks * model_bytes


def figures(turn: Mapping[str, Any], *, compute_s: float, link: float) -> dict[str, Any]:
    """One row of the file."""
    step_s, uplink = median(turn["step_s_all"]), median(turn["uplink"])
    wire_bytes = max(median(turn["link"]), uplink / 2)
    busiest_s = max(compute_s, wire_bytes / link)
    return {
        "step_s": step_s,
        "compute_s": compute_s,
        "wire_s": wire_bytes / link,
        "wire_bytes": wire_bytes,
        "efficiency": busiest_s / step_s,
        "efficiency_best": busiest_s / min(turn["step_s_all"]),
        "step_s_all": turn["step_s_all"],
        "uplink_bytes": uplink,
        "link_bytes_per_s": link,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of one number of hosts at one ratio."""
    first = rows[0]
    found = Table(title=f"{first['hosts']} hosts, {first['switches']} switch(es), compute / wire = {first['ratio']:g}")
    for heading in (
        "row",
        "step",
        "compute",
        "wire",
        "max/step",
        "best",
        "MB on the wire",
        "of what was asked",
        "uplink MB",
    ):
        found.add_column(heading, justify="left" if heading == "row" else "right")
    for row in rows:
        found.add_row(
            str(row["row"]).replace("[", r"\["),
            *(f"{row[name]:.2f} s" for name in ("step_s", "compute_s", "wire_s")),
            f"{row['efficiency']:.2f}",
            f"{row['efficiency_best']:.2f}",
            f"{row['wire_bytes'] / 1e6:.1f}",
            f"{row['wire_bytes'] / row['asked_bytes']:.2f}",
            f"{row['uplink_bytes'] / 1e6:.1f}",
        )
    return found


def with_namespaces() -> None:
    """Starts this script again as root of a user namespace, if it is not root and the system has such namespaces."""
    mapped = ["unshare", "--user", "--map-root-user"]
    asked = os.geteuid() != 0 and shutil.which("unshare") is not None
    if asked and subprocess.run([*mapped, "true"], check=False, capture_output=True).returncode == 0:
        os.execvp(mapped[0], [*mapped, sys.executable, *sys.argv])


if __name__ == "__main__":
    with_namespaces()
    raise SystemExit(main())

"""`rotorch bench`: reads the run, starts the ranks of every row, measures, prints, and tells by its exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rotorch.bench.bar import Bar, parse_bar
from rotorch.bench.contender import LIMIT, REFERENCE, build
from rotorch.bench.gate import GATE_STEPS, Verdict, judge, judge_sharding, may_hold, says_little
from rotorch.bench.peers import PEERS, find_peer
from rotorch.bench.rank import load_code
from rotorch.bench.ranks import RowRanks
from rotorch.bench.record import Row, describe_origin, make_record
from rotorch.bench.rounds import take_turns
from rotorch.bench.table import render
from rotorch.bench.task import NUM_BATCHES, Task, check_shares, task_from_run
from rotorch.bench.trace_files import RowTrace, file_stem, summary, write_traces
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.precision import copies_itemsize, itemsize_of_passes
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.mesh import check_world_size, device_type
from rotorch.models.describe import describe
from rotorch.models.held_warnings import held_warnings
from rotorch.models.hf import config_from_dict
from rotorch.planner.prediction import Prediction, predict_ranks
from rotorch.run_config import load_run_config
from rotorch.shard.materialize import on_meta
from rotorch.strategies import (
    as_they_run,
    batch_ranks,
    cuts_context,
    cuts_features,
    cuts_tokens,
    num_ranks,
    parse_parallel,
)
from rotorch.traced.counted_memory import CountedPasses

OK, DOES_NOT_HOLD, RANK_FAILED = 0, 1, 3
"""Exit codes; 2, the input was wrong, is `ConfigError`."""

_PROFILED_STEPS = 3
_TRACED_STEPS = 3
_MEMORY_STEPS = 2

Layouts = dict[str, tuple[Strategy, ...]]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Settings of a measurement.

    Attributes:
        rounds: turns of every row.
        steps: steps of a row per turn.
        process_memory: also start every row afresh to measure its processes (about ten seconds a row).
        profile_dir: also write torch's profile of rank 0 of each row into this directory.
        trace_dir: also write into this directory, of each row, who computes and who waits in some further steps.
        virtual_s: products take FLOPs / rate on a device's clock (see `device_clock.py`), on which those of a rank
            that sends nothing take so many seconds; None: they take what they take.
        timeout_s: a row whose ranks give no answer for this long has failed.
    """

    rounds: int = 5
    steps: int = 5
    process_memory: bool = True
    profile_dir: Path | None = None
    trace_dir: Path | None = None
    virtual_s: float | None = None
    timeout_s: float = 600.0


def bench_command(
    run: str | Path,
    *,
    parallel: Sequence[str] = (),
    peers: Sequence[str] = (),
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    options: BenchOptions | None = None,
    json_file: Path | None = None,
    bars: Sequence[str] = (),
    console: Console | None = None,
) -> int:
    """Measures layouts side by side and prints them; returns the exit code.

    Args:
        run: the run's TOML file.
        parallel: one `--parallel` text per row.
        peers: names of other libraries' rows, as `rotorch.bench.peers` lists them.
        overrides: `key=value` for the run.
        nproc: ranks of every row; by default what the layouts need.
        options: settings of the measurement.
        json_file: file for all figures.
        bars: such as `"rtp=2 >= 1.05 * ddp=2"` (see `bar.py`).
        console: console to print to.

    Returns:
        0; 1 if a row's losses are wrong or a bar does not hold; 3 if a row failed.

    Raises:
        ConfigError: before any rank is started.
    """
    options, console = options or BenchOptions(), console or Console()
    layouts, nproc = read_layouts(parallel, peers=peers, nproc=nproc)
    names = [LIMIT, *layouts, *peers]
    parsed = [parse_bar(text, rows=names, processes=options.process_memory) for text in bars]
    _check_options(options, json_file=json_file)
    with held_warnings():
        task = task_from_run(load_run_config(run, overrides=overrides), name=Path(run).stem, num_ranks=nproc)
        spec = check_model(task, layouts=layouts, peers=peers)
    record = measure(task, spec, layouts=layouts, peers=peers, bars=parsed, options=options, console=console)
    console.print(render(record))
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    return exit_code(record)


def measure(
    task: Task,
    spec: ModelSpec,
    *,
    layouts: Layouts,
    peers: Sequence[str] = (),
    bars: Sequence[Bar] = (),
    options: BenchOptions | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measures `layouts` and `peers` on `task` and returns the record (see `record.py`).

    Args:
        task: what all rows train.
        spec: of its model, as `check_model` returns it.
        layouts: the strategies of each row, by its name.
        peers: names of other libraries' rows.
        bars: what must hold.
        options: settings of the measurement.
        console: console to print to.

    Raises:
        ConfigError: if virtual time would not see the products; before any rank is started.
    """
    options, origin = options or BenchOptions(), describe_origin()
    _check_virtual_time(task, options)
    load_code(task)
    rows = {LIMIT: Row(LIMIT, task.num_ranks)} | {name: Row(name, num_ranks(s)) for name, s in layouts.items()}
    rows |= {name: Row(name, task.num_ranks, peer=PEERS[name]) for name in peers}
    num_turns = len(rows) * (options.rounds + 2 + options.process_memory) + 1
    with _progress(console or Console(quiet=True), total=num_turns) as advanced:
        reference = _reference_losses(task, options=options, advanced=advanced)
        flops_per_s = None if options.virtual_s is None else _flops_alone(task, options=options) / options.virtual_s
        _time(rows, task=task, options=options, flops_per_s=flops_per_s, advanced=advanced)
        if options.process_memory:
            for row in rows.values():
                if row.error is None:
                    advanced(f"process memory: {row.name}")
                    _measure_process(row, task=task, options=options)
    for row in rows.values():
        if row.times is not None:
            row.verdict = _judge(row, task=task, spec=spec, strategies=layouts.get(row.name), reference=reference)
    if task.accumulation == 1:  # Layouts speak of one micro-batch
        for name, strategies in layouts.items():
            rows[name].predictions = _predictions(spec, task=task, strategies=strategies, row=rows[name])
    _plan_peaks(rows, layouts=layouts, task=task, spec=spec)
    times = {name: row.times for name, row in rows.items() if row.times is not None and row.problem is None}
    memory = {name: row.memory_bytes() for name, row in rows.items() if row.problem is None}
    checked = []
    for bar in bars:
        ok, reached = bar.check(times, memory)
        checked.append({"bar": str(bar), "ok": ok, "reached": reached})
    record = make_record(list(rows.values()), task=task, reference=reference, bars=checked, origin=origin)
    if flops_per_s is not None:
        record["virtual_time"] = {"products_s": options.virtual_s, "flops_per_s": flops_per_s}
    if says_little(reference, precision=task.precision, num_batches=NUM_BATCHES):
        record["warning"] = "the losses hardly change over the first steps, so they prove little: raise optimizer.lr"
    return record


def exit_code(record: dict[str, Any]) -> int:
    """0, 1 or 3 (see `bench_command`)."""
    rows = [record["limit"], *record["rows"]]
    if any("error" in row for row in rows):
        return RANK_FAILED
    return DOES_NOT_HOLD if any("invalid" in row for row in rows) or not all(b["ok"] for b in record["bars"]) else OK


def read_layouts(parallel: Sequence[str], *, peers: Sequence[str] = (), nproc: int | None) -> tuple[Layouts, int]:
    """Parses `--parallel` texts and finds the number of ranks that rows share; `single` and peers fit any number.

    Raises:
        ConfigError: nothing to measure, a row twice, a peer that is not there, or sizes that do not multiply to
            `nproc`.
    """
    if not parallel and not peers:
        raise ConfigError("bench: no layout given. Write for example --parallel ddp=2 --parallel rtp=2 --peer fsdp2")
    for number, name in enumerate(peers):
        find_peer(name)
        if name in peers[:number]:
            raise ConfigError(f"bench: --peer {name} is given twice. Write it once")
    layouts: Layouts = {}
    for text in parallel:
        if text in layouts:
            raise ConfigError(f"bench: --parallel {text!r} is given twice. Write it once")
        layouts[text] = parse_parallel(text)
    spread = [strategies for strategies in layouts.values() if num_ranks(strategies) > 1]
    if nproc is None and not spread and peers:
        raise ConfigError("bench: peers take any number of ranks. Say how many: --nproc 2")
    if nproc is None:
        nproc = num_ranks(spread[0]) if spread else 1
    if nproc < 1:
        raise ConfigError(f"bench: nproc = {nproc}. Write a positive number")
    for strategies in spread:
        check_world_size(strategies, world_size=nproc)
    return layouts, nproc


def check_model(task: Task, *, layouts: Layouts, peers: Sequence[str] = ()) -> ModelSpec:
    """Builds the model on meta and asks every strategy and every peer whether it can hold it.

    Raises:
        ConfigError: if one cannot, or batches do not divide.
    """
    check_shares(task, layouts=list(layouts.values()))
    with on_meta():
        cut = layouts.values()
        spec = describe(
            build(task),
            features=any(map(cuts_features, cut)),
            tokens=any(map(cuts_tokens, cut)),
            context=any(map(cuts_context, cut)),
        ).with_copies(copies_itemsize(task.precision))
    for strategies in layouts.values():
        for strategy in strategies:
            strategy.at_precision(task.dtype_of_passes).on_device(device_type(task.device)).check(spec)
    for name in peers:
        find_peer(name).load().check(task)
    return spec


def _judge(
    row: Row, *, task: Task, spec: ModelSpec, strategies: Sequence[Strategy] | None, reference: Sequence[float]
) -> Verdict:
    """Checks that a row's losses are right and that its ranks hold no more weights than it claims."""
    losses = row.times.losses[:GATE_STEPS] if row.times is not None else []
    shares, alone = row.peer is not None, row.name == LIMIT
    verdict = judge(losses, reference=reference, precision=task.precision, alone=alone, shares=shares)
    if verdict.reason is not None or not row.held_elements:
        return verdict
    if strategies is not None:
        predictions = _predictions(spec, task=task, strategies=strategies, row=row)
        held_bytes = sum(p.weights_bytes for p in predictions)
        at_most = held_bytes // spec.weights[0].itemsize
    elif row.peer is not None and row.peer.sharded:
        at_most = may_hold(spec, num_ranks=row.num_ranks)
    else:
        return verdict
    return replace(verdict, reason=judge_sharding(row.held_elements, at_most=at_most, whole=spec.num_parameters))


def _predictions(spec: ModelSpec, *, task: Task, strategies: Sequence[Strategy], row: Row) -> list[Prediction]:
    """Predicts bytes and traffic by rank."""
    # Under autocast some activations have its precision and some their weights', as the model's code will have it.
    batch = None if task.precision == "autocast_bfloat16" else _micro_batch(task, strategies)
    return predict_ranks(spec, strategies=_as_run(strategies, task=task, row=row), batch=batch)


def _plan_peaks(rows: Mapping[str, Row], *, layouts: Layouts, task: Task, spec: ModelSpec) -> None:
    """Plans the highest moment of the ranks of each layout that was measured, where its passes can be counted."""
    if task.compile or not spec.order.layers:
        return
    passes = CountedPasses(
        config_from_dict(task.model, source=task.name, checks_keys=False), spec, task.sequence_length, task.precision
    )
    for name, strategies in layouts.items():
        if not rows[name].tensors:
            continue
        try:
            rows[name].planned = passes.memory(
                _as_run(strategies, task=task, row=rows[name]),
                batch=_micro_batch(task, strategies),
                accumulation=task.accumulation,
                device=device_type(task.device),
                per_host=task.num_ranks,
            )
        except ConfigError:  # they look at values of tensors
            return


def _as_run(strategies: Sequence[Strategy], *, task: Task, row: Row) -> tuple[Strategy, ...]:
    """The strategies as the task's precision and device, and what "auto" came to, make them."""
    in_passes = [s.at_precision(task.dtype_of_passes).on_device(device_type(task.device)) for s in strategies]
    return as_they_run(in_passes, transport=row.transport, within=row.transport_within)


def _micro_batch(task: Task, strategies: Sequence[Strategy]) -> MicroBatch:
    """The batch that a rank, or those that share their sequences, compute on at once."""
    rows = task.global_batch // task.accumulation // batch_ranks(strategies)
    return MicroBatch(rows, task.sequence_length, itemsize=itemsize_of_passes(task.precision))


def _check_options(options: BenchOptions, *, json_file: Path | None) -> None:
    if options.rounds < 1 or options.steps < 1:
        raise ConfigError(f"bench: {options.rounds} rounds of {options.steps} steps. Write at least 1 of each")
    if options.virtual_s is not None and not 0 < options.virtual_s < math.inf:
        raise ConfigError(f"bench: --virtual-time {options.virtual_s:g}: write seconds above 0, for example 2")
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise ConfigError(
            f"bench: cannot write {str(json_file)!r}: its directory is missing, or it is one. Write a file's path"
        )
    if options.trace_dir is not None and options.trace_dir.exists() and not options.trace_dir.is_dir():
        raise ConfigError(f"bench: trace: {str(options.trace_dir)!r} is a file. Write the path of a directory")


def _check_virtual_time(task: Task, options: BenchOptions) -> None:
    """Raises `ConfigError` where `device_clock.py` does not see products: it sees torch's operators, on CPU."""
    if options.virtual_s is None:
        return
    if task.compile:
        raise ConfigError(
            "bench: --virtual-time sees no products of compiled blocks. Leave --compile (train.compile) out"
        )
    if device_type(task.device) != "cpu":
        raise ConfigError("bench: --virtual-time simulates a device on CPU ranks. Write train.device=cpu")


def _reference_losses(task: Task, *, options: BenchOptions, advanced: Callable[[str], None]) -> list[float]:
    advanced("losses of one process")
    ranks = RowRanks(task, row=REFERENCE, num_ranks=1, timeout_s=options.timeout_s)
    try:
        ranks.ask("build")
        return [step.loss for step in ranks.ask("steps", count=GATE_STEPS)[0]]
    finally:
        ranks.close()


def _flops_alone(task: Task, *, options: BenchOptions) -> float:
    """FLOPs of the products of a rank of the limit, in a step."""
    ranks = RowRanks(task, row=LIMIT, num_ranks=task.num_ranks, timeout_s=options.timeout_s)
    try:
        ranks.ask("build")
        return float(max(ranks.ask("product_flops")))
    finally:
        ranks.close()


def _time(
    rows: dict[str, Row],
    *,
    task: Task,
    options: BenchOptions,
    flops_per_s: float | None,
    advanced: Callable[[str], None],
) -> None:
    """Times all rows in turns, then takes their tensors, traffic and profiles, while all are still alive."""
    alive: dict[str, RowRanks] = {}

    def failed(name: str, failure: RankFailure) -> None:
        rows[name].error = str(failure)
        if name in alive:
            alive.pop(name).close()

    try:
        for name, row in rows.items():
            try:
                alive[name] = RowRanks(
                    task, row=name, num_ranks=row.num_ranks, timeout_s=options.timeout_s, flops_per_s=flops_per_s
                )
                built = alive[name].ask("build")[0]
                row.threads, row.settings = built.threads, built.settings
                row.transport, row.transport_within = built.transport, built.transport_within
            except RankFailure as failure:
                failed(name, failure)
        times = take_turns(alive, num_rounds=options.rounds, num_steps=options.steps, failed=failed, advanced=advanced)
        for name, ranks in list(alive.items()):
            rows[name].times = times[name]
            rows[name].held_elements = ranks.ask("held_elements")
            advanced(f"tensors and traffic: {name}")
            try:
                rows[name].tensors = ranks.ask("tensors")
                rows[name].traffic, rows[name].wire = ranks.wire_of("traffic")
                if options.trace_dir is not None:
                    trace = RowTrace(name, ranks.ask("trace", count=_TRACED_STEPS))
                    rows[name].timeline = summary(trace, files=write_traces(trace, directory=options.trace_dir))
                if options.profile_dir is not None:
                    file = options.profile_dir / f"{file_stem(name)}.txt"
                    ranks.ask("profile", count=_PROFILED_STEPS, file=str(file))
                alive.pop(name).stop()
            except RankFailure as failure:
                failed(name, failure)
    finally:
        for ranks in alive.values():
            ranks.close()


def _measure_process(row: Row, *, task: Task, options: BenchOptions) -> None:
    """Starts a row afresh and takes the kernel's figures of its processes."""
    ranks = None
    try:
        ranks = RowRanks(task, row=row.name, num_ranks=row.num_ranks, fresh=True, timeout_s=options.timeout_s)
        ranks.ask("build")
        ranks.ask("steps", count=_MEMORY_STEPS)
        ranks.ask("reset_peak")
        ranks.ask("steps", count=_MEMORY_STEPS)
        row.process = ranks.ask("process_memory")
        ranks.stop()
    except RankFailure as failure:
        row.error = f"process memory: {failure}"
    finally:
        if ranks is not None:
            ranks.close()


@contextmanager
def _progress(console: Console, *, total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting ranks", total=total)

        def advanced(text: str) -> None:
            progress.update(bar, description=text, advance=1)

        yield advanced

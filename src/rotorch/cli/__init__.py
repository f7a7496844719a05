"""The `rotorch` command. Importing it loads no torch: a command loads what it needs when it runs.

Exit codes: 0 done; 1 a check did not hold; 2 the input was wrong, and nothing was started; 3 a rank failed while
running; 70 an unforeseen error; 130, 143, 129 ended by Ctrl-C, SIGTERM, or with its terminal (`train` saves a
checkpoint before); 75 a rank that another program started, after the job was asked to stop. Every command takes
`--json FILE` for the numbers that it prints.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from rotorch import __version__
from rotorch.bench import peers
from rotorch.cli import options, output
from rotorch.cli.options import Compile, Device, Json, Nproc, Overrides, OwnLayout, Parallel, standard_input
from rotorch.cli.output import check_json, leave_traceback, outlive_closed_output, print_now, show, write_json
from rotorch.core.errors import ConfigError, RankFailure, StoppedEarly, beginning_of
from rotorch.core.phase_line import tell_phase
from rotorch.train.launch.joining import JobRank, job_rank

DONE, CHECK_FAILED, WRONG_INPUT, RANK_FAILED, UNFORESEEN, INTERRUPTED = 0, 1, 2, 3, 70, 130

_UsageError = typer.BadParameter.__bases__[0]  # typer does not export it, nor say whether it is click's or its own

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

_CHECKPOINT = "A checkpoint, or a run (then its latest): a directory, or a URL like s3://bucket/my_run"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    outlive_closed_output()
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code not in (DONE, CHECK_FAILED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: a rank of torchrun's may hold a process group that waits for ranks that are gone
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit code. Reports an error in one line on stderr."""
    about = _Invocation()
    try:
        about.job = _place_in_job(arguments)
        code = app(list(arguments), prog_name="rotorch", standalone_mode=False, obj=about)
    except ConfigError as error:
        return _refuse(str(error), job=about.job)
    except StoppedEarly as error:  # its last lines have said so
        return error.exit_code
    except RankFailure as error:
        return _say(str(error), code=RANK_FAILED)
    except _UsageError as error:
        return _refuse(f"{error.format_message()} (rotorch --help lists the commands)", job=about.job)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", code=INTERRUPTED)
    except OSError as error:
        return _refuse(f"{error.filename or ''}: {error.strerror or error}".removeprefix(": "), job=about.job)
    except (Exception, *output.no_exceptions()) as error:
        what, where = beginning_of(error), leave_traceback(error, run_directory=about.run_directory)
        return _refuse(f"unforeseen {type(error).__name__}: {what}{where}", job=about.job, code=UNFORESEEN)
    if code == INTERRUPTED:  # typer's own word for a KeyboardInterrupt
        return _say("interrupted", code=INTERRUPTED)
    return code if isinstance(code, int) else DONE


@dataclass
class _Invocation:
    """Facts for reporting a command that fails: its place in a job, and its run's directory."""

    job: JobRank | None = None
    run_directory: Path | None = None


def _place_in_job(arguments: Sequence[str]) -> JobRank | None:
    """Place of this process, if another program started it as one rank of a training job."""
    if list(arguments[:1]) != ["train"] or "--help" in arguments:
        return None
    job = job_rank()
    return None if "--dry-run" in arguments else job


def _refuse(message: str, *, job: JobRank | None, code: int = WRONG_INPUT) -> int:
    """Prints an error on every rank that has it; then tells the other ranks."""
    if job is None or job.num_ranks == 1:
        return _say(message, code=code)
    _say(f"{job}: {message}", code=code)
    with suppress(KeyboardInterrupt):
        job.tell(" ".join(message.split()))
    return code


def _hide_gpus() -> None:
    """Hides GPUs from commands that fork ranks on CPU: they could not start (see `process/forking.py`)."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _say(message: str, *, code: int) -> int:
    tell_phase()
    print(f"rotorch: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version")] = False,
) -> None:
    """Trains PyTorch models across ranks that together hold them once."""
    if version:
        print(f"rotorch {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command("train")
def train(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run to train; `-`: from standard input")],
    overrides: Overrides = None,
    nproc: Nproc = None,
    parallel: OwnLayout = None,
    compile_blocks: Compile = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the run's last checkpoint")] = False,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts from the last checkpoint after a rank failed")
    ] = None,
    elastic: Annotated[
        str | None, typer.Option(metavar="LEAST:MOST", help="Numbers of ranks to restart on, e.g. 2:4")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the bytes each rank would read and hold; start nothing"),
    ] = False,
    json_file: Json = None,
) -> int:
    """Trains a model on ranks of this machine, or as one rank under torchrun."""
    tell_phase(f"reading {run_file}")
    from rotorch.process.parent_death import die_with_torchrun
    from rotorch.run_config import load_run_config
    from rotorch.strategies import parse_parallel, to_be_planned

    die_with_torchrun()
    changes = [*(overrides or ()), *([] if parallel is None else [f"parallel.layout={parallel}"])]
    changes += ["train.compile=true"] if compile_blocks else []
    changes += [] if max_restarts is None else [f"train.max_restarts={max_restarts}"]
    changes += [] if elastic is None else [f'train.elastic="{elastic}"']
    piped = None if str(run_file) != "-" else standard_input(job=context.obj.job)
    name = Path("stdin") if piped is not None else run_file
    config = load_run_config(name, overrides=changes, content=piped)
    check_json(json_file)
    chosen = None
    if to_be_planned(config.parallel.layout):
        from rotorch.cli import auto

        chosen = auto.planned(config, nproc=nproc)
        print_now("\n".join(chosen.told))
        changes += chosen.changes
        config = load_run_config(name, overrides=changes, content=piped)
    parse_parallel(config.parallel.layout)  # before seconds are spent on loading torch
    about: _Invocation = context.obj
    about.run_directory = Path(config.train.out)
    tell_phase("loading torch")
    from rotorch.train.run import start

    words = ["rotorch", "train", str(run_file), *changes, *([f"--nproc={nproc}"] if nproc else ()), "--resume"]
    is_well = start(
        config,
        nproc=nproc,
        resume=resume,
        command=shlex.join(words) + (" < RUN.toml" if piped is not None else ""),
        summary=json_file,
        only_plan=dry_run,
        job=about.job,
        resize=None if chosen is None else chosen.resize,
    )
    if chosen is not None and not dry_run and (line := auto.compared(chosen, run_directory=about.run_directory)):
        print_now(line)
    return DONE if is_well else CHECK_FAILED


@app.command("lr-find")
def lr_find(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run to find a learning rate for")],
    overrides: Overrides = None,
    nproc: Nproc = None,
    parallel: OwnLayout = None,
    lowest: Annotated[float, typer.Option(help="Learning rate of the first step")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Learning rate of the last step")] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps, each with a larger rate than the one before")] = 100,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a plot to FILE.svg")] = None,
    json_file: Json = None,
) -> int:
    """Tries growing learning rates on a run's own layout and suggests one. Leaves no run directory."""
    from rotorch.cli.lr_find import lr_find_command

    changes = [*(overrides or ()), *([] if parallel is None else [f"parallel.layout={parallel}"])]
    found = lr_find_command(
        run_file,
        overrides=changes,
        nproc=nproc,
        lowest=lowest,
        highest=highest,
        steps=steps,
        plot=plot,
        json_file=json_file,
    )
    return DONE if found else CHECK_FAILED


@app.command("init")
def init(
    model: options.StartingModel,
    data: options.TextToLearn = "stdlib",
    out: Annotated[
        Path | None, typer.Option(metavar="RUN.toml", help="The file to write; by default named after the model")
    ] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks; by default one per GPU, or core")] = None,
    parallel: Annotated[str | None, typer.Option("--parallel", help="Layout; by default the planner's choice")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file")] = False,
    json_file: Json = None,
) -> None:
    """Writes a commented run file for a model and a text, ready for `rotorch train`."""
    check_json(json_file)
    file = options.file_of_run(model, out=out, force=force)
    tell_phase("loading torch")
    from rotorch.cli.init import init_command, last_lines

    run = init_command(model, data=data, file=file, nproc=nproc, parallel=parallel)
    for line in last_lines(file, run):
        print_now(line)
    write_json(json_file, {"file": str(file), "config": run.model_dump(mode="json")})


@app.command("verify")
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, or a config.json")],
    parallel: Parallel,
    nproc: Nproc = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and data")] = 0,
    layers: Annotated[int | None, typer.Option(help="Compare only the model's first layers")] = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step: a pipeline's schedule needs them")] = 2,
    json_file: Json = None,
) -> int:
    """Compares a model under a layout with one process, in float64."""
    check_json(json_file)
    _hide_gpus()
    tell_phase("loading torch")
    from rotorch.testing.verify import verify as hold_against_one_process

    report = hold_against_one_process(
        model,
        parallel=parallel,
        nproc=nproc,
        steps=steps,
        seed=seed,
        layers=layers,
        micro_batches=micro_batches,
    )
    empty = () if report.note else ("note",)
    show(report.to_json(), hidden=("per_step", "worst_weights", "first_divergence", *empty))
    write_json(json_file, report.to_json())
    return DONE if report.ok else CHECK_FAILED


@app.command("bench")
def bench(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The model and its batch")],
    overrides: Overrides = None,
    parallel: Annotated[list[str] | None, typer.Option("--parallel", help="A layout to measure; several times")] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help=f"Another library's row; several times. {peers.help_text()}")
    ] = None,
    nproc: Nproc = None,
    compile_blocks: Compile = False,
    rounds: Annotated[int, typer.Option(help="Turns of every layout")] = 5,
    steps: Annotated[int, typer.Option(help="Steps per turn")] = 5,
    process_memory: Annotated[bool, typer.Option(help="Also measure processes, started afresh")] = True,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="Write torch's profiles to DIR")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write timelines of computing and waiting ranks to DIR")
    ] = None,
    virtual_time: options.VirtualTime = None,
    bars: options.Bars = None,
    json_file: Json = None,
) -> int:
    """Measures layouts side by side: speed, memory, bytes sent."""
    tell_phase("loading torch")
    from rotorch.bench.command import BenchOptions, bench_command

    tell_phase()
    asked = BenchOptions(
        rounds=rounds,
        steps=steps,
        process_memory=process_memory,
        profile_dir=profile,
        trace_dir=trace,
        virtual_s=virtual_time,
    )
    return bench_command(
        run_file,
        parallel=parallel or (),
        peers=peer or (),
        overrides=[*(overrides or ()), *(["train.compile=true"] if compile_blocks else ())],
        nproc=nproc,
        options=asked,
        json_file=json_file,
        bars=bars or (),
    )


@app.command("suite")
def suite(
    suite_file: Annotated[Path, typer.Argument(metavar="SUITE.toml", help="The cases, e.g. configs/bench/suite.toml")],
    cases: Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="Names or patterns; none: all")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of results")] = Path("benchmarks/results"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of every layout, in place of the suite's")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per turn, in place of the suite's")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also measure cases that this source has measured")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Show the cases, and those with a result")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Measure nothing; write table and plots")] = False,
) -> int:
    """Runs many benches: a JSON file for each, and a table and a plot of all. Continues an interrupted suite."""
    tell_phase("loading torch")
    from rotorch.bench.suite_command import list_cases, suite_command, write_tables

    tell_phase()
    if only_list or tables:
        list_cases(suite_file, out=out) if only_list else write_tables(suite_file, out=out)
        return DONE
    return suite_command(suite_file, cases=cases or (), out=out, rounds=rounds, steps=steps, again=again)


@app.command("plan")
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, or a config.json")],
    cluster: Annotated[str, typer.Option(help="A TOML file, or a cluster by name: h100x16, a100x8, cpu2, ...")],
    batch: Annotated[str, typer.Option(help="Batch of a step: sequences by tokens of each")] = "64x4096",
    budget: Annotated[
        str | None, typer.Option(help="Bytes that a rank may hold, 40GiB; by default the device's")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes in place of the cluster's own")] = None,
    objective: Annotated[str, typer.Option(help="speed, memory or frontier")] = "speed",
    precision: Annotated[str, typer.Option(help="Precision of passes, as of train.precision")] = "bfloat16",
    parallel: Annotated[
        list[str] | None, typer.Option("--parallel", help="Judge this layout only; several times")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all plans to FILE")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace the model, even if an earlier plan has")] = False,
    json_file: Json = None,
) -> None:
    """Predicts memory and step time of every layout on a cluster; names the best, and reasons against the others."""
    check_json(json_file)
    _hide_gpus()
    from rotorch.cli.plan import plan_command

    found = plan_command(
        model,
        cluster_name=cluster,
        batch_text=batch,
        budget_text=budget,
        objective=objective,
        precision=precision,
        parallel=parallel or (),
        nodes=nodes,
        html=html,
        keeps=not no_cache,
    )
    write_json(json_file, found)


@app.command("calibrate")
def calibrate(
    nproc: Annotated[int | None, typer.Option("--nproc", help="Ranks that share this machine; one per core")] = None,
    out: Annotated[Path | None, typer.Option(metavar="CLUSTER.toml", help="Write the cluster file")] = None,
    json_file: Json = None,
) -> None:
    """Measures the speeds of ranks of this machine, on the CPU, for `rotorch plan --cluster CLUSTER.toml`."""
    check_json(json_file)
    _hide_gpus()
    from rotorch.cli.calibrate import calibrate_command

    found = calibrate_command(nproc=nproc, out=out)
    show({"cluster": found["name"], **{k: v for k, v in found["device"].items() if k in ("bandwidth", "operator")}})
    write_json(json_file, found)


@app.command("schedule")
def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="zeropp, or a baseline: gpipe, 1f1b, zbv, ...")],
    stages: Annotated[int, typer.Option(help="Ranks that the model is spread over")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step")],
    chunks: Annotated[int, typer.Option(help="Chunks of the model per rank")] = 1,
    unit: Annotated[
        int | None, typer.Option(help="Micro-batches per gather of weights; none: the schedule's own choice")
    ] = None,
    gather: Annotated[float, typer.Option(help="Slots that a gather, or a sum of gradients, takes")] = 0.0,
    message: Annotated[float, typer.Option(help="Slots that a message between ranks takes")] = 0.0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture to FILE, to zoom into")] = None,
    json_file: Json = None,
) -> None:
    """Draws the simulated timeline of a pipeline, with its bubble, memory and traffic."""
    check_json(json_file)
    from rotorch.cli.schedule import schedule_command

    found = schedule_command(
        name,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        unit=unit,
        gather=gather,
        message=message,
        html=html,
    )
    write_json(json_file, found)


@app.command("zoo")
def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG]...", help="Configuration classes; none: all")
    ] = None,
    parallel: Annotated[list[str] | None, typer.Option("--parallel", help="A layout to try; several times")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table to FILE; of all models only")
    ] = None,
    cache: Annotated[Path, typer.Option(metavar="FILE", help="Results of earlier calls")] = Path(".cache/zoo.jsonl"),
    again: Annotated[bool, typer.Option("--again", help="Also try models that this source has tried")] = False,
    older: Annotated[bool, typer.Option("--older", help="Also use results of other states of the source")] = False,
    known: Annotated[bool, typer.Option("--known", help="Run nothing: use the cache only")] = False,
    json_file: Json = None,
) -> int:
    """Compares a tiny model of every architecture in transformers with one process. Continues an interrupted call."""
    check_json(json_file)
    if names and out is not None:
        raise ConfigError("zoo: --out is a table of all models, but some are named. Leave out one of the two")
    from rotorch.strategies import parse_parallel

    for layout in parallel or ():
        parse_parallel(layout)
    _hide_gpus()
    tell_phase("loading torch")
    from rotorch.testing.zoo import LAYOUTS, configurations, run_zoo, table

    tell_phase()
    if known and again:
        raise ConfigError(
            "zoo: --known runs nothing, and --again runs known models once more. Leave out one of the two"
        )
    layouts = tuple(parallel or LAYOUTS)
    outcomes = run_zoo(
        names or (), layouts=layouts, cache=cache, again=again, older=older, only_known=known, tell=print_now
    )
    for layout in layouts:
        mine = [o for o in outcomes if o.parallel == layout]
        print(f"{layout}: {sum(o.ok for o in mine)} of {len(mine)} exact, {sum(o.refused for o in mine)} refused")
    if out is not None:
        every = [config_class.__name__ for config_class in configurations()]
        out.write_text(table(outcomes, layouts=layouts, names=every, older=older), "utf-8")
    write_json(json_file, {"outcomes": [asdict(o) for o in outcomes]})
    return CHECK_FAILED if any(o.is_wrong for o in outcomes) else DONE


@app.command("export")
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default as trained")] = None,
    max_shard_bytes: Annotated[int, typer.Option(help="Largest weights file")] = 5_000_000_000,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the model, else write them alone")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of DIR")] = False,
    json_file: Json = None,
) -> None:
    """Writes a checkpoint as a Hugging Face directory of safetensors; adapters as a peft directory."""
    check_json(json_file)
    options.check_checkpoint(checkpoint)
    tell_phase("loading torch")
    from rotorch.train.checkpoint.export import export_checkpoint

    written = export_checkpoint(
        checkpoint, directory, dtype=dtype, max_shard_bytes=max_shard_bytes, merge=merge, force=force
    )
    show(written)
    write_json(json_file, written)


@app.command("generate")
def generate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT)],
    prompt: options.Prompt = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens to add at most")] = 200,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 1.0,
    seed: options.DrawSeed = 0,
    parallel: Parallel = "single",
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """Writes text with the model of a checkpoint."""
    check_json(json_file)
    options.check_checkpoint(checkpoint)
    tell_phase("loading torch")
    from rotorch.train.continue_text import Wanted, generate_text
    from rotorch.train.saved_model import open_saved_model

    saved = open_saved_model(checkpoint, layout=parallel, device=device)
    text = sys.stdin.read() if prompt == "-" else saved.run.sample.prompt if prompt is None else prompt
    wanted = Wanted(text, length=length, temperature=temperature, top_p=top_p, seed=seed)
    generate_text(saved, wanted, summary=json_file)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT)],
    data: options.HeldOutData = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows to measure; by default all")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Windows in one pass of a rank; the run's")] = None,
    tasks: options.Tasks = "",
    task_dir: options.TaskDir = None,
    few_shot: options.FewShot = None,
    limit: options.Limit = None,
    parallel: Parallel = "single",
    device: Device = "auto",
    json_file: Json = None,
) -> None:
    """Measures the model of a checkpoint on text (bits per byte, perplexity), or on tasks of lm-eval."""
    check_json(json_file)
    options.check_task_options(tasks, of_text=(data, windows), of_tasks=(task_dir, few_shot, limit))
    options.check_checkpoint(checkpoint)
    tell_phase("loading torch")
    from rotorch.train.measure_tasks import Questions, measure_tasks
    from rotorch.train.measure_text import measure_text
    from rotorch.train.saved_model import open_saved_model

    saved = open_saved_model(checkpoint, layout=parallel, device=device)
    if tasks:
        asked = Questions(tuple(tasks.split(",")), task_dir, few_shot=few_shot, limit=limit)
        measure_tasks(saved, asked, micro_batch=micro_batch, summary=json_file)
    else:
        measure_text(saved, source=data, num_windows=windows, micro_batch=micro_batch, summary=json_file)


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs: their train.out")],
    out: options.Page = None,
    json_file: Json = None,
) -> None:
    """Draws runs as one page: curves, time line, memory, configuration; several runs overlaid."""
    check_json(json_file)
    from rotorch.cli.report import report_command

    file, found = report_command(runs, out=out)
    for run in found["runs"]:
        for remark in run["remarks"]:
            print(f"{run['name']}: {remark}", file=sys.stderr)
    print_now(f"written: {file}")
    write_json(json_file, found)


@app.command("inspect")
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=_CHECKPOINT)],
    contents: Annotated[bool, typer.Option("--contents", help="Check every byte against its digest")] = False,
    json_file: Json = None,
) -> None:
    """Shows the contents of a checkpoint."""
    check_json(json_file)
    from rotorch.train.checkpoint.contents import inspect_checkpoint

    found = inspect_checkpoint(checkpoint, contents=contents)
    show(found, hidden=("tensors",))
    print(f"{'tensors':<18} {len(found['tensors'])}")
    write_json(json_file, found)


@app.command("doctor")
def doctor(json_file: Json = None) -> None:
    """Shows devices, backends, transports, shared memory and versions of this machine."""
    check_json(json_file)
    from rotorch.cli.doctor import examine

    found = examine()
    show(found)
    write_json(json_file, found)

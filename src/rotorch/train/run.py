"""`rotorch train`, from a run's configuration to its last line. Read this file first; it names all others in order.

start                      once: in the launcher, or in every rank that torchrun started
  run_lock.check_not_in_use  no other run writes here now
  joining.JobRank            torchrun's ranks compare their settings, and later their files
  preflight.check_run        all checks of inputs, before anything is written (choose_optimizer.check_optimizer, ...)
  dry_run.dry_run            with --dry-run: the bytes that each rank would read and hold, and no more
  run_lock.lock_directories  no other run writes here from now on
  data.prepare_corpus        text -> tokens, cached
  restart.launch_again       once, or again from the last checkpoint after a rank failed
  launch.launch              ranks, from their start to their ends
    train                  in every rank
      build                  the model, spread over the ranks, with its first values or a checkpoint's
      reference.prepare_reference  of preference pairs: the first model's log-probabilities
      loggers.make_listeners   wandb, mlflow and callbacks, on the first rank; beside metrics.jsonl and events.jsonl
      loop.run_loop            step.train_step, loop.evaluate, checkpoint.save
      planned_peaks          the memory of passes, counted, beside what ranks took
      sample.write_sample
      summarise              the last lines
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text

from rotorch.comm.collectives import all_reduce_max, any_rank
from rotorch.core.errors import ConfigError, StoppedEarly
from rotorch.core.phase_line import tell_phase
from rotorch.core.precision import dtype_of_passes
from rotorch.core.quantities import format_bytes, format_count
from rotorch.mesh import device_type, join_process_group, pick_device
from rotorch.models.decay import num_decayed_parameters
from rotorch.models.lora import ADAPTERS
from rotorch.models.preference_loss import PreferenceLoss
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import load_step_code, parallelize
from rotorch.planner.prediction import predict
from rotorch.process.forking import check_semaphores, why_no_ranks
from rotorch.process.new_interpreter import call_fresh
from rotorch.process.parent_death import die_with_torchrun
from rotorch.run_config import RunConfig
from rotorch.shard.materialize import on_meta
from rotorch.strategies import format_parallel
from rotorch.train.checkpoint.auxiliary_files import auxiliary_files
from rotorch.train.checkpoint.directories import checkpoints_of, make_directory
from rotorch.train.checkpoint.saving import load_newest, package_versions
from rotorch.train.checks.counted_memory import CountedRun
from rotorch.train.checks.divergence import read_ahead
from rotorch.train.checks.dry_run import dry_run, show_dry_run
from rotorch.train.checks.memory import forget_peak
from rotorch.train.checks.out_of_memory import Running, Share, explained_out_of_memory
from rotorch.train.checks.planned_peaks import LEAST_S, PlannedPeaks, planned_peaks
from rotorch.train.checks.preflight import RUN_FILE, CheckedRun, check_run
from rotorch.train.checks.resuming import data_position
from rotorch.train.data.batches import BYTES, all_windows, open_windows, prepare_corpus, prepare_sources
from rotorch.train.data.mixture import MixedWindows
from rotorch.train.data.stream import STREAM, MixedStreams, StreamWindows
from rotorch.train.data.windows import TokenWindows
from rotorch.train.display import make_display
from rotorch.train.events import MOST_PREDICTED, EventsFile
from rotorch.train.launch.elastic import is_rank, launch, run_as_rank
from rotorch.train.launch.joining import JobRank, job_rank, rank_findings, rank_settings, telling
from rotorch.train.launch.restart import OnRanks, as_started, job_id, launch_again
from rotorch.train.launch.run_lock import check_not_in_use, contents, directories_of, lock_directories
from rotorch.train.launch.status import RankPhase, StatusBoard
from rotorch.train.launch.watchdog import BACKSTOP_S
from rotorch.train.loggers import RunInfo, make_listeners
from rotorch.train.loop import LoopEnd, run_loop
from rotorch.train.metrics import Listener, MetricsFile, TensorBoard, set_aside
from rotorch.train.module import make_module, precision_arguments
from rotorch.train.optim import make_optimizer, schedule_numbers
from rotorch.train.reference import REFERENCE, check_same_reference, prepare_reference, reference_digest
from rotorch.train.sample import write_sample
from rotorch.train.state import TrainState, derive_rng, model_config

STOPPED_EARLY = 75
"""A rank's exit code after the job was asked to stop (EX_TEMPFAIL): with 0 what has started it would take the job for
done. By which signal some rank was asked, this one need not know."""


def start(
    config: RunConfig,
    *,
    nproc: int | None = None,
    resume: bool = False,
    command: str = "",
    summary: Path | None = None,
    only_plan: bool = False,
    job: JobRank | None = None,
    resize: OnRanks | None = None,
) -> bool:
    """Checks the run, starts its ranks (unless this process is one already), and returns when it is over.

    Args:
        config: configuration of the run.
        nproc: number of ranks to start; by default as many as the layout has.
        resume: go on from the last checkpoint.
        command: the command that goes on with this run, for messages.
        summary: a JSON file for the numbers of the last lines.
        only_plan: say what each rank would read and hold, and start nothing.
        job: this process's place among ranks that something else started, if the caller tells the others of errors;
            else it is looked up, and done here.
        resize: chooses the layout for a restart on fewer ranks, see `launch_again`.

    Returns:
        Whether all is well: False if what was only planned would not fit.

    Raises:
        ConfigError: something is wrong with the input; nothing was started and nothing written.
        RankFailure: a rank failed; the message names it.
        StoppedEarly: it was asked to stop before the last step, and has saved a checkpoint.
        KeyboardInterrupt: Ctrl-C before the ranks started, or a second one while they ran.
    """
    die_with_torchrun()  # the command has done so; this is for who calls from a script
    with ExitStack() as held:
        if job is None and (job := job_rank()) is not None and not only_plan:
            held.enter_context(telling(job))
        return _start(
            config,
            nproc=nproc,
            resume=resume,
            command=command,
            summary=summary,
            only_plan=only_plan,
            job=None if only_plan else job,
            held=held,
            resize=resize,
        )


def _start(
    config: RunConfig,
    *,
    nproc: int | None,
    resume: bool,
    command: str,
    summary: Path | None,
    only_plan: bool,
    job: JobRank | None,
    held: ExitStack,
    resize: OnRanks | None,
) -> bool:
    """The body of `start`; `held` keeps the locks of the run's directories until it returns."""
    # Asking for GPUs in the usual way would spoil CUDA for forked ranks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    torch.set_num_threads(1)
    is_first, asked_to_resume = not is_rank() or os.environ["RANK"] == "0", resume
    if is_rank():
        config, resume = as_started(config, resume=resume)
    if not (only_plan or is_rank()) and (why := why_no_ranks(on_gpu=_uses_cuda(config))):
        anew = partial(start, config, nproc=nproc, resume=resume, command=command, summary=summary, resize=resize)
        return call_fresh(anew, why=why)
    waits_s = config.train.timeout_s + BACKSTOP_S
    if job is not None:
        told = rank_settings(config.model_dump(mode="json"), resume=resume, num_ranks=job.num_ranks)
        job.compare(told, round_number=0, timeout_s=waits_s)
    written = directories_of(config)
    if is_first and not only_plan:
        check_not_in_use(written)
    seen_with = contents(written)
    if is_first:
        tell_phase("checking the model, the text and the room for checkpoints")
    again = resume and not asked_to_resume  # a rank of a job that has begun the run
    run = check_run(config, nproc=nproc, resume=resume, may_be_over=again, command=command, only_plan=only_plan)
    if not (only_plan or is_rank()):
        check_semaphores(run.num_ranks)
    console = Console(soft_wrap=True)
    if is_first:
        tell_phase()
        _introduce(run, console)
    if only_plan:
        found = dry_run(run)
        if is_first:
            show_dry_run(found, console=console)
            if summary is not None:
                summary.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        return bool(found["fits"])
    if is_first:
        held.enter_context(lock_directories(written, seen_with=seen_with))
        if asked_to_resume:
            keep_earlier_metrics(run, tell=_tell)
    corpus = prepare_sources(run.source)
    evals = [prepare_corpus(text).fingerprint for _, text in run.evals]
    check_same_corpus(run, corpus)
    check_same_reference(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    work = partial(train, corpus=corpus, summary=summary)
    if job is not None:
        findings = rank_findings(run, corpus=" ".join([corpus, *evals]))
        job.compare(findings, round_number=1, timeout_s=waits_s)
        work = partial(work, store=job.store)
    if is_rank():
        if not run_as_rank(partial(work, run=run), traceback_dir=run.out, timeout_s=config.train.timeout_s):
            raise StoppedEarly("this rank was asked to stop", exit_code=STOPPED_EARLY)
        return True

    def launch_once(run: CheckedRun) -> int:
        tell_phase("starting ranks")
        load_step_code(strategy.kind for strategy in run.strategies)
        backend = "cpu:gloo,cuda:nccl" if _uses_cuda(config) else "gloo"
        timeout_s = config.train.timeout_s
        try:
            return launch(
                partial(work, run=run),
                num_ranks=run.num_ranks,
                backend=backend,
                timeout_s=timeout_s,
                traceback_dir=run.out,
            )
        finally:
            console.show_cursor()  # a rank that was killed could not

    number = launch_again(run, launch=launch_once, resize=resize, tell=_tell)
    if number:
        raise StoppedEarly(f"the run was asked to stop by {signal.Signals(number).name}", exit_code=128 + number)
    return True


def check_same_corpus(run: CheckedRun, corpus: str) -> None:
    """A resumed run reads the text that it was begun with."""
    if run.resume is None:
        return
    begun_with = run.resume.manifest.data.get("corpus", corpus)
    if begun_with != corpus:
        names = [part.name for part in run.source.parts]
        text = f"data.sources {', '.join(map(repr, names))}" if names else f"data.source = {run.config.data.source!r}"
        raise ConfigError(
            f"--resume: {text} is not the text that {run.resume.checkpoint} was "
            f"trained on ({corpus} now, {begun_with} then). Write the source that the run was begun with"
        )


def keep_earlier_metrics(run: CheckedRun, *, tell: Callable[[str], None]) -> None:
    """A run that was asked to go on, and has no checkpoint, begins anew: earlier metrics stay beside.

    A run may be killed before its first checkpoint, and whoever starts it again by the same command wants it to begin.
    """
    if run.resume is None and (kept := set_aside(run.out)) is not None:
        tell(
            f"--resume: {checkpoints_of(run.saves_in)} has no checkpoint to go on from, so the run begins anew; the "
            f"metrics that were in {run.out} are in {kept.name} now"
        )


def train(
    board: StatusBoard, *, run: CheckedRun, corpus: str, summary: Path | None, store: dist.Store | None = None
) -> bool:
    """Runs one rank's training. Returns whether it came to the last step."""
    share = Share(
        run.spec,
        run.strategies,
        run.sizes,
        rank=int(os.environ.get("RANK", "0")),
        num_layers=getattr(run.model_config.get_text_config(), "num_hidden_layers", 0),
        copies_to_save=run.config.train.async_save,
        dtype_of_passes=dtype_of_passes(run.config.train.precision),
        device=device_type(run.config.train.device),
        peaks=CountedRun(run).peaks,
    )
    with explained_out_of_memory(share) as running:
        return _train(board, run=run, corpus=corpus, summary=summary, running=running, store=store)


def _train(
    board: StatusBoard,
    *,
    run: CheckedRun,
    corpus: str,
    summary: Path | None,
    running: Running,
    store: dist.Store | None,
) -> bool:
    config = run.config
    board.doing(RankPhase.BUILDING)
    is_first = os.environ.get("RANK", "0") == "0"
    before = None if _uses_cuda(config) else forget_peak()
    if is_first:
        tell_phase("building the model")
    running.state = state = build(run, store=store)
    model = state.model
    board.name_units(model.write_status_to(board.position, blocks=not config.train.compile))
    state.data = {**data_position(config, sizes=run.sizes, source=run.source), "corpus": corpus}
    if config.train.compile:
        board.will_compile()
    seed = config.train.seed
    windows, held_out, by_source = open_windows(run.source, seed=seed)
    evals = {**by_source, **{name: all_windows(text, seed=seed) for name, text in run.evals}}
    if config.data.kind == "preferences":
        state.data[REFERENCE] = reference_digest(config)
        again = partial(take_first_values, model, config) if run.resume is not None else lambda: None
        measured = [held_out, *evals.values()]
        prepare_reference(model, run, train=windows, measured=measured, take_first_values=again)
    if run.resume is not None:
        board.doing(RankPhase.LOADING)
        if is_first:
            tell_phase(f"loading {run.resume.checkpoint}")
        load_newest(run.resume.checkpoint, state)
        if isinstance(windows, StreamWindows | MixedStreams):
            windows.seek(state.data[STREAM])
    if is_first:
        tell_phase()
    with _listeners(run, state) as (listeners, events, phase):
        begun_s = time.monotonic()
        end = run_loop(
            state,
            config=config,
            sizes=run.sizes,
            windows=windows,
            held_out=held_out,
            saves_in=run.saves_in,
            listeners=listeners,
            board=board,
            evals=evals,
            phase=phase,
        )
        planned = None
        if not end.stopped and any_rank(time.monotonic() - begun_s >= LEAST_S, mesh=model.mesh):
            board.doing(RankPhase.COUNTING)
            phase("counting what a step takes")
            planned = planned_peaks(run, model, peaks=end.peak_bytes, before=before)
        if events is not None:
            events.ended(memory=asdict(end.tensors), peaks=end.peak_bytes, planned=asdict(planned) if planned else None)
    text = ""
    if config.sample.length and not end.stopped:
        board.doing(RankPhase.SAMPLING)
        text = write_sample(
            model,
            tokens=run.source.tokens,
            settings=config.sample,
            sequence_length=config.data.sequence_length,
            seed=config.train.seed,
        )
    board.doing(RankPhase.REPORTING)
    numbers = summarise(run, state, end=end, sample=text)
    numbers["planned"] = asdict(planned) if planned else None
    numbers["sources"] = _shares(run, state, windows)
    if state.rank == 0:
        _print_summary(run, numbers, end=end, planned=planned)
        if summary is not None:
            summary.write_text(json.dumps(numbers, indent=2) + "\n", "utf-8")
    model.close()
    return not end.stopped


def build(run: CheckedRun, *, store: dist.Store | None = None) -> TrainState:
    """Builds model and optimizer; every rank makes, or reads, only its own shards. All ranks.

    Args:
        run: the checked run.
        store: through which the ranks have found each other; if None, and they are in no group yet, they do now.
    """
    config = run.config
    device = pick_device(config.train.device)
    timeout_s = config.train.timeout_s + BACKSTOP_S
    join_process_group(device=device, timeout_s=timeout_s, store=store)  # if the launcher has not
    with on_meta():
        module = make_module(run.model_config, lora=config.lora)
    model = parallelize(
        module,
        run.strategies,
        device=device,
        compile=config.train.compile,
        loss=PreferenceLoss(config.dpo.beta) if config.data.kind == "preferences" else None,
        **precision_arguments(config.train.precision),
    )
    if run.resume is None:  # else its checkpoint has all of them
        take_first_values(model, config)
    model.module.train()
    state = TrainState(
        model=model,
        optimizer=make_optimizer(model, settings=config.optimizer),
        seed=config.train.seed,
        schedule=schedule_numbers(config.optimizer, steps=config.train.steps),
        run=config.model_dump(mode="json"),
        auxiliary_files=_auxiliary_files(config),
    )
    derive_rng(seed=config.train.seed, step=0, rank=state.rank)
    return state


def take_first_values(model: ParallelModel, config: RunConfig) -> None:
    """Gives the model the values that a run begins with. All ranks."""
    if config.model.init == "random":
        model.materialize(seed=config.train.seed)
    else:
        model.materialize(seed=config.train.seed, only=ADAPTERS).load(config.model.init)


def summarise(run: CheckedRun, state: TrainState, *, end: LoopEnd, sample: str) -> dict[str, Any]:
    """The numbers of the last lines. All ranks; memory is that of the rank that has the most."""
    model = state.model
    return {
        "model": model.spec.name,
        "num_parameters": model.spec.num_parameters,
        "num_trained_parameters": model.spec.num_trained_parameters,
        "parallel": format_parallel(run.strategies),
        "nproc": run.num_ranks,
        "step": state.step,
        "steps": run.config.train.steps,
        "stopped": end.stopped,
        "tokens": state.tokens,
        "held_out_bits_per_byte": end.held_out.bits_per_byte if end.held_out else None,
        "held_out_loss": end.held_out.loss if end.held_out else None,
        "held_out_rewards": asdict(end.held_out.rewards) if end.held_out and end.held_out.rewards else None,
        "evals": {name: asdict(found) for name, found in end.evals.items()},
        "ended_early": end.ended_early,
        "resident_bytes_per_rank": int(all_reduce_max(float(end.tensors.total), mesh=model.mesh)),
        # weights, their copies, and of weights that are trained gradients and AdamW's two moments
        "resident_bytes_one_process": model.spec.num_bytes + model.spec.copies_bytes + 3 * model.spec.trained_bytes,
        "peak_bytes_per_rank": max(end.peak_bytes),
        "checkpoint": str(end.checkpoint),
        "out": str(run.out),
        "sample": sample,
    }


def _shares(run: CheckedRun, state: TrainState, windows: TokenWindows) -> dict[str, Any]:
    """Shares of a mixture's sources in what was read so far, by name; nothing of a single source."""
    if not isinstance(windows, MixedWindows):
        return {}
    read = (state.step + read_ahead(state)) * run.sizes.global_batch
    found = windows.shares(read, names=[part.name for part in run.source.parts])
    return {share.name: asdict(share) for share in found}


# ---------------------------------------------------------------- what a person sees


def _tell(text: str) -> None:
    print(f"rotorch: {text}", file=sys.stderr, flush=True)


def _introduce(run: CheckedRun, console: Console) -> None:
    sizes, spec = run.sizes, run.spec
    batch = (
        f"{sizes.global_batch} x {run.config.data.sequence_length} tokens a step "
        f"(micro batch {sizes.micro_batch} x accumulation {sizes.accumulation} x {sizes.batch_ranks} batch ranks)"
    )
    trained = f", {format_count(spec.num_trained_parameters)} of them trained" if run.config.lora is not None else ""
    lines = [
        f"model   {spec.name}, {format_count(spec.num_parameters)} parameters{trained}",
        f"ranks   {run.num_ranks}, {format_parallel(run.strategies)}",
        f"batch   {batch}",
        *(f"data    {line}" for line in _texts(run)),
        f"out     {run.out}",
    ]
    if run.saves_in != run.out:
        lines.append(f"saves   {run.saves_in}")
    if run.resume is not None:
        lines.append(f"resume  step {run.resume.manifest.step}, from {run.resume.checkpoint}")
        before, now = run.resume.manifest.precision, run.config.train.precision
        if before is not None and before != now:
            lines.append(f"resume  passes compute in {now} from here on; before it was {before}")
    for source in run.source.each:
        if source.stream is None and not source.path.exists():
            lines.append(f"tokens  reading {source.corpus.source} once, into {source.path}")
    for line in lines:
        console.print(Text(line))


def _texts(run: CheckedRun) -> list[str]:
    """A line for each source: its share, if there are several, its place and its size."""
    total = sum(part.weight for part in run.source.parts)
    heads = [f"{part.name} {part.weight / total:.1%}: " for part in run.source.parts] or [""]
    texts = [
        f"{head}{source.corpus.source}, {format_bytes(source.corpus.text_bytes)} of text"
        for head, source in zip(heads, run.source.each, strict=True)
    ]
    return [*texts[:-1], f"{texts[-1]}{_samples(run)}"]


def _samples(run: CheckedRun) -> str:
    """Words on samples that a user would not expect."""
    if run.config.data.stream:
        buffer = run.config.data.shuffle_buffer
        order = f"shuffled within {buffer} samples" if buffer > 1 else "in its own order"
        return f"; read as it is needed, {order}" + ("; documents apart" if run.source.documents != "joined" else "")
    if run.source.documents != "joined":
        return "; documents of a sample are kept apart"
    chosen = run.config.data.kind == "instructions" and run.config.data.pack is None
    return "; one record a sample: several would not be kept apart" if chosen else ""


def _print_summary(run: CheckedRun, numbers: dict[str, Any], *, end: LoopEnd, planned: PlannedPeaks | None) -> None:
    lines = []
    if numbers["sample"]:
        lines += ["sample", *(f"  {line}" for line in numbers["sample"].splitlines()), ""]
    if numbers["stopped"]:
        lines.append(f"stopped     after step {numbers['step']} of {numbers['steps']}")
    if numbers["ended_early"]:
        lines.append(f"ended       after step {numbers['step']} of {numbers['steps']}: {numbers['ended_early']}")
    if end.held_out is not None:
        lines.append(f"held-out    {end.held_out}")
    for name, share in numbers["sources"].items():
        lines.append(f"{name:<11} {share['samples']} samples, {share['epochs']:.3g} times its text")
    for name, found in end.evals.items():
        lines.append(f"{name:<11} {found}")
    memory = (
        f"{format_bytes(numbers['resident_bytes_per_rank'])} of weights, gradients and optimizer state per rank; "
        f"one process would need {format_bytes(numbers['resident_bytes_one_process'])}"
    )
    if numbers["peak_bytes_per_rank"]:
        what = "GPU" if _uses_cuda(run.config) else "process"
        memory += f" (peak of its whole {what}: {format_bytes(numbers['peak_bytes_per_rank'])})"
    lines += [f"memory      {memory}", *([f"planned     {planned}"] if planned is not None else [])]
    lines.append(f"checkpoint  {numbers['checkpoint']}")
    if numbers["stopped"] and run.command:
        lines.append(f"go on with  {run.command}")
    console = Console(soft_wrap=True)
    for line in lines:
        console.print(Text(line))


@contextmanager
def _listeners(
    run: CheckedRun, state: TrainState
) -> Iterator[tuple[Sequence[Listener], EventsFile | None, Callable[[str], None]]]:
    """Rank 0: marks the directory as this run's, and opens the files and the display. Other ranks: nothing."""
    if state.rank != 0:
        yield (), None, lambda text: None
        return
    make_directory(run.out)
    about: dict[str, Any] = {
        "command": run.command,
        "job": job_id(),
        "parallel": format_parallel(run.strategies),
        "config": run.config.model_dump(mode="json"),
        "model_config": model_config(state.model.module),
        "num_decayed_parameters": num_decayed_parameters(state.model.module, run.spec.weights),
    }
    text = json.dumps(about, indent=2) + "\n"
    (run.out / RUN_FILE).write_text(text, "utf-8")
    with ExitStack() as stack:
        listeners: list[Listener] = [MetricsFile(run.out, after_step=state.step, beside={RUN_FILE: text})]
        stack.callback(listeners[0].close)
        events = EventsFile(
            run.out,
            after_step=state.step,
            text=f"{run.num_ranks} ranks, {format_parallel(run.strategies)}",
            versions=package_versions(),
            predicted=_predicted_at_rest(run),
        )
        listeners.append(events)
        stack.callback(events.close)
        if run.config.train.tensorboard:
            listeners.append(TensorBoard(run.out, after_step=state.step))
            stack.callback(listeners[-1].close)
        about_run = RunInfo(run.out, about["config"], after_step=state.step)
        for listener in make_listeners(run.config.train, about_run):
            listeners.append(listener)
            stack.callback(listener.close)
        display = make_display(Console(), first_step=state.step + 1, steps=run.config.train.steps)
        stack.callback(display.close)
        yield (*listeners, display), events, display.phase


def _predicted_at_rest(run: CheckedRun) -> list[dict[str, int]]:
    """Bytes of tensors at rest by category and rank, from the layout's formulas; only AdamW's state has one."""
    known = ("weights", "gradients", *(("optimizer",) if run.config.optimizer.name == "adamw" else ()))
    ranks = range(min(run.num_ranks, MOST_PREDICTED))
    ledgers = [predict(run.spec, strategies=run.strategies_in_passes, rank=rank).ledger for rank in ranks]
    return [{category: ledger[category] or 0 for category in known} for ledger in ledgers]


def _auxiliary_files(config: RunConfig) -> dict[str, Path]:
    tokenizer = None if config.data.tokenizer == BYTES else Path(config.data.tokenizer)
    published = config.model.config if isinstance(config.model.config, str) else config.model.init
    starts_there = config.model.init != "random" and Path(published).is_dir()
    return auxiliary_files(tokenizer=tokenizer, pretrained=Path(published) if starts_there else None)


def _uses_cuda(config: RunConfig) -> bool:
    return config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available())

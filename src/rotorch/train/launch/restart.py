"""Restart of a run after a rank failed: from its last checkpoint, on fewer ranks if allowed (`train.max_restarts`).

[Note: who starts again]
    - `rotorch train` with ranks of its own: the launcher does, at most `train.max_restarts` times. The same number
      of ranks is tried first. A run that fails again before a new checkpoint takes the next smaller number that
      `train.elastic` allows, if there is one. A run whose layout was planned is planned again for these ranks.
    - torchrun: it restarts the ranks, on the nodes that are left. A rank that finds the directory of a run that its own
      job (`--rdzv-id`, or ROTORCH_JOB_ID under other launchers) began resumes this run without `--resume`, and with
      `train.elastic` chooses the layout for the present number of ranks. torchrun's number of restarts is of no use:
      each node counts for itself.

    A run whose last checkpoint is its end (the last step, or that of its patience) trains no more: it measures the
    model once more, and does what comes after.

    The global batch stays the same: fewer ranks take more micro-batches each. So the losses equal those of an
    undisturbed run.

[Note: what comes back]
    Ranks often fail because a disk or a store does not answer, and then the launcher cannot look for the
    last checkpoint either. It retries for a minute, at growing intervals. A run that fails repeatedly without a new
    checkpoint gets the same pauses between its starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from rotorch.core.errors import ConfigError, FinalFailure, RankFailure
from rotorch.run_config import RunConfig, batch_sizes
from rotorch.strategies import batch_ranks, format_parallel, num_ranks, parse_parallel
from rotorch.strategies.resize import resized
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checks.preflight import CheckedRun, begun_by, check_run, holds_run

JOB_ID = "ROTORCH_JOB_ID"
"""A job's name where something other than torchrun starts the ranks, and starts them again (Slurm, Ray)."""

ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
"""torchrun's name for a job; the same in all its restarts. A job without one is called "none"."""

OnRanks = Callable[..., RunConfig]
"""Returns a run on another number of ranks, with the same global batch: `on_ranks`, or a planner's choice."""

Found = TypeVar("Found")
_WAITS_S = (1, 2, 4, 8, 16, 32)


def launch_again(
    run: CheckedRun,
    *,
    launch: Callable[[CheckedRun], int],
    resize: OnRanks | None = None,
    tell: Callable[[str], None] = lambda text: None,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Launches a run until it is done, or has failed once more than `train.max_restarts` allows.

    Args:
        run: the run to begin with.
        launch: starts its ranks and returns when they are done; the number of a signal if that has stopped them, or 0.
        resize: called as `resize(config, num_ranks=...)` for a run on fewer ranks; None: `on_ranks`.
        tell: is told why and how the run goes on.
        wait: lets so many seconds pass.

    Returns:
        What the last launch returned.

    Raises:
        RankFailure: the last failure. A FinalFailure is one at once: what would come again, or came after Ctrl-C.
        ConfigError, OSError: the first launch raised it.
    """
    allowed, restarts, in_vain, begun_at = run.config.train.max_restarts, 0, 0, latest(run.saves_in)
    while True:
        try:
            return launch(run)
        except FinalFailure:
            raise
        except (RankFailure, ConfigError, OSError) as error:
            if not restarts and not isinstance(error, RankFailure):
                raise
            # What was right when the run began is what has happened to it, not what somebody wrote.
            failure = error if isinstance(error, RankFailure) else RankFailure(_said(error))
        if not allowed:
            raise failure
        if restarts == allowed:
            raise RankFailure(f"{failure}. That was after {restarts} restarts (train.max_restarts)")
        restarts += 1
        newest = _patiently(partial(latest, run.saves_in), failure=failure, tell=tell, wait=wait)
        in_vain = in_vain + 1 if newest == begun_at else 0
        begun_at = newest
        if in_vain > 1:
            wait(_WAITS_S[min(in_vain - 2, len(_WAITS_S) - 1)])
        look = partial(_next, run, fewer=in_vain > 1, resize=resize or on_ranks)
        run = _patiently(look, failure=failure, tell=tell, wait=wait)
        tell(f"{failure}. {_how(run)} (restart {restarts} of {allowed})")


def _patiently(
    look: Callable[[], Found], *, failure: RankFailure, tell: Callable[[str], None], wait: Callable[[float], None]
) -> Found:
    """Retries `look` until the disk or the store that it looks at answers (see [Note: what comes back]).

    Raises:
        RankFailure: it does not; the failure, and why nothing goes on after it.
    """
    for attempt, pause_s in enumerate((*_WAITS_S, None)):
        try:
            return look()
        except (OSError, ConfigError) as error:
            may_pass = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            if pause_s is None or not may_pass:
                raise RankFailure(f"{failure}. It cannot be started again: {_said(error)}") from None
            if not attempt:
                tell(f"{_said(error)}. Waiting for that to pass, for {sum(_WAITS_S)} s at most, to go on")
            wait(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _next(run: CheckedRun, *, fewer: bool, resize: OnRanks) -> CheckedRun:
    """The run as it is begun again, on fewer ranks if that is asked for and possible.

    Raises:
        ConfigError: its directory is not what it was.
    """
    if fewer and run.config.train.elastic is not None:
        least, _ = run.config.train.elastic_ranks
        for size in range(run.num_ranks - 1, least - 1, -1):
            try:
                return _on(run, resize(run.config, num_ranks=size))
            except ConfigError as error:
                if isinstance(error.__cause__, OSError):
                    raise
    return _on(run, on_ranks(run.config, num_ranks=run.num_ranks))


def _on(run: CheckedRun, config: RunConfig) -> CheckedRun:
    resume = holds_run(run.out) or latest(run.saves_in) is not None
    return check_run(config, resume=resume, may_be_over=True, command=run.command)


def _said(error: ConfigError | OSError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")


def _how(run: CheckedRun) -> str:
    where = "from the beginning" if run.resume is None else f"from step {run.resume.manifest.step}"
    return f"Going on {where} with {format_parallel(run.strategies)}"


def on_ranks(config: RunConfig, *, num_ranks: int) -> RunConfig:
    """Returns the run on another number of ranks, with the same global batch.

    Raises:
        ConfigError: there is no such layout, or the global batch does not divide.
    """
    strategies = parse_parallel(config.parallel.layout)
    sizes = batch_sizes(config.train, batch_ranks=batch_ranks(strategies))
    other = resized(strategies, num_ranks=num_ranks)
    if other is None:
        raise ConfigError(
            f"train.elastic = {config.train.elastic!r}: there is no layout like {config.parallel.layout!r} on "
            f"{num_ranks} ranks. Write a layout that there is one of"
        )
    train = config.train.model_copy(update={"global_batch": sizes.global_batch, "accumulation": None})
    batch_sizes(train, batch_ranks=batch_ranks(other))
    layout = config.parallel.model_copy(update={"layout": format_parallel(other)})
    return config.model_copy(update={"train": train, "parallel": layout})


def job_id() -> str | None:
    """Name of the job that this process belongs to, the same in all its restarts; None if its launcher gives none."""
    job = os.environ.get(JOB_ID) or os.environ.get(ELASTIC_RUN)
    return None if job == "none" else job


def as_started(config: RunConfig, *, resume: bool) -> tuple[RunConfig, bool]:
    """Settings of a rank that something else started, perhaps not for the first time: the run, and True if it resumes.

    Raises:
        ConfigError: `train.elastic` has no layout for the ranks that there are.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if config.train.elastic is not None and world_size != num_ranks(parse_parallel(config.parallel.layout)):
        least, most = config.train.elastic_ranks
        if not least <= world_size <= most:
            raise ConfigError(f"train.elastic = {config.train.elastic!r}, but there are {world_size} ranks")
        config = on_ranks(config, num_ranks=world_size)
    job = job_id()
    return config, resume or (job is not None and begun_by(Path(config.train.out)) == job)

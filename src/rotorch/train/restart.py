"""A run one of whose ranks failed goes on from its last checkpoint, on fewer ranks if it may (`train.max_restarts`).

[Note: who starts again]
    - `rotorch train` with ranks of its own: the launcher does, as often as `train.max_restarts` says. The same number
      of ranks is tried first. A run that fails again without having got as far as a new checkpoint takes the next
      smaller number that `train.elastic` allows, if it names any.
    - torchrun: it starts the ranks anew, as many as there are nodes left. A rank that finds the directory of the very
      run that its own job (`--rdzv-id`) began goes on with it without being asked to, and with `train.elastic` chooses
      the layout for the ranks that there are. How often they were started says nothing: each node counts for itself.

    The global batch stays what it was: fewer ranks take more micro-batches each. So the losses are those of a run that
    nothing happened to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rotorch.core.errors import ConfigError, FinalFailure, RankFailure
from rotorch.run_config import RunConfig, batch_sizes
from rotorch.strategies import batch_ranks, format_parallel, num_ranks, parse_parallel
from rotorch.strategies.resize import resized
from rotorch.train.directories import latest
from rotorch.train.preflight import CheckedRun, begun_by, check_run, holds_run

ELASTIC_RUN = "TORCHELASTIC_RUN_ID"
"""torchrun's name for a job; the same in all its restarts. A job without one is called "none"."""


def launch_again(
    run: CheckedRun, *, launch: Callable[[CheckedRun], None], tell: Callable[[str], None] = lambda text: None
) -> None:
    """Launches a run until it is done, or has failed once more than `train.max_restarts` allows.

    Args:
        run: what to begin with.
        launch: starts its ranks and returns when they are done.
        tell: is told why and how the run goes on.

    Raises:
        RankFailure: the last failure. A FinalFailure is one at once: what would come again, or came after Ctrl-C.
    """
    allowed, restarts, in_vain = run.config.train.max_restarts, 0, 0
    while True:
        begun_at = latest(run.saves_in)
        try:
            return launch(run)
        except FinalFailure:
            raise
        except RankFailure as failure:
            if not allowed:
                raise
            if restarts == allowed:
                raise RankFailure(f"{failure}. That was after {restarts} restarts (train.max_restarts)") from None
            restarts += 1
            in_vain = in_vain + 1 if latest(run.saves_in) == begun_at else 0
            run = _next(run, failure=failure, fewer=in_vain > 1)
            tell(f"{failure}. {_how(run)} (restart {restarts} of {allowed})")


def _next(run: CheckedRun, *, failure: RankFailure, fewer: bool) -> CheckedRun:
    """The run as it is begun again, on fewer ranks if that is asked for and possible."""
    sizes = [run.num_ranks]
    if fewer and run.config.train.elastic is not None:
        least, _ = run.config.train.elastic_ranks
        sizes = [*range(run.num_ranks - 1, least - 1, -1), run.num_ranks]
    for size in sizes:
        with suppress(ConfigError):
            config = on_ranks(run.config, num_ranks=size)
            return check_run(config, resume=holds_run(run.out) or latest(run.saves_in) is not None, command=run.command)
    raise failure  # nothing is left to do for it, or its directory is not what it was


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


def as_started(config: RunConfig, *, resume: bool) -> tuple[RunConfig, bool]:
    """What a rank does that torchrun started, perhaps not for the first time: the run, and whether it goes on.

    Raises:
        ConfigError: `train.elastic` has no layout for the ranks that there are.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if config.train.elastic is not None and world_size != num_ranks(parse_parallel(config.parallel.layout)):
        least, most = config.train.elastic_ranks
        if not least <= world_size <= most:
            raise ConfigError(f"train.elastic = {config.train.elastic!r}, but there are {world_size} ranks")
        config = on_ranks(config, num_ranks=world_size)
    job = os.environ.get(ELASTIC_RUN, "none")
    return config, resume or (job != "none" and begun_by(Path(config.train.out)) == job)

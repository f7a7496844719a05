"""The optimizer's state in a directory of its own, as checkpoints of other trainers have it: for any layout to load.

The format is that of the checkpoints of `rotorch train`, without the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rotorch.comm.one_error import one_error
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.parallel_model import ParallelModel
from rotorch.strategies import format_parallel
from rotorch.train.checkpoint.manifest import Manifest, check_contents, read_manifest
from rotorch.train.checkpoint.storage import (
    CheckpointReader,
    CheckpointWriter,
    ChunksLoadPlanner,
    ChunksSavePlanner,
    without_dcp_notices,
)
from rotorch.train.state import (
    TrainState,
    attach_optimizer_state,
    empty_optimizer_state,
    loading_tensors,
    model_entry,
    names_to_save,
    optimizer_entry,
    optimizer_tensors,
    restore_groups,
)


def save_optimizer(directory: Path, *, model: ParallelModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes the optimizer's state to `directory`, whole or not at all. All ranks; each writes its parts.

    Raises:
        ConfigError: state that cannot be cut like its weight.
        RankFailure: a rank could not write; the same on all ranks.
    """
    state = TrainState(model=model, optimizer=optimizer, step=step)
    with one_error(model.mesh):
        manifest = Manifest(
            step=step,
            tokens=0,
            seed=0,
            parallel=format_parallel(model.strategies),
            num_ranks=state.num_ranks,
            versions={"torch": torch.__version__},
            model=model_entry(model),
            optimizer=optimizer_entry(state),
            schedule={},
            data={},
            run={},
        )
        tensors = optimizer_tensors(state, names=names_to_save(model))
    writer = CheckpointWriter(directory, manifest=manifest, copies={})
    try:
        with _as_ours(f"saving {directory}"), without_dcp_notices(), ChunksSavePlanner() as planner:
            dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=state.num_ranks == 1)
    finally:
        writer.abort()


def load_optimizer(directory: Path, *, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """Reads what `save_optimizer` wrote, under any layout; each rank its parts. All ranks.

    Raises:
        ConfigError: nothing there, or of another optimizer; nothing is changed.
        DamagedCheckpoint: bytes have changed; nothing is changed.
        RankFailure: reading failed later on.
    """
    state = TrainState(model=model, optimizer=optimizer)
    with one_error(model.mesh):
        manifest = read_manifest(directory)
        check_contents(directory, manifest, share=state.rank, num_shares=state.num_ranks)
        entry = manifest.optimizer
        if entry is None or entry.name != type(optimizer).__name__ or len(entry.groups) != len(optimizer.param_groups):
            there = "no optimizer" if entry is None else f"{entry.name} with {len(entry.groups)} groups of parameters"
            raise ConfigError(
                f"checkpoint: {directory}: written with {there}, and this trainer has {type(optimizer).__name__} with "
                f"{len(optimizer.param_groups)}. Use the same optimizer, or begin with model= of the checkpoint"
            )
        optimizer.state.clear()
        made = empty_optimizer_state(state, entry=entry, tensors=manifest.tensors)
        tensors = loading_tensors(state, made, kinds=entry.kinds)
    with _as_ours(f"loading {directory}"), torch.no_grad(), without_dcp_notices():
        reader = CheckpointReader(directory, manifest=manifest)
        dcp.load(tensors, storage_reader=reader, planner=ChunksLoadPlanner(), no_dist=state.num_ranks == 1)
    restore_groups(optimizer, entry)
    attach_optimizer_state(state, made, kinds=entry.kinds)


@contextmanager
def _as_ours(doing: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        first, (cause, _) = min(error.failures.items())
        raise RankFailure(f"checkpoint: {doing}: rank {first}: {type(cause).__name__}: {cause}") from None

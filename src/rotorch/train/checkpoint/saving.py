"""Saving and loading a training run: whole or not at all, and under any layout.

    save(run_dir, state, keep=3)          all ranks; RUN_DIR/checkpoints/step-00000100
    path = latest(run_dir)                the newest whole one
    load(path, state)                     all ranks; any strategies, any number of ranks
    load_newest(path, state)              the same, or the one before if bytes of it have changed

`manifest.py` describes the files on disk, `storage.py` moves the bytes, `state.py` lists the tensors to save.

[Note: checked before changed]
    `load` first reads the manifest, checks every byte against its digests (each rank a part of the files), looks for
    numbers that are not finite, and compares names, shapes and dtypes with the model. All ranks then agree on the
    outcome, and the first weight is overwritten only if no rank has found an error.
"""

from __future__ import annotations

import logging
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_max, all_reduce_min
from rotorch.comm.one_error import one_error
from rotorch.core.errors import ConfigError, HeardFailure, RankFailure, RotorchError, nearest
from rotorch.models.lora import adapter_config, adapter_scale
from rotorch.shard.sharded_weight import ChunkedTensor
from rotorch.strategies import format_parallel
from rotorch.train.checkpoint.auxiliary_files import TOKENIZER_FILES
from rotorch.train.checkpoint.directories import (
    check,
    checkpoints_of,
    latest,
    one_before,
    prune,
    step_name,
    step_of,
)
from rotorch.train.checkpoint.manifest import (
    BUFFER,
    MODEL,
    OBJECT,
    OPTIMIZER,
    DamagedCheckpoint,
    Manifest,
    TensorEntry,
    check_contents,
    read_manifest,
)
from rotorch.train.checkpoint.storage import (
    DTYPE_NAMES,
    CheckpointReader,
    CheckpointWriter,
    ChunksLoadPlanner,
    ChunksSavePlanner,
    without_dcp_notices,
)
from rotorch.train.checkpoint.store import AnyPath, as_path
from rotorch.train.checkpoint.stored_values import StoredValues
from rotorch.train.checks.out_of_memory import is_out_of_memory
from rotorch.train.state import (
    WEIGHT,
    TrainState,
    attach_optimizer_state,
    config_difference,
    derive_rng,
    empty_optimizer_state,
    loading_tensors,
    model_entry,
    model_tensors,
    moved_between_groups,
    names_to_save,
    object_name,
    optimizer_entry,
    optimizer_tensors,
    restore_groups,
    restore_rng,
    rng_name,
    rng_tensor,
)

__all__ = ["check", "latest", "load", "load_newest", "save", "save_as", "take", "write"]

_LOG = logging.getLogger(__name__)


def save(run_dir: AnyPath | str, state: TrainState, *, keep: int) -> AnyPath:
    """Saves a run's state as RUN_DIR/checkpoints/step-NNNNNNNN. All ranks; what several hold is written once.

    When it returns, the checkpoint is on the disk. If it fails or is killed, earlier checkpoints are untouched and
    what it has written is not taken for one. Needs no memory beyond a small buffer.

    Args:
        run_dir: the run's directory, on a file system that all ranks share; or a URL that fsspec knows.
        state: state to save.
        keep: number of checkpoints of the run to keep, this one included; older ones are removed at the end.

    Returns:
        The checkpoint's directory.

    Raises:
        ConfigError: if `keep` is not positive, or the optimizer's state cannot be saved.
        RankFailure: if a rank could not write (disk full, ...); the same text on all ranks (a HeardFailure where
            nothing failed), but one whose memory has run out raises that.
    """
    return write(take(run_dir, state, keep=keep))


def save_as(directory: AnyPath | str, state: TrainState) -> AnyPath:
    """Saves to `directory` itself, which `load` reads: for loops that name and count checkpoints themselves.

    As `save` otherwise; what was there is replaced once all of it is on the disk.
    """
    path = as_path(directory)
    return write(replace(take(path.parent, state, keep=sys.maxsize), path=path))


@dataclass(frozen=True)
class Snapshot:
    """Contents of one checkpoint: `tensors` are those that this rank saves, its own or copies; `names` all weights'."""

    path: AnyPath
    tensors: dict[str, ChunkedTensor | Tensor]
    manifest: Manifest
    copies: dict[str, Path]
    keep: int
    names: frozenset[str]
    damaged: frozenset[int]
    rank: int
    num_ranks: int


def take(run_dir: AnyPath | str, state: TrainState, *, keep: int) -> Snapshot:
    """Collects what `save` writes, copying nothing. All ranks; errors as of `save`."""
    if keep < 1:
        raise ConfigError(f"checkpoint: keep={keep}: write at least 1")
    with agreed(state.model.mesh):
        manifest = _manifest(state)
        tensors = _all_tensors(state)
    copies = {**state.auxiliary_files, **({TOKENIZER_FILES[0]: state.tokenizer_file} if state.tokenizer_file else {})}
    names = frozenset(MODEL + name for name in state.model.weights)
    path = checkpoints_of(run_dir) / step_name(state.step)
    state.damaged.discard(state.step)  # this one takes its place
    return Snapshot(path, tensors, manifest, copies, keep, names, frozenset(state.damaged), state.rank, state.num_ranks)


def write(snapshot: Snapshot, *, group: ProcessGroup | None = None) -> AnyPath:
    """Writes what `take` collected; returns, and raises, as `save` does. All ranks.

    Args:
        snapshot: snapshot to write.
        group: of all ranks, for what they tell each other; by default the run's own.
    """
    path = snapshot.path
    writer = CheckpointWriter(path, manifest=snapshot.manifest, copies=snapshot.copies, names=snapshot.names)
    alone = snapshot.num_ranks == 1
    try:
        in_thread = threading.current_thread() is not threading.main_thread()  # then filters are everybody's affair
        quiet = without_dcp_notices() if alone and not in_thread else nullcontext()
        with quiet, ChunksSavePlanner() as planner:
            dcp.save(
                snapshot.tensors,
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=alone,
            )
    except CheckpointException as error:
        what = f"saving {path}"
        raise _as_ours(error, rank=snapshot.rank, what=what, after="; earlier checkpoints are untouched") from None
    finally:
        writer.abort()
    if snapshot.rank == 0:
        prune(path.parent, keep=snapshot.keep, just_written=path, damaged=snapshot.damaged)
    return path


def load(path: AnyPath | str, state: TrainState, *, random_states: bool = True) -> Manifest:
    """Puts a checkpoint's values into `state`: model, optimizer, counters, data position, random states. All ranks.

    On as many ranks as wrote it, every rank gets its own random states back, and training goes on bit for bit on the
    same layout. (Under `ddp` on three ranks or more to rounding only: torch's DDP regroups its buckets after the first
    step of a process, and sums of three depend on the order.) On another number of ranks random states are derived from
    the checkpoint's seed and step; a log line says so.

    Args:
        path: a checkpoint's directory.
        state: the model, materialised (its values are overwritten), and its optimizer (or None).
        random_states: load or derive them; if not, they stay as they are.

    Returns:
        What the checkpoint says of itself.

    Raises:
        DamagedCheckpoint: if bytes of it are missing or have changed, a disk cannot read them, or weights or moments in
            it are not finite; nothing is changed, unless that began after all of them had been read once.
        ConfigError: if it is foreign, or of another model or optimizer; nothing is changed.
        RankFailure: if reading failed after that; values are then partly overwritten.
    """
    path, mesh = as_path(path), state.model.mesh
    with agreed(mesh):
        manifest = read_manifest(path)
        values = StoredValues(path, manifest, names=_trained_on(manifest, state))
        check_contents(path, manifest, share=state.rank, num_shares=state.num_ranks, look=values.look)
        _check_same_model(path, manifest, state)
        objects = _find_objects(path, manifest, state)
        values.check()
    number = float(int(manifest.digest[:12], 16))
    if all_reduce_max(number, mesh=mesh) != all_reduce_min(number, mesh=mesh):
        raise ConfigError(f"checkpoint: {path}: ranks see different contents. Write a directory that all of them share")

    made: dict[str, dict[str, Any]] = {}
    tensors = model_tensors(state.model)
    if state.optimizer is not None and manifest.optimizer is not None:
        state.optimizer.state.clear()
        made = empty_optimizer_state(state, entry=manifest.optimizer, tensors=manifest.tensors)
        tensors.update(loading_tensors(state, made, kinds=manifest.optimizer.kinds))
    same_num_ranks = manifest.num_ranks == state.num_ranks and rng_name(state.rank) in manifest.tensors
    if random_states and same_num_ranks:
        own = rng_name(state.rank)
        tensors[own] = torch.zeros(manifest.tensors[own].shape, dtype=torch.uint8)
    found = {name: torch.zeros(manifest.tensors[where].shape, dtype=torch.uint8) for name, where in objects.items()}
    tensors.update((objects[name], tensor) for name, tensor in found.items())
    try:
        with torch.no_grad(), without_dcp_notices():
            dcp.load(
                tensors,
                storage_reader=CheckpointReader(path, manifest=manifest),
                planner=ChunksLoadPlanner(),
                no_dist=state.num_ranks == 1,
            )
    except CheckpointException as error:
        raise _as_ours(error, rank=state.rank, what=f"loading {path}") from None
    state.model.values_changed()
    notes = _schedule_changes(saved=dict(manifest.schedule), ours=state.schedule)
    if state.optimizer is not None and manifest.optimizer is not None:
        notes += restore_groups(state.optimizer, manifest.optimizer)
        notes += moved_between_groups(state, manifest.optimizer)
        attach_optimizer_state(state, made, kinds=manifest.optimizer.kinds)
    state.step, state.tokens, state.seed = manifest.step, manifest.tokens, manifest.seed
    state.data, state.objects = dict(manifest.data), found
    if random_states and same_num_ranks:
        rng = tensors[rng_name(state.rank)]
        assert isinstance(rng, Tensor), "made above"
        restore_rng(rng)
    elif random_states:
        derive_rng(seed=manifest.seed, step=manifest.step, rank=state.rank)
        notes.append(
            f"written by {manifest.num_ranks} ranks, read by {state.num_ranks}: random states are derived from "
            f"seed {manifest.seed} and step {manifest.step}"
        )
    for note in notes if state.rank == 0 else ():
        _LOG.warning("checkpoint: %s: %s", path, note)
    return manifest


def load_newest(path: AnyPath, state: TrainState) -> AnyPath:
    """Loads the checkpoint `path` of a run, or the newest one before it that is not damaged. All ranks.

    Returns:
        The directory that was loaded.

    Raises:
        DamagedCheckpoint: if it is damaged and there is none before it.
        ConfigError, RankFailure: as `load` does.
    """
    while True:
        try:
            load(path, state)
        except DamagedCheckpoint as error:
            state.damaged.add(step_of(path))
            before = one_before(path)
            if before is None:
                raise DamagedCheckpoint(f"{error}, and there is none before it. Begin the run anew") from None
            if state.rank == 0:
                _LOG.warning("%s: skipped, going on from %s", error, before)
            path = before
        else:
            return path


# ---------------------------------------------------------------- saving


def _manifest(state: TrainState) -> Manifest:
    try:
        return Manifest(
            step=state.step,
            tokens=state.tokens,
            seed=state.seed,
            parallel=format_parallel(state.model.strategies),
            num_ranks=state.num_ranks,
            versions=package_versions(),
            model=model_entry(state.model),
            optimizer=optimizer_entry(state),
            schedule=state.schedule,
            data=state.data,
            run=state.run,
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"checkpoint: {where}: {first['msg']}, got {first['input']!r}. Give plain JSON values"
        ) from None


def _all_tensors(state: TrainState) -> dict[str, ChunkedTensor | Tensor]:
    names = names_to_save(state.model)
    left_out = state.model.weights.keys() - names
    tensors = {
        **{key: value for key, value in model_tensors(state.model).items() if key.removeprefix(MODEL) not in left_out},
        **optimizer_tensors(state, names=names),
        rng_name(state.rank): rng_tensor(),
        **state.objects,
    }
    for name, tensor in tensors.items():
        dtype = tensor.local.dtype if isinstance(tensor, ChunkedTensor) else tensor.dtype
        if dtype not in DTYPE_NAMES:
            raise ConfigError(f"checkpoint: {name}: {dtype} cannot be saved. Known: {', '.join(map(str, DTYPE_NAMES))}")
    return tensors


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on, by name."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("rotorch", "transformers"):
        with suppress(PackageNotFoundError):  # run from its sources; a plain module needs no transformers
            found[name] = version(name)
    return found


# ---------------------------------------------------------------- checking


def _trained_on(manifest: Manifest, state: TrainState) -> list[str]:
    """Names of the tensors from whose values training goes on."""
    kinds = manifest.optimizer.kinds if state.optimizer is not None and manifest.optimizer is not None else {}
    like_weights = [f"{OPTIMIZER}{key}/" for key, kind in kinds.items() if kind == WEIGHT]
    return [name for prefix in (MODEL, *like_weights) for name in manifest.tensors if name.startswith(prefix)]


def _check_same_model(path: AnyPath, manifest: Manifest, state: TrainState) -> None:
    """Raises `ConfigError` unless the checkpoint is one of this model and this optimizer."""
    where = f"checkpoint: {path}"
    saved = manifest.names(MODEL)
    expected = {weight.name: weight.shape for weight in state.model.spec.weights}
    missing, unknown = expected.keys() - saved.keys(), saved.keys() - expected.keys()
    if missing or unknown:
        raise ConfigError(
            f"{where}: of another model ({manifest.model.name}): "
            + "; ".join(filter(None, [_some("it lacks", missing), _some("the model lacks", unknown)]))
        )
    for name, shape in expected.items():
        if saved[name].shape != tuple(shape):
            raise ConfigError(
                f"{where}: of another model: {name!r} has shape {list(saved[name].shape)} there and {list(shape)} here"
            )
    for name, held in state.model.weights.items():
        _check_dtype(where, name, saved[name], held.local.dtype)
    buffers = {k: t for k, t in model_tensors(state.model).items() if k.startswith(BUFFER) and isinstance(t, Tensor)}
    for name, buffer in buffers.items():
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != tuple(buffer.shape):
            there = "missing" if entry is None else f"of shape {list(entry.shape)}"
            raise ConfigError(f"{where}: of another model: {name!r} is {there} there and {list(buffer.shape)} here")
        _check_dtype(where, name, entry, buffer.dtype)
    if difference := config_difference(model_entry(state.model).config, manifest.model.config):
        raise ConfigError(f"{where}: of another model: {difference}")
    ours, theirs = adapter_config(state.model.module), manifest.model.adapters
    if ours is not None and theirs is not None and adapter_scale(ours) != adapter_scale(theirs):
        raise ConfigError(
            f"{where}: its adapters are scaled by {adapter_scale(theirs):g} (alpha / rank), this model's by "
            f"{adapter_scale(ours):g}. Write alpha={theirs['lora_alpha']}"
        )
    _check_same_optimizer(where, manifest, state)


def _check_dtype(where: str, name: str, entry: TensorEntry, dtype: torch.dtype) -> None:
    if entry.dtype != DTYPE_NAMES.get(dtype):
        raise ConfigError(f"{where}: {name!r} has dtype {entry.dtype} there and {DTYPE_NAMES.get(dtype, dtype)} here")


def _check_same_optimizer(where: str, manifest: Manifest, state: TrainState) -> None:
    if state.optimizer is None:
        return
    entry, name = manifest.optimizer, type(state.optimizer).__name__
    if entry is None:
        raise ConfigError(f"{where}: holds no optimizer state, and this run goes on with {name}")
    if entry.name != name:
        raise ConfigError(f"{where}: written by a run with {entry.name}, and this run has {name}")
    if len(entry.groups) != len(state.optimizer.param_groups):
        raise ConfigError(
            f"{where}: its optimizer has {len(entry.groups)} parameter groups, "
            f"this one {len(state.optimizer.param_groups)}"
        )
    for held in state.model.weights.values():
        for key, kind in entry.kinds.items():
            saved = manifest.tensors.get(f"{OPTIMIZER}{key}/{held.name}")
            if saved is not None and kind == WEIGHT and saved.shape != tuple(held.weight.shape):
                raise ConfigError(
                    f"{where}: optimizer state {key!r} of {held.name!r} has shape {list(saved.shape)}, "
                    f"the weight {list(held.weight.shape)}"
                )


def _find_objects(path: AnyPath, manifest: Manifest, state: TrainState) -> dict[str, str]:
    """Under which name the checkpoint has the state of each object that is wanted."""
    saved, found = manifest.names(OBJECT), {}
    for name in state.wanted:
        shares = sorted(each for each in saved if each.startswith(f"{name}/"))
        if not shares:
            there = sorted({each.partition("/")[0] for each in saved})
            raise ConfigError(
                f"checkpoint: {path}: has no state of {name!r}{nearest(name, known=there)}. It has "
                f"{', '.join(there) or 'no objects beside model and optimizer'}"
            )
        own = object_name(name, share=state.model.batch_rank)
        if shares == [f"{name}/all"]:
            own = object_name(name)
        elif len(shares) != state.model.num_batch_ranks:
            raise ConfigError(
                f"checkpoint: {path}: the state of {name!r} is that of {len(shares)} shares of the data, and here are "
                f"{state.model.num_batch_ranks}. Load without {name}, and place it by the step"
            )
        found[name] = own
    return found


def _some(what: str, names: set[str]) -> str | None:
    if not names:
        return None
    shown = ", ".join(repr(name) for name in sorted(names)[:3])
    return f"{what} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _schedule_changes(*, saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    return [
        f"schedule: {key} was {saved[key]!r} and is {ours[key]!r} from here on"
        for key in sorted(saved.keys() & ours.keys())
        if saved[key] != ours[key]
    ]


# ---------------------------------------------------------------- one error for all ranks


@contextmanager
def agreed(mesh: DeviceMesh) -> Iterator[None]:
    """Raises an error of any rank as the same error on every rank (that of the first such rank). All ranks."""
    with one_error(mesh, kinds=(DamagedCheckpoint, ConfigError, RankFailure)):
        try:
            yield
        except RotorchError:
            raise
        except OSError as caught:
            raise RankFailure(f"checkpoint: {caught.filename or ''}: {caught.strerror or caught}") from caught
        except Exception as caught:
            raise RankFailure(f"checkpoint: {type(caught).__name__}: {caught}") from caught


def _as_ours(error: CheckpointException, *, rank: int, what: str, after: str = "") -> BaseException:
    """Returns the exception that this rank raises for the failures that `torch.distributed.checkpoint` collected.

    In one text on all ranks, but on a rank whose memory has run out: what is alive there is told by who trains. Ranks
    on which nothing failed have only heard of it, and nobody takes them for the first that failed.
    """
    own, _ = error.failures.get(rank, (None, None))
    if own is not None and is_out_of_memory(own):
        return own
    first, (cause, _) = min(error.failures.items())
    if isinstance(cause, RotorchError | KeyboardInterrupt):
        return HeardFailure(str(cause)) if own is None and isinstance(cause, RankFailure) else cause
    kind = RankFailure if own is not None else HeardFailure
    if isinstance(cause, OSError):
        where = f"{cause.filename}: " if cause.filename else ""
        return kind(f"checkpoint: {what}: rank {first}: {where}{cause.strerror or cause}{after}")
    return kind(f"checkpoint: {what}: rank {first}: {type(cause).__name__}: {cause}{after}")

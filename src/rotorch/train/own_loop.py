"""`rotorch.save` and `rotorch.load`: checkpoints of a loop of the user's own, as those of `rotorch train` are.

[Note: objects beside the model]
    A loader, a scheduler, anything that has `state_dict` and `load_state_dict` is saved as bytes that torch reads again
    without running code. Where all ranks have the same state it is kept once, and any number of ranks loads it. Else
    (a loader whose ranks read different data) it is kept per share of the data, and loads where as many shares are
    read, whatever the layout.
"""

from __future__ import annotations

import hashlib
import io
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rotorch.comm.agreement import gathered_differences
from rotorch.comm.collectives import gather_objects
from rotorch.comm.roll_call import ModelCall
from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.shard.sharded_weight import weight_of
from rotorch.train.checkpoint.directories import find_checkpoint
from rotorch.train.checkpoint.saving import agreed, load_newest
from rotorch.train.checkpoint.saving import load as load_exactly
from rotorch.train.checkpoint.saving import save as save_run
from rotorch.train.checkpoint.store import AnyPath, as_path
from rotorch.train.state import TrainState, object_name

_ALL = 1 << 40  # checkpoints


class Stateful(Protocol):
    """A loader, a scheduler, an average: what can be saved beside a model."""

    def state_dict(self) -> Any:
        """Its state: tensors, numbers, text, and lists and dicts of these."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes a state."""


def save(
    path: Any,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Stateful | None = None,
    *,
    step: int,
    keep: int | None = None,
    **others: Stateful,
) -> str:
    """Saves a loop's state as PATH/checkpoints/step-NNNNNNNN, whole or not at all. All ranks.

    `rotorch inspect` and `rotorch export` read it, and any layout on any number of ranks loads it.

    Args:
        path: a directory that all ranks share, or a URL that fsspec knows.
        model: what `parallelize` returned.
        optimizer: over its parameters.
        loader: e.g. torchdata's `StatefulDataLoader`.
        step: number of the step, by which the newest is found.
        keep: how many checkpoints to keep, this one included; by default all.
        others: schedulers and the like, by any name: `scheduler=scheduler`.

    Returns:
        The checkpoint's directory.

    Raises:
        ConfigError: something that cannot be saved, or ranks that would save to different places; nothing was written.
        RankFailure: a rank could not write; earlier checkpoints are untouched.
    """
    parallel = _parallel(model, "save")
    parallel.meet_at_rest(ModelCall.SAVE)
    with agreed(parallel.mesh):
        step = _number_of(step)
        _check_parameters(parallel, optimizer)
        encoded = {name: _encoded(name, thing) for name, thing in _named(loader, others).items()}
    _check_same_place(parallel, path=as_path(path), step=step)
    state = TrainState(model=parallel, optimizer=optimizer, step=step, objects=_placed(encoded, parallel))
    return str(save_run(as_path(path), state, keep=_ALL if keep is None else keep))


def load(
    path: Any,
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loader: Stateful | None = None,
    **others: Stateful,
) -> int:
    """Puts a checkpoint's values into a loop's objects, under any layout. All ranks.

    Nothing is changed unless all bytes of it are as they were written and all of it fits.

    Args:
        path: the directory that was given to `save` (then the newest whole checkpoint), or one checkpoint's.
        model: what `parallelize` returned.
        optimizer: of the class that was saved; None leaves its state alone.
        loader: as for `save`.
        others: as for `save`.

    Returns:
        The step that it was saved at.

    Raises:
        ConfigError: no such checkpoint, a damaged one, or one of another model, optimizer or object.
        RankFailure: reading failed after that; values are then partly overwritten.
    """
    parallel, things = _parallel(model, "load"), _named(loader, others)
    parallel.meet_at_rest(ModelCall.LOAD)
    with agreed(parallel.mesh):
        _check_parameters(parallel, optimizer)
        for name, thing in things.items():
            _check_stateful(name, thing)
        place = find_checkpoint(path)
    state = TrainState(model=parallel, optimizer=optimizer, wanted=tuple(things))
    if place == as_path(path):
        load_exactly(place, state)
    else:
        load_newest(place, state)
    with agreed(parallel.mesh):
        for name, thing in things.items():
            with _named_in_errors(name):
                thing.load_state_dict(_decoded(state.objects[name]))
    return state.step


def _parallel(model: Any, what: str) -> ParallelModel:
    found = getattr(model, "parallel", model)
    if not isinstance(found, ParallelModel):
        raise ConfigError(
            f"rotorch.{what}: {type(model).__name__} is not what parallelize returned. Call rotorch.parallelize first"
        )
    return found


def _number_of(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"rotorch.save: step={step!r}: write a whole number, 0 or more")
    return number


def _check_same_place(model: ParallelModel, *, path: AnyPath, step: int) -> None:
    """All ranks save the same step to one directory: that of rank 0 would be taken, without a word."""
    place = str(path.absolute() if isinstance(path, Path) else path)
    by_position = gather_objects({"path": place, "step": step}, mesh=model.mesh)
    ranks = model.mesh.mesh.flatten().tolist() if model.mesh.size() > 1 else [0]
    tables = [table for _, table in sorted(zip(ranks, by_position, strict=True), key=lambda pair: pair[0])]
    instead = "Give all of them the same directory and the same step"
    if said := gathered_differences(tables, what="rotorch.save: ranks save different things", instead=instead):
        raise ConfigError(said)


def _named(loader: Stateful | None, others: dict[str, Stateful]) -> dict[str, Stateful]:
    named = {"loader": loader, **others}
    return {name: thing for name, thing in sorted(named.items()) if thing is not None}


def _check_parameters(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> None:
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            held = weight_of(parameter)
            if held is None or model.weights.get(held.name) is not held:
                raise ConfigError(
                    f"checkpoint: the optimizer has a parameter of shape {list(parameter.shape)} that is none of the "
                    "model's. Give it an optimizer of its own, and save that by name: head_optimizer=..."
                )


def _check_stateful(name: str, thing: Any) -> None:
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        raise ConfigError(
            f"checkpoint: {name}: {type(thing).__name__} has no state_dict and load_state_dict. Leave it out, or for a "
            "loader use torchdata's StatefulDataLoader"
        )


def _encoded(name: str, thing: Any) -> Tensor:
    _check_stateful(name, thing)
    stream = io.BytesIO()
    with _named_in_errors(name):
        torch.save(thing.state_dict(), stream)
    content = stream.getvalue()
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"checkpoint: {name}: the state of {type(thing).__name__} has more than tensors, numbers, text, lists and "
            f"dicts: {str(error).splitlines()[0]}"
        ) from None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _decoded(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)


def _placed(encoded: dict[str, Tensor], model: ParallelModel) -> dict[str, Tensor]:
    """The states under their names in the checkpoint: one for all ranks, or each share's from its first rank."""
    digests = {name: hashlib.sha256(content.numpy().tobytes()).hexdigest() for name, content in encoded.items()}
    of_ranks = gather_objects((model.batch_rank, digests), mesh=model.mesh)
    rank = model.mesh.get_rank() if model.mesh.size() > 1 else 0
    first = next(number for number, (share, _) in enumerate(of_ranks) if share == model.batch_rank)
    position = model.mesh.mesh.flatten().tolist().index(rank)
    found = {}
    for name, content in encoded.items():
        if all(theirs.get(name) == digests[name] for _, theirs in of_ranks):
            found[object_name(name)] = content
        elif position == first:
            found[object_name(name, share=model.batch_rank)] = content
    return found


@contextmanager
def _named_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(f"checkpoint: {name}: {type(error).__name__}: {said}") from error

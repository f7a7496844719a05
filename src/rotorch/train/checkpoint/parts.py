"""Checkpoints of other libraries' loops: a directory with models and optimizers in parts, and a file with the rest.

PATH/model-<name>, PATH/optimizer-<name>: as `rotorch train` writes them, for any layout to load. PATH/rest.pt: torch's.
All of it gets its name at once, so that no model goes with the optimizer of another step.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.one_error import one_error
from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.train.checkpoint.directories import make_directory, replace_directory
from rotorch.train.checkpoint.optimizer_files import load_optimizer, save_optimizer
from rotorch.train.checkpoint.saving import load, save_as
from rotorch.train.state import TrainState

Optimizers = Mapping[str, tuple[torch.optim.Optimizer, ParallelModel]]
"""By name: an optimizer, and the model whose weights it updates."""

_REST = "rest.pt"


def save_parts(
    path: Path, *, models: Mapping[str, ParallelModel], optimizers: Optimizers, rest: Any, step: int, mesh: DeviceMesh
) -> None:
    """Writes a checkpoint, whole or not at all. All ranks.

    Raises:
        ConfigError: `path` is a file.
        RankFailure: a rank could not write; what was there before is untouched.
    """
    temporary, first = path.parent / f".{path.name}.part", mesh.size() == 1 or mesh.get_rank() == 0
    with one_error(mesh):
        if path.is_file():
            raise ConfigError(f"checkpoint: {path}: a file is in the way. Under a layout a checkpoint is a directory")
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            make_directory(temporary)
    for name, model in models.items():
        save_as(temporary / f"model-{name}", TrainState(model=model, step=step))
    for name, (optimizer, model) in optimizers.items():
        save_optimizer(temporary / f"optimizer-{name}", model=model, optimizer=optimizer, step=step)
    with one_error(mesh):
        if first:
            torch.save(rest, temporary / _REST)
            replace_directory(temporary, path)


def load_parts(
    path: Path,
    *,
    models: Mapping[str, ParallelModel],
    optimizers: Optimizers,
    mesh: DeviceMesh,
    weights_only: bool = True,
) -> Any:
    """Reads a checkpoint that any layout has written; each rank its parts. Returns the rest. All ranks.

    Random states stay the loop's affair.

    Raises:
        ConfigError: it is no such checkpoint, or of other models or optimizers.
        DamagedCheckpoint: bytes have changed.
    """
    with one_error(mesh):
        if not (path / _REST).is_file():
            raise ConfigError(f"checkpoint: {path}: was not written under a layout, or not to its end")
        wanted = [f"model-{name}" for name in models] + [f"optimizer-{name}" for name in optimizers]
        if lacking := [name for name in wanted if not (path / name).is_dir()]:
            raise ConfigError(f"checkpoint: {path}: has no {', '.join(lacking)}")
        rest = torch.load(path / _REST, map_location="cpu", weights_only=weights_only)
    for name, model in models.items():
        load(path / f"model-{name}", TrainState(model=model), random_states=False)
    for name, (optimizer, model) in optimizers.items():
        load_optimizer(path / f"optimizer-{name}", model=model, optimizer=optimizer)
    return rest

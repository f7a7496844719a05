"""`Strategy`: `lightning.Trainer` on a module whose parts ranks hold together.

[Note: what is spread]
    A `LightningModule` is a loop with models in it: `training_step` calls `self.net(...)`, and makes a loss of what
    comes out. So each child that has weights is made parallel, in place, and `training_step` is a plain loop's body.
    What the module has beside (metrics, buffers, other state) stays as it is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy as LayoutStrategy
from rotorch.drop_in.plain_loops import check_plain_loop
from rotorch.lightning.fabric import model_of
from rotorch.lightning.layout_ranks import LayoutRanks
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import parallelize
from rotorch.train.checkpoint.parts import load_parts, save_parts

_WHO = "rotorch.lightning.Strategy"


class Strategy(LayoutRanks, ParallelStrategy):
    """Spreads the models of a `LightningModule` over all ranks, in place (see [Note: what is spread]).

    All ranks run the same script, started by torchrun.

    Args:
        layout: `"rtp=8"`.

    Raises:
        ConfigError: a layout that a loop calling the model cannot be right with, or of another number of ranks.
    """

    def __init__(self, layout: str | Sequence[LayoutStrategy]) -> None:
        self._take_layout(layout)
        super().__init__()

    def _configure_launcher(self) -> None:
        self._check_precision(self.precision_plugin)

    # ---------------------------------------------------------------- setting up

    def setup_environment(self) -> None:
        """Joins the process group. All ranks."""
        super().setup_environment()
        self._join()

    def setup(self, trainer: Any) -> None:
        """Makes models parallel, then optimizers over their parameters. All ranks."""
        assert self.accelerator is not None and self.model is not None, "Trainer has connected them"
        _refuse_averages(trainer.callbacks)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        models = list(_models_of(self.lightning_module))
        for _, model in models:
            check_plain_loop(self.layout, model, who=_WHO)
        for _, model in models:
            if not hasattr(model, "parallel"):
                parallelize(model, self.layout, device=self.root_device.type)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                model_of(optimizer, (model for _, model in models), who=_WHO)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Moves the parts that are not spread."""
        assert self.model is not None, "Trainer has connected it"
        self.model.to(self.root_device)

    def teardown(self) -> None:
        """Ends what Lightning has begun; models stay parallel, where they are."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, maximum or minimum over shares of a batch."""
        return self._reduced(tensor, reduce_op)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Encloses all but the last micro-batch of a step, whose sums over replicas the last one makes."""
        with ExitStack() as within:
            for _, model in _models_of(self.lightning_module):
                within.enter_context(model.no_sync())
            yield

    # ---------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read when ranks have their parts."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_checkpoint` reads the optimizers' state."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State of the module but for its parallel models, which `save_checkpoint` writes in parts."""
        assert self.lightning_module is not None, "Trainer has connected it"
        names = self._names()
        state = self.lightning_module.state_dict()
        return {key: value for key, value in state.items() if not key.startswith(names)}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` writes it in parts."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a directory (see `train/checkpoint/parts.py`). All ranks."""
        if storage_options is not None:
            raise ConfigError(f"{_WHO}: storage_options know nothing of parts. Leave them out")
        whole = "optimizer_states" in checkpoint  # save_weights_only leaves it out
        save_parts(
            Path(self.broadcast(filepath)),
            models=self._models(),
            optimizers=self._optimizers_by_name() if whole else {},
            rest=checkpoint,
            step=int(checkpoint.get("global_step", 0)),
            mesh=self.mesh,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads what any layout has written; to test or predict also a file with whole weights. All ranks.

        Raises:
            ConfigError: it was written without a layout, and holds an optimizer to go on with.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None, "Trainer has connected it"
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if path.is_file():
            if fits:
                raise ConfigError(
                    f"{_WHO}: {path} was written without a layout, its optimizer's state in one piece. Take its "
                    "weights by load_from_checkpoint and begin with a new optimizer, or go on there without a layout"
                )
            plain: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
            return plain
        rest: dict[str, Any] = load_parts(
            path,
            models=self._models(),
            optimizers=self._optimizers_by_name() if fits else {},
            mesh=self.mesh,
            weights_only=weights_only is not False,
        )
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads entries that are not in parts; whole weights of models too, if there are any."""
        assert self.lightning_module is not None, "Trainer has connected it"
        state, names = dict(checkpoint["state_dict"]), self._names()
        for name, model in _models_of(self.lightning_module):
            inside = {key.removeprefix(f"{name}."): state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
            if inside:
                model.load_state_dict(inside, strict=strict)
        found = self.lightning_module.load_state_dict(state, strict=False)
        missing = [key for key in found.missing_keys if not key.startswith(names)]
        if strict and (missing or found.unexpected_keys):
            raise ConfigError(
                f"{_WHO}: the checkpoint is of another module: it lacks {missing}, and has {found.unexpected_keys}"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `load_checkpoint` has."""

    def _models(self) -> dict[str, ParallelModel]:
        return {name: model.parallel for name, model in _models_of(self.lightning_module)}

    def _names(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name, _ in _models_of(self.lightning_module))

    def _optimizers_by_name(self) -> dict[str, tuple[torch.optim.Optimizer, ParallelModel]]:
        models = [model for _, model in _models_of(self.lightning_module)]
        plain = [o._optimizer if isinstance(o, LightningOptimizer) else o for o in self.optimizers]
        return {str(n): (optimizer, model_of(optimizer, models, who=_WHO)) for n, optimizer in enumerate(plain)}


def _refuse_averages(callbacks: Sequence[Any]) -> None:
    """Raises `ConfigError` for callbacks that copy the module before it is spread, and would average with that."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} copies the module before it is spread over ranks. Keep "
                "torch.optim.swa_utils.AveragedModel of its model, made in on_fit_start, and update it in "
                "on_train_batch_end"
            )


def _models_of(module: nn.Module | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Children with weights, by name; those within lists and dicts of modules one by one.

    Raises:
        ConfigError: weights that are no child's.
    """
    assert module is not None, "Trainer has connected it"
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise ConfigError(
            f"{_WHO}: {prefix}{own[0]} is a weight of {type(module).__name__} itself, whose steps are no pass of a "
            "model. Put it into a module of its own that training_step calls"
        )
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _models_of(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child

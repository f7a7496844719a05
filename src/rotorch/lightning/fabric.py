"""`FabricStrategy`: `lightning.Fabric` on models that ranks hold together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.drop_in.optimizers import PlainParameters
from rotorch.drop_in.plain_loops import check_plain_loop
from rotorch.lightning.layout_ranks import LayoutRanks
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import parallelize
from rotorch.train.checkpoint.parts import load_parts, save_parts

_WHO = "rotorch.lightning.FabricStrategy"


class FabricStrategy(LayoutRanks, ParallelStrategy):
    """Spreads what `fabric.setup` gets over all ranks, in place.

    All ranks run the same script, started by torchrun. Optimizers that were made over the plain module get its new
    parameters, in place.

    Args:
        layout: `"rtp=8"`.

    Raises:
        ConfigError: a layout that a loop calling the model cannot be right with, or of another number of ranks.
    """

    def __init__(self, layout: str | Sequence[Strategy]) -> None:
        self._take_layout(layout)
        super().__init__()
        self._backward_sync_control: Any = _BackwardSync()
        self._models: list[nn.Module] = []

    def _configure_launcher(self) -> None:
        self._check_precision(self.precision)

    def setup_environment(self) -> None:
        """Joins the process group. All ranks."""
        super().setup_environment()
        self._join()

    # ---------------------------------------------------------------- models and optimizers

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Spreads a module in place, unless it is parallel."""
        check_plain_loop(self.layout, module, who=_WHO)
        if not hasattr(module, "parallel"):
            parallelize(module, self.layout, device=self.root_device.type)
        self._models.append(module)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Spreads a module in place, and gives optimizers its new parameters."""
        plain, was_plain = PlainParameters(module, who=_WHO), not hasattr(module, "parallel")
        plain.check(optimizers)
        self.setup_module(module)
        if was_plain:
            plain.give_new_ones(optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns it, if it is over a model that is parallel."""
        self._model_of(optimizer)
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: `setup_module` puts weights where they belong."""

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole weights on the first rank, nothing on the others. All ranks."""
        if not hasattr(module, "parallel"):
            return super().get_module_state_dict(module)
        whole: dict[str, Any] = module.full_state_dict()
        return whole

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, mean, maximum or minimum over shares of a batch."""
        return self._reduced(tensor, reduce_op)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm of all ranks' gradients; returns that, as a plain tensor."""
        parameters = [p for p in self.precision.main_params(optimizer) if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if error_if_nonfinite and not whole.isfinite():
            raise RuntimeError(f"clip_gradients: the norm of gradients is {float(whole)}. Lower the learning rate")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return whole

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Any] | None = None
    ) -> None:
        """Writes a directory (see `train/checkpoint/parts.py`). All ranks.

        Raises:
            ConfigError: a filter or storage options; a name that is no directory's.
        """
        if filter or storage_options is not None:
            raise ConfigError(
                f"{_WHO}: save(filter=...) and storage_options know nothing of parts. Leave out what should not be "
                "saved from the state"
            )
        models, optimizers, rest = self._sorted(state)
        plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        save_parts(Path(self.broadcast(path)), models=models, optimizers=optimizers, rest=plain, step=0, mesh=self.mesh)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads what any layout has written, or a model's whole weights from a file. All ranks.

        Raises:
            ConfigError: it was written without a layout, or lacks something of `state`.
        """
        path = Path(self.broadcast(path))
        if path.is_file():
            if not isinstance(state, nn.Module):
                raise ConfigError(
                    f"{_WHO}: {path} was written without a layout. Take its weights by fabric.load_raw(path, model) if "
                    "it has nothing else, or by model.load_state_dict, on all ranks"
                )
            self.load_module_state_dict(state, torch.load(path, map_location="cpu", weights_only=True), strict=strict)
            return {}
        if isinstance(state, nn.Module | torch.optim.Optimizer):
            raise ConfigError(f"{_WHO}: {path} is a directory. Write fabric.load(path, {{'model': model}})")
        models, optimizers, rest = self._sorted(state or {})
        found = load_parts(
            path, models=models, optimizers=optimizers, mesh=self.mesh, weights_only=weights_only is not False
        )
        if strict and (lacking := [key for key in rest if key not in found]):
            raise ConfigError(f"{_WHO}: {path} has no {', '.join(map(repr, lacking))}. Or write strict=False")
        for key in [key for key in rest if key in found]:
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(found.pop(key))
            else:
                state[key] = found.pop(key)
        left: dict[str, Any] = found
        return left

    def _sorted(
        self, state: dict[str, Any]
    ) -> tuple[dict[str, ParallelModel], dict[str, tuple[torch.optim.Optimizer, ParallelModel]], dict[str, Any]]:
        """Parallel models of a state, optimizers of these, and the rest."""
        models, optimizers, rest = {}, {}, {}
        for key, value in state.items():
            if isinstance(value, nn.Module) and hasattr(value, "parallel"):
                models[_directory(key)] = value.parallel
            elif isinstance(value, torch.optim.Optimizer):
                optimizers[_directory(key)] = (value, self._model_of(value))
            else:
                rest[key] = value
        return models, optimizers, rest

    def _model_of(self, optimizer: torch.optim.Optimizer) -> ParallelModel:
        return model_of(optimizer, self._models, who=_WHO)


def model_of(optimizer: torch.optim.Optimizer, models: Iterable[Any], *, who: str) -> ParallelModel:
    """The model that has all of an optimizer's parameters.

    Raises:
        ConfigError: none has.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if wanted <= {id(parameter) for parameter in model.parameters()}:
            found: ParallelModel = model.parallel
            return found
    raise ConfigError(
        f"{who}: {type(optimizer).__name__} has parameters of no parallel model, or of several. Make one for each "
        "model, after the model was set up"
    )


def _directory(key: str) -> str:
    if not key.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"{_WHO}: {key!r} in a state names a directory. Write letters, digits, _ and -")
    return key


class _BackwardSync:
    """The way in which Fabric's `no_backward_sync` reaches a model's `no_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        off: AbstractContextManager[None] = module.no_sync() if enabled else nullcontext()
        return off

"""An `Accelerator` whose models are spread over ranks: whole weights for what asks for them, checkpoints in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from rotorch.accelerate.shares import SharesAccelerator
from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.train.checkpoint.parts import Optimizers, load_parts, save_parts

PARTS = "parallel"
"""The directory of models and optimizers in what `save_state` writes (see `train/checkpoint/parts.py`)."""


class ParallelAccelerator(SharesAccelerator):
    """Class of a user's `Accelerator`, from `prepare` on."""

    _models: list[Any]
    _optimizers: list[Any]
    _model_of: dict[int, Any]
    """By id of an optimizer: the model whose weights it updates."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights on the first rank, nothing on the others. All ranks."""
        if not hasattr(model, "parallel"):
            plain: dict[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return plain
        whole: dict[str, Any] = model.full_state_dict()
        return whole

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As of every accelerator; each rank writes its parts of weights and of optimizers' states. All ranks.

        Hooks of `register_save_state_pre_hook` get models that are not parallel.
        """
        models, optimizers = self._parallel_ones()

        def save(_: list[nn.Module], __: list[Any], directory: str) -> None:
            mesh, step = self._of.mesh, self.step
            save_parts(Path(directory) / PARTS, models=models, optimizers=optimizers, rest=None, step=step, mesh=mesh)

        with self._without_parallel_ones():
            handle = self.register_save_state_pre_hook(save)
            try:
                return super().save_state(output_dir, safe_serialization=safe_serialization, **kwargs)
            finally:
                handle.remove()

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Reads the files of `save_state`, written under any layout; each rank its parts. All ranks.

        Raises:
            ConfigError: it was written without a layout, or of other models or optimizers.
        """
        models, optimizers = self._parallel_ones()

        def load(_: list[nn.Module], directory: str) -> None:
            there = Path(directory) / PARTS
            if not there.is_dir():
                raise ConfigError(
                    f"load_state: {directory} has no {PARTS!r}: it was written without a layout. Load its weights by "
                    "model.load_state_dict, on all ranks, and begin with a new optimizer"
                )
            load_parts(there, models=models, optimizers=optimizers, mesh=self._of.mesh)

        with self._without_parallel_ones():
            handle = self.register_load_state_pre_hook(load)
            try:
                super().load_state(input_dir, load_kwargs, **kwargs)
            finally:
                handle.remove()

    def _parallel_ones(self) -> tuple[dict[str, ParallelModel], Optimizers]:
        models = [model.parallel for model in self._models if hasattr(model, "parallel")]
        plain = [o.optimizer for o in self._optimizers if id(o.optimizer) in self._model_of]
        return (
            {str(number): model for number, model in enumerate(models)},
            {str(number): (o, self._model_of[id(o)].parallel) for number, o in enumerate(plain)},
        )

    @contextmanager
    def _without_parallel_ones(self) -> Iterator[None]:
        """Within it Accelerate sees no parallel models and none of their optimizers: it would save what rank 0 has."""
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if not hasattr(model, "parallel")]
        self._optimizers = [o for o in optimizers if id(o.optimizer) not in self._model_of]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

"""`TrainerMixin`: transformers' `Trainer`, and TRL's trainers over it, on a model that is spread over ranks.

[Note: what a trainer must be told]
    Its loop is one of a user's own, and exact as such (`drop_in/`). What differs is around it: Accelerate must neither
    wrap nor cut the model and counts shares of a batch (`accelerate/shares.py`); all ranks save, the first one writes;
    the optimizer's state is in parts (`train/checkpoint/optimizer_files.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from rotorch.accelerate.shares import of_shares
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.one_error import one_error
from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.drop_in.module import ParallelModule
from rotorch.drop_in.plain_loops import layout_of_all
from rotorch.drop_in.whole import full_state_dict
from rotorch.drop_in.whole_head import show_whole_head
from rotorch.hf.arguments import check_accelerator, check_arguments, check_model, check_values
from rotorch.models.lora import base_of, is_wrapped, saved_names
from rotorch.models.modes import evaluating
from rotorch.ops.random_state import seeded_rng
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import parallelize
from rotorch.strategies import parse_parallel
from rotorch.train.checkpoint.optimizer_files import load_optimizer, save_optimizer

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_OPTIMIZER = "optimizer"
"""The directory of the optimizer's state in a checkpoint."""


class TrainerMixin(_Trainer):
    """Put before a trainer's class; then that is as ever, on a model that ranks hold together.

        class SFT(rotorch.hf.TrainerMixin, SFTTrainer): ...

    All ranks run the same script. The model is spread when the trainer is made, in place, with what `peft_config` adds
    to it, and a reference model likewise; or it is given as `rotorch.parallelize` returned it.

    Attributes:
        layout: `"rtp=8"`; what the constructor's argument of that name stands in for.
    """

    layout: str | Sequence[Strategy] | None = None
    _counts_itself: bool | None = None

    def __init__(self, *args: Any, layout: str | Sequence[Strategy] | None = None, **kwargs: Any) -> None:
        """Takes the arguments of the trainer's own class, and `layout`.

        Raises:
            ConfigError: a layout or arguments that cannot be right together, before anything is made.
        """
        self.layout = self.layout if layout is None else layout
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        is_parallel = isinstance(given.get("model"), ParallelModule)
        if not is_parallel and isinstance(base_of(given["model"])[1] if "model" in given else None, ParallelModule):
            raise ConfigError(
                "TrainerMixin: peft has put adapters into a model that was parallel already. Give peft.get_peft_model("
                f"model) of the model as it is, and layout={layout_of_all()!r}; or write a loop of your own"
            )
        if (self.layout is None) is not is_parallel:
            raise ConfigError(
                "TrainerMixin: the model is parallel already, and layout= would spread it again. Leave layout out"
                if is_parallel
                else f"TrainerMixin: write layout={layout_of_all()!r}, or give a model that rotorch.parallelize has "
                "returned"
            )
        if is_parallel and given.get("peft_config") is not None:
            raise ConfigError(
                "TrainerMixin: peft_config adds adapters to a model that is parallel already, of which ranks would "
                f"know nothing. Give the model as it is, and layout={layout_of_all()!r}"
            )
        if given.get("model_init") is not None:
            raise ConfigError("TrainerMixin: model_init makes a model for every train(). Write model=model_init()")
        if isinstance(self.layout, str):
            parse_parallel(self.layout)
        if given.get("args") is not None:
            check_arguments(given["args"])
        super().__init__(*args, **kwargs)

    @property
    def parallel(self) -> ParallelModel:
        """The passes, weights and ranks of the model."""
        found: ParallelModel = self.model.parallel
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """As ever; then the model is spread, and the accelerator counts shares of a batch."""
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        self._spread(self.model)
        check_model(self.parallel, arguments=self.args)
        of_shares(self.accelerator, self.parallel, spread=self._spread)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of a global batch; ranks that share a batch count once."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.parallel.num_batch_ranks)

    def _spread(self, model: nn.Module) -> None:
        if not isinstance(model, ParallelModule):
            check_values(model)
            layout = self.layout if self.layout is not None else self.parallel.strategies
            parallelize(model, layout, device=self.args.device.type)
        show_whole_head(model, model.parallel)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As ever; but the loss of a model that divides it by a count of its own is that of one process.

        `Trainer` takes it for a sum over the items of all processes and multiplies it by their number, so gradients
        would grow with the ranks (transformers: `compute_loss`, `model_accepts_loss_kwargs`).
        """
        given = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if given and self._divides_by_its_own_count(model, inputs, num_items_in_batch):
            given = {}
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **given)

    def _divides_by_its_own_count(self, model: nn.Module, inputs: Any, num_items: Any) -> bool:
        """True if the model's loss is the same for another count of items. All ranks; two passes, the first time."""
        computed_here = self.compute_loss_func is not None or self.label_smoother is not None
        if computed_here or not self.model_accepts_loss_kwargs or "labels" not in inputs:
            return False
        if self._counts_itself is None:
            losses = []
            for count in (num_items, 2 * num_items):
                with evaluating(model), torch.no_grad(), seeded_rng(0):
                    found = model(**inputs, num_items_in_batch=count)
                losses.append(found["loss"] if isinstance(found, Mapping) else found[0])
            changes = (losses[0] != losses[1]).to(torch.float32).reshape(1)
            self._counts_itself = not all_reduce_sum(changes, mesh=self.parallel.mesh).item()
        return self._counts_itself

    # ---------------------------------------------------------------- saving and loading

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Writes whole weights, and the trainer's files beside them. All ranks; the first one writes."""
        if state_dict is None:
            wanted = saved_names(self.model)
            state_dict = full_state_dict(self.model, self.parallel, all_ranks=False, only=wanted)
        with one_error(self.parallel.mesh):
            if self.args.should_save:
                super()._save(output_dir, state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Each rank reads its parts of the weights; of a model that peft has wrapped, adapters."""
        if is_wrapped(self.model) or not isinstance(self.model, PreTrainedModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.parallel.load(str(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """As `_load_from_checkpoint`, from the best one."""
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank writes its parts of the optimizer's state, the first one the schedule. All ranks."""
        directory, model = Path(output_dir), self.parallel
        save_optimizer(
            directory / _OPTIMIZER, model=model, optimizer=self._own_optimizer(), step=self.state.global_step
        )
        with one_error(model.mesh):
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), directory / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads what `_save_optimizer_and_scheduler` wrote, under any layout; nothing if only the model was saved."""
        if checkpoint is None:
            return
        directory = Path(checkpoint)
        if (directory / OPTIMIZER_NAME).exists():
            raise ConfigError(
                f"TrainerMixin: {directory / OPTIMIZER_NAME} is the optimizer's state in one piece, of a trainer that "
                f"had no layout. Write model={str(directory)!r} for its weights, or go on there without a layout"
            )
        if not (directory / _OPTIMIZER).is_dir():
            return
        load_optimizer(directory / _OPTIMIZER, model=self.parallel, optimizer=self._own_optimizer())
        self.lr_scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer within what Accelerate puts around it."""
        found = self.optimizer
        while not type(found).__module__.startswith("torch.") and isinstance(
            inner := getattr(found, "optimizer", None), torch.optim.Optimizer
        ):
            found = inner
        assert isinstance(found, torch.optim.Optimizer), "a trainer saves after it has made one"
        return found

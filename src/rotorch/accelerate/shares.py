"""An `Accelerator` that counts shares of a global batch where Accelerate counts processes.

[Note: shares and processes]
    Accelerate gives each process a batch of its own. Ranks of a layout may share one (megatron, atp, grids), so what it
    does with processes holds here for shares: which batches a rank reads, by what a loss is multiplied that counts
    the targets of all, and what is gathered for metrics, once for each share and in the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel


class SharesAccelerator(Accelerator):
    """Accelerator that counts shares from `of_shares` on (see [Note: shares and processes])."""

    _of: ParallelModel
    _first_of_shares: list[int] | None
    _spread: Callable[[nn.Module], None]

    @property
    def num_processes(self) -> int:
        """Number of shares of a global batch."""
        return self._of.num_batch_ranks

    @property
    def process_index(self) -> int:
        """Number of the share that this rank reads."""
        return self._of.batch_rank

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Its precision alone: a model that is parallel needs no wrapper, and lies where it is used."""
        self._spread(model)  # unless it is: one for reference
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Tensors of all shares, one below the other."""
        gathered = super().gather(tensor)
        if self._first_of_shares is None:
            return gathered
        return recursively_apply(self._one_of_each_share, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As of every accelerator; lists of other things than tensors come once for each share, too."""
        if self._first_of_shares is not None and (use_gather_object or not _has_only_tensors(input_data)):
            if not isinstance(input_data, list):
                raise ConfigError(
                    f"gather_for_metrics: a {type(input_data).__name__} of things that are no tensors cannot be put "
                    "together from ranks that share batches. Give a list"
                )
            first = self._of.mesh.get_rank() in self._first_of_shares
            return super().gather_for_metrics(input_data if first else [], use_gather_object=True)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sums or means of all shares."""
        found = super().reduce(tensor, reduction, scale)
        if reduction != "sum" or self._first_of_shares is None:
            return found
        ranks_each = self._of.mesh.size() // self.num_processes
        return recursively_apply(lambda t: t / ranks_each if t.is_floating_point() else t // ranks_each, found)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips by the norm of all ranks' gradients; returns that, as a plain tensor."""
        self.unscale_gradients()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As of every accelerator; its state lies where the weights are."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """As of every accelerator: it counts steps of one process, so as many per step as there are shares."""
        prepared = super().prepare_scheduler(scheduler)
        if self._first_of_shares is not None and not self.split_batches:
            prepared.__class__ = _SharesScheduler
            prepared.num_shares = self.num_processes
        return prepared

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """As of every accelerator, which gives each rank other inputs.

        Raises:
            ConfigError: ranks share batches, and would call the model with different ones.
        """
        if self._first_of_shares is not None:
            raise ConfigError(
                "split_between_processes: gives each rank inputs of its own, and ranks of this layout share them. "
                f"Take inputs[{self.process_index}::{self.num_processes}]: that is its share"
            )
        with super().split_between_processes(inputs, apply_padding) as own:
            yield own

    def _one_of_each_share(self, gathered: Tensor) -> Tensor:
        ranks = gathered.chunk(self._of.mesh.size())
        return torch.cat([ranks[rank] for rank in self._first_of_shares or ()])


class _SharesScheduler(AcceleratedScheduler):
    """Counts `num_shares` where Accelerate counts processes."""

    num_shares: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As many steps of one process as there are shares."""
        linked = self.step_with_optimizer and self.gradient_state.sync_gradients
        self.split_batches = True  # then each call is one step
        for number in range(self.num_shares if linked else 1):
            last = getattr(self.scheduler, "total_steps", None)
            if number == 0 or last is None or self.scheduler._step_count <= last:
                super().step(*args, **kwargs)


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def of_shares(
    accelerator: Accelerator,
    model: ParallelModel,
    *,
    spread: Callable[[nn.Module], None],
    kind: type[SharesAccelerator] = SharesAccelerator,
) -> None:
    """Makes an accelerator count shares of `model`, in place. All ranks.

    Args:
        accelerator: which.
        model: whose shares.
        spread: spreads another model in the same way, in place, unless it is parallel already.
        kind: the class that it gets.
    """
    accelerator.__class__ = kind
    assert isinstance(accelerator, SharesAccelerator)
    accelerator._of, accelerator._spread = model, spread
    shares = gather_object([model.batch_rank]) if model.mesh.size() > 1 else [0]
    first = [shares.index(share) for share in range(model.num_batch_ranks)]
    accelerator._first_of_shares = None if first == list(range(model.mesh.size())) else first
    if accelerator._first_of_shares is not None:  # each rank reads its share itself, also of a stream
        accelerator.dataloader_config.dispatch_batches = False

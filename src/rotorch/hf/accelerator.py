"""An `Accelerator` that counts shares of a global batch where Accelerate counts processes.

[Note: shares and processes]
    Accelerate gives each process a batch of its own. Ranks of a layout may share one (megatron, atp, grids), so what it
    does with processes holds here for shares: which batches a rank reads, by what a loss is multiplied that counts
    the targets of all, and what is gathered for metrics, once for each share and in the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.parallel_model import ParallelModel


class SharesAccelerator(Accelerator):
    """Accelerator of a `Trainer` that counts shares from `of_shares` on (see [Note: shares and processes])."""

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

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips by the norm of all ranks' gradients; returns that, as a plain tensor."""
        self.unscale_gradients()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _one_of_each_share(self, gathered: Tensor) -> Tensor:
        ranks = gathered.chunk(self._of.mesh.size())
        return torch.cat([ranks[rank] for rank in self._first_of_shares or ()])


def of_shares(accelerator: Accelerator, model: ParallelModel, *, spread: Callable[[nn.Module], None]) -> None:
    """Makes an accelerator count shares of `model`, in place. All ranks.

    Args:
        accelerator: which.
        model: whose shares.
        spread: spreads another model in the same way, in place, unless it is parallel already.
    """
    accelerator.__class__ = SharesAccelerator
    assert isinstance(accelerator, SharesAccelerator)
    accelerator._of, accelerator._spread = model, spread
    shares = gather_object([model.batch_rank]) if model.mesh.size() > 1 else [0]
    first = [shares.index(share) for share in range(model.num_batch_ranks)]
    accelerator._first_of_shares = None if first == list(range(model.mesh.size())) else first
    if accelerator._first_of_shares is not None:  # each rank reads its share itself, also of a stream
        accelerator.dataloader_config.dispatch_batches = False

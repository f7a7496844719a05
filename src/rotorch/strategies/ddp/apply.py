"""The `ddp` strategy's hold on a model.

Torch's DistributedDataParallel over plain parameters; or, over another strategy, one all-reduce of its gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rotorch.comm.collectives import all_reduce_each
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import OuterShardedModel, Result, ShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import Memory, ShardPlacement
from rotorch.models.losses import Batch
from rotorch.shard.sharded_weight import EarlierGradient


class DDPModel(SimpleShardedModel):
    """The whole model on every rank; torch's DDP sums gradients in buckets, under backward.

    Where passes compute in another dtype than the weights have, DDP's buckets would have that of the passes. Gradients
    are then summed in the weights' own, after backward.
    """

    def __init__(self, setup: Setup) -> None:
        placements = [ShardPlacement.whole(weight, mesh=setup.mesh) for weight in setup.spec.weights]
        memory = Memory(gradients_stay=True)  # in DDP's buckets
        super().__init__(setup.module, setup.shards(placements, memory=memory))
        self._mesh = setup.mesh
        self._in_buckets = setup.param_dtype is None
        self._wrapped: DistributedDataParallel | None = None
        self._are_summed = False
        """True if DDP has summed the gradients of this step."""
        # DDP averages; the rule here is to sum.
        self.loss_scale = float(setup.mesh.size()) if self._in_buckets else 1.0

    def start(self) -> None:
        self._are_summed = False
        super().start()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        """As for any model, under torch's DDP. Not in calls of users' own: DDP needs each one's backward to follow."""
        if not self._in_buckets:
            return super().forward_backward(callee, micro_batches, loss_of)
        if self._wrapped is None:  # made when the leaves are in place: DDP keeps the parameters that it finds
            self._wrapped = _wrap(callee, mesh=self._mesh)
        wrapped, self._are_summed = self._wrapped, True
        return super().forward_backward(callee, micro_batches, lambda _, micro_batch: wrapped(loss_of, micro_batch))

    def finish(self) -> None:
        if not self._are_summed:
            self.shards.reduce()
            for leaf in self.shards.leaves.values() if self._in_buckets else ():
                if leaf.grad is not None:
                    leaf.grad.div_(self.loss_scale)  # the mean, as torch's DDP leaves it
        super().finish()


class _Loss(nn.Module):
    """A model down to its loss, by which DDP knows the weights that no gradient will reach; by outputs it could not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, loss_of: Callable[[nn.Module, Batch], Tensor], micro_batch: Batch) -> Tensor:
        return loss_of(self.module, micro_batch)


def _wrap(module: nn.Module, *, mesh: DeviceMesh) -> DistributedDataParallel:
    # It is needed as soon as one rank's batch leaves a weight out, which nobody knows before.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified in DDP")
    return DistributedDataParallel(
        _Loss(module),
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        init_sync=False,
        forward_sync_buffers=False,
        find_unused_parameters=True,
    )


class ReplicatedModel(OuterShardedModel):
    """Another strategy's model, once per replica: its own gradients are summed over the replicas."""

    def __init__(self, inner: ShardedModel, *, mesh: DeviceMesh) -> None:
        super().__init__(inner)
        self._mesh = mesh
        self._earlier: list[EarlierGradient] = []
        self.loss_scale = inner.loss_scale
        replica = mesh.get_local_rank()
        self.weights = {
            name: replace(
                held, num_holders=held.num_holders * mesh.size(), holder=held.holder + held.num_holders * replica
            )
            for name, held in inner.weights.items()
        }

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded()

    def start(self) -> None:
        # Gradients that the user has not cleared are summed over the replicas already, and must not be once more.
        there = [held for held in self.weights.values() if held.parameter.grad is not None]
        self._earlier = [EarlierGradient(held) for held in there] if torch.is_grad_enabled() else []
        self._inner.start()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return self._inner.micro_batch(last=last)

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        return self._inner.forward_backward(callee, micro_batches, loss_of)

    def forward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], run: Callable[[nn.Module, Batch], Result]
    ) -> list[Result]:
        return self._inner.forward(callee, micro_batches, run)

    def finish(self) -> None:
        self._inner.finish()
        all_reduce_each(self._inner.gradients(), mesh=self._mesh)
        # After the sum, which also runs over the buffers of weights that this step has not used.
        for earlier in self._earlier:
            earlier.add_back()
        self._earlier = []

    def gradients(self) -> list[Tensor]:
        return self._inner.gradients()


def apply(setup: Setup) -> ShardedModel:
    """Holds the model whole on every rank, or replicates the inner strategy's model."""
    if setup.inner is not None:
        return ReplicatedModel(setup.inner, mesh=setup.mesh)
    setup.prepare_blocks()
    return DDPModel(setup)

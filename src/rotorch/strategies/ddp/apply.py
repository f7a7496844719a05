"""How `ddp` holds a model.

Torch's DistributedDataParallel over plain parameters; or, over another strategy, one all-reduce of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rotorch.comm.collectives import all_reduce_each
from rotorch.core.spec import ModelSpec
from rotorch.hold.sharded_weights import Memory, ShardedWeights, ShardPlacement
from rotorch.hold.shards_holding import ShardsHolding
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.models.losses import Batch
from rotorch.parallel_model import Holding, OuterHolding, Result
from rotorch.shard.sites import find_sites
from rotorch.strategies.ddp.plan import DDP


class DDPHolding(ShardsHolding):
    """The whole model on every rank; torch's DDP sums gradients in buckets, under backward."""

    def __init__(self, module: nn.Module, *, spec: ModelSpec, mesh: DeviceMesh, device: torch.device) -> None:
        placements = [ShardPlacement.whole(weight, mesh=mesh) for weight in spec.weights]
        memory = Memory(gradients_stay=True)  # in DDP's buckets
        sites = find_sites(module)
        super().__init__(module, ShardedWeights(placements, sites=sites, mesh=mesh, device=device, memory=memory))
        self._mesh = mesh
        self._wrapped: DistributedDataParallel | None = None
        self._for_calls = False
        self.loss_scale = float(mesh.size())  # DDP averages; the rule here is to sum

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        with super().lend() as module:
            if not torch.is_grad_enabled():
                yield module
                return
            if self._wrapped is None:  # made when the leaves are in place: DDP keeps the parameters that it finds
                self._wrapped = _wrap(module, mesh=self._mesh)
            yield self._wrapped

    @contextmanager
    def lend_for_calls(self) -> Iterator[nn.Module]:
        """The module itself: torch's DDP wants each forward followed by its backward, and all weights used in it."""
        self._for_calls = True
        try:
            with super().lend() as module:
                yield module
        finally:
            self._for_calls = False

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def finish(self) -> None:
        if self._for_calls:
            self.shards.reduce()
            for leaf in self.shards.leaves.values():
                if leaf.grad is not None:
                    leaf.grad.div_(self._mesh.size())  # the mean, as torch's DDP leaves it
        super().finish()


def _wrap(module: nn.Module, *, mesh: DeviceMesh) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        init_sync=False,
        forward_sync_buffers=False,
    )


class ReplicatedHolding(OuterHolding):
    """What another strategy holds, once per replica: that strategy's own gradients, summed over the replicas."""

    def __init__(self, inner: Holding, *, mesh: DeviceMesh) -> None:
        super().__init__(inner)
        self._mesh = mesh
        self._before: dict[str, Tensor | None] = {}
        """The DTensors of those gradients, whose memory a step's own gradients may lie in."""
        self.loss_scale = inner.loss_scale
        replica = mesh.get_local_rank()
        self.weights = {
            name: replace(
                held, num_holders=held.num_holders * mesh.size(), holder=held.holder + held.num_holders * replica
            )
            for name, held in inner.weights.items()
        }

    def lend(self) -> AbstractContextManager[nn.Module]:
        return self._inner.lend()

    def lend_for_calls(self) -> AbstractContextManager[nn.Module]:
        return self._inner.lend_for_calls()

    def start(self) -> None:
        # Gradients that the user has not cleared are summed over the replicas already: set aside, added at the end.
        with_gradients = {name: held for name, held in self.weights.items() if held.set_aside()}
        self._before = {name: held.parameter.grad for name, held in with_gradients.items()}
        for held in with_gradients.values():
            held.parameter.grad = None
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
        for name, before in self._before.items():
            held = self.weights[name]
            if held.local_grad is None:  # this step used no weight; its buffer was summed all the same
                held.parameter.grad = before
                held.put_back()
            else:
                held.add_earlier(held.local_grad)
        self._before = {}

    def gradients(self) -> list[Tensor]:
        return self._inner.gradients()


def apply(
    module: nn.Module,
    *,
    strategy: DDP,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
    inner: Holding | None = None,
    inside: DeviceMesh | None = None,
) -> Holding:
    """Holds `module` whole on every rank of `mesh`, or replicates what `inner` holds."""
    if inner is not None:
        return ReplicatedHolding(inner, mesh=mesh)
    if compiled:
        compile_blocks(module)
    if strategy.recompute == "block":
        recompute_blocks(module, strategy=strategy.kind)
    return DDPHolding(module, spec=spec, mesh=mesh, device=device)

"""How `ddp` holds a model.

Torch's DistributedDataParallel over plain twins; or, over another strategy, one all-reduce of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rotorch.comm.collectives import all_reduce_each
from rotorch.core.spec import ModelSpec
from rotorch.hold.replicas import Replicas
from rotorch.models.blocks import recompute_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.models.losses import Batch
from rotorch.parallel_model import Holding, OuterHolding, Result
from rotorch.shard.sharded_weight import EarlierGradients
from rotorch.strategies.ddp.plan import DDP


class DDPHolding(Holding):
    """The whole model on every rank; torch's DDP sums gradients in buckets, under backward."""

    def __init__(self, module: nn.Module, *, spec: ModelSpec, mesh: DeviceMesh, device: torch.device) -> None:
        self._module = module
        self._mesh = mesh
        self._wrapped: DistributedDataParallel | None = None
        self._for_calls = False
        self.loss_scale = float(mesh.size())  # DDP averages; the rule here is to sum
        self._replicas = Replicas.of_module(module, weights=spec.weights, mesh=mesh, device=device, gradients_stay=True)
        self.weights = self._replicas.held

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        try:
            self._replicas.lend()
            if not torch.is_grad_enabled():
                yield self._module
                return
            if self._wrapped is None:  # made when the twins are in place: DDP keeps the parameters that it finds
                self._wrapped = _wrap(self._module, mesh=self._mesh)
            yield self._wrapped
        finally:
            self._replicas.take_back()

    @contextmanager
    def lend_for_calls(self) -> Iterator[nn.Module]:
        """The module itself: torch's DDP wants each forward followed by its backward, and all weights used in it."""
        self._for_calls = True
        try:
            self._replicas.lend()
            yield self._module
        finally:
            self._for_calls = False
            self._replicas.take_back()

    def start(self) -> None:
        self._replicas.start()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def finish(self) -> None:
        if self._for_calls:
            self._replicas.reduce()
            for twin in self._replicas.twins.values():
                if twin.grad is not None:
                    twin.grad.div_(self._mesh.size())  # the mean, as torch's DDP leaves it
        self._replicas.attach()


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
        self._earlier = EarlierGradients()
        self._before: dict[str, Tensor | None] = {}
        """The DTensors of those gradients, whose memory a step's own gradients may lie in."""
        self.weights = inner.weights
        self.loss_scale = inner.loss_scale
        for held in self.weights.values():
            held.holder += held.num_holders * mesh.get_local_rank()
            held.num_holders *= mesh.size()

    def lend(self) -> AbstractContextManager[nn.Module]:
        return self._inner.lend()

    def lend_for_calls(self) -> AbstractContextManager[nn.Module]:
        return self._inner.lend_for_calls()

    def start(self) -> None:
        # Gradients that the user has not cleared are summed over the replicas already: set aside, added at the end.
        names = self._earlier.set_aside(self.weights)
        self._before = {name: self.weights[name].parameter.grad for name in names}
        for name in names:
            self.weights[name].parameter.grad = None
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
            if held.parameter.grad is None:
                held.parameter.grad = before
            else:
                self._earlier.add_to(held.local_grad, name=name)
        self._earlier.put_back(self.weights)  # where this step used no weight; its buffer was summed all the same
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

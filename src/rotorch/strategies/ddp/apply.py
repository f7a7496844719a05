"""The `ddp` strategy's hold on a model.

Torch's DistributedDataParallel over plain parameters; or, over another strategy, sums of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rotorch._torch_private import group_timeout, sums_are_complete
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.collectives import all_reduce_sum_later, any_rank, num_hosts
from rotorch.comm.transports.message_ring import message_group
from rotorch.core.errors import ConfigError
from rotorch.hold.early_sums import EarlySums, Part, in_runs
from rotorch.hold.put_off import PutOffSums
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import OuterShardedModel, Result, ShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.models.losses import Batch
from rotorch.shard.sharded_weight import EarlierGradient

_BUCKET_BYTES = 25 * 2**20
"""DDP's own default."""


class DDPModel(SimpleShardedModel):
    """The whole model on every rank; torch's DDP sums gradients in buckets, under backward.

    Not in the first step: DDP sums nothing in a step that leaves a weight out, so that one finds out. Where weights are
    left out, gradients are summed by `early_sums`, and also where passes compute in another dtype than the weights
    have: DDP's buckets would have that of the passes; and in loops of a user's own, where DDP would need each forward
    followed by its backward, and all weights used.
    """

    def __init__(self, setup: Setup) -> None:
        placements = [ShardPlacement.whole(weight, mesh=setup.mesh) for weight in setup.spec.weights]
        super().__init__(setup.module, setup.shards(placements))
        self._mesh = setup.mesh
        self._num_hosts = num_hosts(setup.mesh)
        self._wrapped: DistributedDataParallel | None = None
        self._in_buckets: bool | None = False if setup.param_dtype is not None else None
        """True if DDP sums gradients; None until a step has found out whether it can."""
        self._under_backward = False
        """True if DDP sums those of this pass."""
        # DDP averages; the rule here is to sum.
        self.loss_scale = 1.0 if setup.param_dtype is not None else float(setup.mesh.size())
        # Within a host the cores that compute carry the bytes, and nothing hides: one sum behind backward.
        self._leaves_early = self._num_hosts > 1 or setup.device.type != "cpu"
        self.early_sums = EarlySums(self._parts_of(setup))
        self.put_off = PutOffSums(0.0 if setup.mesh.get_local_rank() else self.loss_scale)
        for name, held in self.weights.items():
            held.is_summed = partial(self.put_off.is_summed, name)

    def _parts_of(self, setup: Setup) -> list[Part]:
        mesh, leaves = setup.mesh, self.shards.leaves
        # The module's order, reversed, is that of backward as a rule.
        order = reversed([name for name, _ in setup.module.named_parameters()])
        sizes = {name: leaves[name].numel() for name in order if leaves[name].requires_grad}
        if mesh.size() == 1 or not sizes:
            return []
        if not self._leaves_early:
            return [Part((), partial(self._side_by_side, list(sizes)), partial(all_reduce_sum_later, mesh=mesh))]
        sum_later = _apart(AxisGroup.along(mesh, "ddp"), device=setup.device).all_reduce_later
        itemsize = max(self.weights[name].local.itemsize for name in sizes)
        least = (bucket_bytes(sum(sizes.values()) * itemsize, hosts=self._num_hosts) or _BUCKET_BYTES) / itemsize
        return [
            Part(run, partial(self._side_by_side, run), sum_later, leaves=[leaves[name] for name in run])
            for run in in_runs(list(sizes.items()), least=least)
        ]

    def _side_by_side(self, names: Sequence[str]) -> list[Tensor]:
        # Should the step break off with sums under way, earlier gradients must not lie where these are made.
        anew = self._leaves_early and any(self.weights[name].earlier is not None for name in names)
        self.shards.add_earlier(name for name in names if name in self.put_off.due)
        return list(self.shards.side_by_side(names, anew=anew))

    def start(self) -> None:
        self.early_sums.start(sends=not self.put_off.asked)
        if torch.is_grad_enabled():
            self.put_off.begin(self.weights)
        super().start()

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with super().unsharded() as module:
            if not torch.is_grad_enabled() or not self._in_buckets:
                yield module
                return
            if self._wrapped is None:  # made when the leaves are in place: DDP keeps the parameters that it finds
                self.shards.gradients_move()  # to its buckets
                self._wrapped = _wrap(module, mesh=self._mesh, hosts=self._num_hosts)
            self._under_backward = True
            try:
                yield self._wrapped
            finally:
                self._under_backward = False

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        """Yields the module itself."""
        return super().unsharded()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if not self._under_backward:
            return super().micro_batch(last=last)
        return nullcontext() if last or self._wrapped is None else self._wrapped.no_sync()

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        total = super().forward_backward(callee, micro_batches, loss_of)
        if self._in_buckets is None:
            self._in_buckets = not any_rank(bool(self.unused()), mesh=self._mesh)
        return total

    def finish(self) -> None:
        if self.put_off.asked:
            self.shards.unused_count_as_zero()  # other replicas may have used them, and all have gradients of the same
        elif not self._under_backward:
            self.early_sums.send_rest()
            self.early_sums.wait()
            for leaf in self.shards.leaves.values() if self.loss_scale != 1.0 else ():
                if leaf.grad is not None:
                    leaf.grad.div_(self.loss_scale)  # the mean, as torch's DDP leaves it
        elif self._wrapped is not None and not sums_are_complete(self._wrapped):
            raise ConfigError(
                "ddp: the last micro-batch of this step leaves out weights that the first step used, and torch's DDP, "
                "which was set up by that, has not summed gradients. Let every micro-batch use the same weights, or "
                "call model(...) and loss.backward() in place of forward_backward, from the first step on"
            )
        super().finish()
        self.put_off.end(self.weights)


def bucket_bytes(num_bytes: int, *, hosts: int) -> float | None:
    """Bytes of gradients that leave together between hosts: an eighth of all, or as many as DDP has by default.

    What leaves last is hidden by nothing, so it should be little. Within a host, None: DDP's default, as it is.

    Args:
        num_bytes: of all.
        hosts: number of those of the ranks that sum them.
    """
    return None if hosts == 1 else min(_BUCKET_BYTES, num_bytes / 8)


def bucket_mb(module: nn.Module, *, hosts: int) -> float | None:
    """The same for torch's DDP over a module, in its units (MiB)."""
    num_bytes = bucket_bytes(sum(p.nbytes for p in module.parameters() if p.requires_grad), hosts=hosts)
    return None if num_bytes is None else num_bytes / 2**20


def _wrap(module: nn.Module, *, mesh: DeviceMesh, hosts: int) -> DistributedDataParallel:
    module._ddp_params_and_buffers_to_ignore = []  # type: ignore[assignment]  # a parallel module refuses other wrappers
    try:
        return DistributedDataParallel(
            module,
            process_group=mesh.get_group(),
            gradient_as_bucket_view=True,
            init_sync=False,
            forward_sync_buffers=False,
            bucket_cap_mb=bucket_mb(module, hosts=hosts),
        )
    finally:
        del module._ddp_params_and_buffers_to_ignore


class ReplicatedModel(OuterShardedModel):
    """Another strategy's model, once per replica: its own gradients are summed over the replicas.

    The sums leave under the last backward of a step where that strategy says when gradients are complete.
    """

    def __init__(self, inner: ShardedModel, *, mesh: DeviceMesh, device: torch.device) -> None:
        super().__init__(inner)
        self.early_sums = inner.summed_by(_apart(AxisGroup.along(mesh, "ddp"), device=device).all_reduce_later)
        self._earlier: list[EarlierGradient] = []
        self.loss_scale = inner.loss_scale
        replica = mesh.get_local_rank()
        self.put_off = PutOffSums(0.0 if replica else 1.0)
        self.weights = {
            name: replace(
                held,
                num_holders=held.num_holders * mesh.size(),
                holder=held.holder + held.num_holders * replica,
                is_summed=partial(self.put_off.is_summed, name),
            )
            for name, held in inner.weights.items()
        }

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded()

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded_for_calls()

    def start(self) -> None:
        self.early_sums.start(sends=not self.put_off.asked)
        self._earlier = []
        if torch.is_grad_enabled():
            self.put_off.begin(self.weights)
            # Gradients that the user has not cleared are summed over the replicas already, and must not be once more;
            # nor may those that are due be, while they are frozen.
            there = [held for held in self.weights.values() if held.parameter.grad is not None]
            apart = [held for held in there if held.is_summed() or not held.parameter.requires_grad]
            self._earlier = [EarlierGradient(held) for held in apart]
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
        self.early_sums.send_rest()
        self.early_sums.wait()
        # After the sum, which also runs over the buffers of weights that this step has not used.
        for earlier in self._earlier:
            earlier.add_back()
        self._earlier = []
        self.put_off.end(self.weights)

    def gradients(self) -> list[Tensor]:
        return self._inner.gradients()


def _apart(axis_group: AxisGroup, *, device: torch.device) -> AxisGroup:
    """The same ranks with a process group of their own where theirs is the world's, which a step's other sums use.

    Sums that leave under backward would come between these, at other places on each rank.
    """
    if axis_group.group is None or axis_group.group is not dist.group.WORLD:
        return axis_group
    timeout_s = group_timeout(axis_group.group, device=device).total_seconds()
    return replace(axis_group, group=message_group(axis_group.ranks, timeout_s=timeout_s))


def apply(setup: Setup) -> ShardedModel:
    """Holds the model whole on every rank, or replicates the inner strategy's model."""
    if setup.inner is not None:
        return ReplicatedModel(setup.inner, mesh=setup.mesh, device=setup.device)
    setup.prepare_blocks()
    return DDPModel(setup)

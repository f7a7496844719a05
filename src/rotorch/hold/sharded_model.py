"""`ShardedModel`: one strategy's model on this rank, at rest and in a pass; the boundary below `ParallelModel`.

[Note: unsharding]
    At rest the module's parameters are DTensors, so optimizers, clipping and checkpoints work as on any model. A
    forward pass needs plain tensors. `ShardedModel.unsharded()` puts them into the module for the time of a pass and
    takes them back afterwards, also after an exception: between passes the module always has its DTensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from rotorch.comm.observe import Observable, Observer
from rotorch.comm.status_word import StatusWord
from rotorch.core.spec import Unit, UnitKind, Weight
from rotorch.hold.early_sums import EarlySums, Part, SumLater
from rotorch.hold.put_off import PutOffSums
from rotorch.hold.sharded_weights import ShardedWeights
from rotorch.models.losses import Batch
from rotorch.shard.sharded_weight import ShardedWeight

Result = TypeVar("Result")


class ShardedModel(Observable, ABC):
    """One strategy's model on this rank: it is held in shards, and unsharded for a pass.

    `strategies/<kind>/apply.py` subclasses it.
    """

    weights: dict[str, ShardedWeight]
    """Every weight of the spec by name, in the module's order; on all ranks the same names."""

    loss_scale: float = 1.0
    """The loss is multiplied by this before backward (for libraries that average gradients over ranks)."""

    status: StatusWord | None = None
    """Status word to which this rank writes its position in a step, if it is read."""

    no_plain_call: str | None = None
    """The reason why a user's own loop cannot call the model, and what to write instead; None if it can."""

    early_sums: EarlySums | None = None
    """Sums of its gradients over replicas, if there are any (see `summed_by`): they leave while backward goes on."""

    put_off: PutOffSums | None = None
    """Sums over replicas that steps may leave to a later one; None if it has none."""

    calls_start_at_root: bool = False
    """True if a part that is called by itself needs weights that the module's own hooks gather."""

    @property
    def routed(self) -> tuple[tuple[str, int, int], ...]:
        """Of the last pass, pairs of tokens and experts that travelled: `MicroBatch.routed`; none if experts travel."""
        return ()

    @property
    def uncounted_bytes(self) -> int:
        """Memory of the device that it has past torch's allocator: windows of symmetric memory."""
        return 0

    @property
    def order_hash(self) -> int:
        """`Ring.order_hash` of the units that this rank has run since `start`; 0 without a ring."""
        return 0

    @abstractmethod
    def unsharded(self) -> AbstractContextManager[nn.Module]:
        """Puts plain tensors into the module for one pass and yields the module to call (see [Note: unsharding]).

        Takes them back on leaving, also after an exception.
        """

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        """As `unsharded`, for passes in a user's own loop, where a forward may come without a backward."""
        return self.unsharded()

    def start(self) -> None:
        """Begins a step: makes weights visible to other ranks as the optimizer left them. All ranks."""
        return None

    def computed_again(self) -> Callable[[], AbstractContextManager[None]]:
        """Called in forward; the result makes contexts in which backward runs a part of it again, as it runs now."""
        return nullcontext

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Encloses the forward and backward of one micro-batch."""
        return nullcontext() if self.early_sums is None else self.early_sums.micro_batch(last=last)

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        """Runs all micro-batches of a step, between `start` and `finish`: one after another, unless overridden.

        Args:
            callee: the module that `unsharded` gave.
            micro_batches: this rank's.
            loss_of: the forward, down to the loss.

        Returns:
            This rank's losses, summed, float64, 0-dim, on the losses' device: nothing in a step waits for their values.
            Of ranks that share a batch the mean counts.
        """
        total = torch.zeros((), dtype=torch.float64)
        for number, micro_batch in enumerate(micro_batches):
            if self.status is not None:
                self.status.micro_batch = number + 1
            with self.micro_batch(last=number == len(micro_batches) - 1):
                loss = loss_of(callee, micro_batch)
                # No multiplication by 1: it would be one more kernel, and one more node in the graph.
                (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()
                # Detached: the graph of a micro-batch must go before the next one is made.
                total = total.to(loss.device) + loss.detach().double()
        return total

    def forward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], run: Callable[[nn.Module, Batch], Result]
    ) -> list[Result]:
        """Runs forwards without gradients, after `start`; returns the results of `run(callee, micro_batch)`."""
        results = []
        for number, micro_batch in enumerate(micro_batches):
            if self.status is not None:  # of a model without blocks to mark, nothing else says that it gets on
                self.status.micro_batch = number + 1
            results.append(run(callee, micro_batch))
        if self.status is not None:
            self.status.micro_batch = 0
        return results

    @property
    def computed(self) -> Iterable[str]:
        """Names of the weights that this rank's passes compute with; all of them, unless other ranks have some."""
        return self.weights

    def copies(self) -> list[Tensor]:
        """This rank's copies of weights, in the dtype that passes compute in, that have memory now."""
        copies = (copy for held in self.weights.values() for copy in held.copies)
        return [copy for copy in copies if copy.untyped_storage().nbytes()]

    def unused(self) -> list[str]:
        """Names of those that no backward of this rank's step has reached; asked before `finish`, which makes zeros."""
        return []

    def finish(self) -> None:
        """Completes gradients after the last backward of a step, and attaches them to the DTensors."""
        return None

    def make_deferred_additions(self) -> None:
        """Makes additions to gradients that were put off: this rank waits next, and others may wait for these."""
        return None

    def gradients(self) -> list[Tensor]:
        """This rank's gradients after `finish`, as few plain tensors as possible (flat buffers).

        Writing to them changes the gradients. The same order on all ranks.
        """
        return [held.local_grad for held in self.weights.values() if held.local_grad is not None]

    def summed_by(self, sum_later: SumLater) -> EarlySums:
        """Has code around this model sum its gradients over ranks, in place. Called once, and by all these ranks.

        Returns:
            The sums: to be started before a step, sent and waited for behind `finish`.
        """
        self.early_sums = EarlySums([*self._parts(sum_later), Part((), self._gradients_behind_backward, sum_later)])
        return self.early_sums

    def _parts(self, sum_later: SumLater) -> list[Part]:
        """Gradients that are complete before a backward has ended, those that it completes first in front."""
        return []

    def _gradients_behind_backward(self) -> list[Tensor]:
        """Gradients that are in no part."""
        return self.gradients()

    def values_changed(self) -> None:
        """Takes note that `weights[..].local` were written from outside (initialised, loaded)."""
        return None

    def write_status_to(self, status: StatusWord) -> list[str]:
        """Makes this rank write its position to `status` from now on. This rank only.

        Returns:
            Names of the units in those positions, by number; none if only other objects write units.
        """
        self.status = status
        return []

    def close(self) -> None:
        """Frees resources of process groups and of the operating system. All ranks."""
        return None


class SimpleShardedModel(ShardedModel):
    """A sharded model of nothing but `ShardedWeights`: all of `single`; others add operations of their own to it.

    Args:
        module: the model.
        shards: of its weights.
    """

    def __init__(self, module: nn.Module, shards: ShardedWeights) -> None:
        self.module = module
        self.shards = shards
        self.weights = shards.held
        self._in_parts: set[str] = set()
        """Weights whose gradients are sent by `early_sums` in parts."""

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with self.shards.unsharded():
            yield self.module

    def _parts_of_leaves(
        self, blocks: Sequence[Sequence[str]], sum_later: SumLater, *, behind: Iterable[str]
    ) -> list[Part]:
        """Gradients that are complete when autograd has added to them, block by block, but for those in `behind`."""
        leaves, behind = self.shards.leaves, set(behind)
        early = [tuple(n for n in names if n not in behind and leaves[n].requires_grad) for names in reversed(blocks)]
        self._in_parts = {name for names in early for name in names}
        return [
            Part(names, partial(self._gradients_of, names), sum_later, leaves=[leaves[n] for n in names])
            for names in early
            if names
        ]

    def _gradients_of(self, names: Sequence[str]) -> list[Tensor]:
        self.shards.add_earlier(names)
        found = (self.shards.memory.gradient(self.weights[name]) for name in names)
        return [gradient for gradient in found if gradient is not None]

    def _gradients_behind_backward(self) -> list[Tensor]:
        if not self._in_parts:
            return self.gradients()
        held = (held for name, held in self.weights.items() if name not in self._in_parts)
        return [gradient for each in held if (gradient := each.local_grad) is not None]

    def start(self) -> None:
        self.shards.start()

    def unused(self) -> list[str]:
        return self.shards.unused()

    def finish(self) -> None:
        self.shards.finish()

    def gradients(self) -> list[Tensor]:
        return self.shards.gradients()


class ShardedStages(ShardedModel):
    """A sharded model that a pipeline can have inside: of this rank's stages, unsharded for a whole step."""

    weight_gradients_wait: bool = False
    """True if a pipeline may put gradients of linear layers off: the module computes with plain, whole weights."""

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        """The placements of a weight of any stage over this strategy's own axes: equal on all ranks of the pipeline.

        By default over one axis, which cuts all but replicated weights.

        Args:
            weight: in `unit`.
            unit: whose stages may all be on other ranks.
        """
        return (Replicate() if unit.kind is UnitKind.REPLICATED else Shard(0),)

    def unshard(self, stage: int) -> None:
        """Starts gathering a stage's weights, if they are gathered at all; called before a pipeline uses the stage."""
        return None

    def computes(self, stage: int, *, backward: bool) -> None:
        """Waits for everything that a computation with a stage needs; called right before it, after `unshard`.

        Args:
            stage: number of the stage.
            backward: True if gradients of weights will be made.
        """
        return None

    def computed_backward(self, stage: int) -> None:
        """Makes deferred additions after a stage's backward: this rank may wait next, so no rank may wait for it."""
        return None

    def reshard(self, stage: int) -> None:
        """Frees a stage's gathered weights, after a pipeline has computed with the stage."""
        return None

    def sum_gradients(self, stage: int) -> None:
        """Sums gradients after a stage's last backward of some micro-batches; each rank keeps its part."""
        return None

    def borrowed_ready(self) -> None:
        """Takes note that the values of all borrowed weights have come. All ranks that share this rank's stages."""
        return None


class OuterShardedModel(ShardedModel):
    """A sharded model around another one, `inner`, which has the transport and its buffers."""

    def __init__(self, inner: ShardedModel) -> None:
        self._inner = inner
        self.no_plain_call = inner.no_plain_call
        self.calls_start_at_root = inner.calls_start_at_root

    @property
    def computed(self) -> Iterable[str]:
        return self._inner.computed

    def computed_again(self) -> Callable[[], AbstractContextManager[None]]:
        return self._inner.computed_again()

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded()

    def start(self) -> None:
        self._inner.start()

    def unused(self) -> list[str]:
        return self._inner.unused()

    def finish(self) -> None:
        self._inner.finish()

    def gradients(self) -> list[Tensor]:
        return self._inner.gradients()

    def make_deferred_additions(self) -> None:
        self._inner.make_deferred_additions()

    def values_changed(self) -> None:
        self._inner.values_changed()

    def write_status_to(self, status: StatusWord) -> list[str]:
        super().write_status_to(status)
        return self._inner.write_status_to(status)

    @property
    def transport(self) -> str | None:
        return self._inner.transport

    @property
    def transport_within(self) -> str | None:
        return self._inner.transport_within

    @property
    def num_hosts(self) -> int | None:
        return self._inner.num_hosts

    @property
    def routed(self) -> tuple[tuple[str, int, int], ...]:
        return self._inner.routed

    @property
    def order_hash(self) -> int:
        return self._inner.order_hash

    def copies(self) -> list[Tensor]:
        return self._inner.copies()

    def slots(self) -> list[Tensor]:
        return self._inner.slots()

    @property
    def uncounted_bytes(self) -> int:
        return self._inner.uncounted_bytes

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        return self._inner.observed(observer)

    def close(self) -> None:
        self._inner.close()

"""`Holding`: how a strategy holds a model on this rank, and unshards it for a pass; the boundary below `ParallelModel`.

[Note: unsharding]
    At rest the module's parameters are DTensors, so optimizers, clipping and checkpoints work as on any model. A
    forward pass wants plain tensors. `Holding.unsharded()` puts them into the module for the time of a pass and takes
    them back afterwards, also after an exception: the weights are always home.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from rotorch.comm.observe import Observer
from rotorch.comm.status_word import StatusWord
from rotorch.hold.sharded_weights import ShardedWeights
from rotorch.models.losses import Batch
from rotorch.shard.sharded_weight import ShardedWeight

Result = TypeVar("Result")


class Holding(ABC):
    """How one strategy holds the model on this rank and unshards it for a pass.

    `strategies/<kind>/apply.py` subclasses it.
    """

    weights: dict[str, ShardedWeight]
    """Every weight of the spec by name, in the module's order; on all ranks the same names."""

    loss_scale: float = 1.0
    """The loss is multiplied by this before backward (for libraries that average gradients over ranks)."""

    status: StatusWord | None = None
    """Where this rank writes down what it is at, if anybody wants to know."""

    no_plain_call: str | None = None
    """Why the model cannot be called in a loop of the user's own, and what to write instead; None if it can."""

    @abstractmethod
    def unsharded(self) -> AbstractContextManager[nn.Module]:
        """Puts plain tensors into the module for one pass and yields what to call (see [Note: unsharding]).

        Takes them back on leaving, also after an exception.
        """

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        """As `unsharded`, for passes in a loop of the user's own: a forward need not be followed by its backward."""
        return self.unsharded()

    def start(self) -> None:
        """Before the first micro-batch of a step, on all ranks: weights as the optimizer left them become visible."""
        return None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch."""
        return nullcontext()

    def forward_backward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> Tensor:
        """Runs all micro-batches of a step, between `start` and `finish`: one after another, unless overridden.

        Args:
            callee: what `unsharded` gave.
            micro_batches: this rank's.
            loss_of: the forward, down to the loss.

        Returns:
            This rank's losses, summed, float64, 0-dim. Of ranks that share a batch the mean counts.
        """
        total = torch.zeros((), dtype=torch.float64)
        for number, micro_batch in enumerate(micro_batches):
            if self.status is not None:
                self.status.micro_batch = number + 1
            with self.micro_batch(last=number == len(micro_batches) - 1):
                loss = loss_of(callee, micro_batch)
                (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()
                total += loss.detach().double().cpu()
        return total

    def forward(
        self, callee: nn.Module, micro_batches: Sequence[Batch], run: Callable[[nn.Module, Batch], Result]
    ) -> list[Result]:
        """Runs forwards without gradients, after `start`; returns what `run(callee, micro_batch)` gives for each."""
        results = []
        for number, micro_batch in enumerate(micro_batches):
            if self.status is not None:  # of a model without blocks to mark, nothing else says that it gets on
                self.status.micro_batch = number + 1
            results.append(run(callee, micro_batch))
        if self.status is not None:
            self.status.micro_batch = 0
        return results

    def finish(self) -> None:
        """After the last backward of a step: completes gradients and attaches them to the DTensors."""
        return None

    def gradients(self) -> list[Tensor]:
        """After `finish`: this rank's gradients, as few plain tensors as possible (flat buffers).

        Writing to them changes the gradients. The same order on all ranks.
        """
        return [held.local_grad for held in self.weights.values() if held.local_grad is not None]

    def values_changed(self) -> None:
        """After `weights[..].local` were written from outside (initialised, loaded)."""
        return None

    def write_status_to(self, status: StatusWord) -> list[str]:
        """From now on this rank writes down on `status` what it is at. This rank only.

        Returns:
            The names of the units that it speaks of, by number; none if it leaves units to others.
        """
        self.status = status
        return []

    @property
    def transport(self) -> str | None:
        """What carries slices from rank to rank, where there is a choice."""
        return None

    def slots(self) -> list[Tensor]:
        """Buffers that slices of a ring pass through; they are there from step to step."""
        return []

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Tells `observer` what this rank computes with and what it waits for, within the block. This rank only."""
        return nullcontext()

    def close(self) -> None:
        """Frees what the process group or the operating system holds for it. All ranks."""
        return None


class ShardsHolding(Holding):
    """A Holding of nothing but `ShardedWeights`: all of `single`; others add operations of their own to it.

    Args:
        module: the model.
        shards: of its weights.
    """

    def __init__(self, module: nn.Module, shards: ShardedWeights) -> None:
        self.module = module
        self.shards = shards
        self.weights = shards.held

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with self.shards.unsharded():
            yield self.module

    def start(self) -> None:
        self.shards.start()

    def finish(self) -> None:
        self.shards.finish()

    def gradients(self) -> list[Tensor]:
        return self.shards.gradients()


class StageHolding(Holding):
    """A Holding that a pipeline can have inside: it holds the stages of this rank and is unsharded for a whole step."""

    weight_gradients_wait: bool = False
    """Whether a pipeline may put gradients of linear layers off: the module computes with plain, whole weights."""

    def unshard(self, stage: int) -> None:
        """Before a pipeline computes with a stage: its weights are sent for, where they are gathered at all."""
        return None

    def computes(self, stage: int, *, backward: bool) -> None:
        """Right before a computation with a stage, after `unshard`: what it needs must have come.

        Args:
            stage: which stage.
            backward: whether gradients of weights will be made.
        """
        return None

    def computed_backward(self, stage: int) -> None:
        """Right after a backward of a stage: this rank may wait for other stages now, so nobody may wait for it."""
        return None

    def reshard(self, stage: int) -> None:
        """After a pipeline has computed with a stage: what was gathered is freed."""
        return None

    def sum_gradients(self, stage: int) -> None:
        """After a stage's last backward of some micro-batches: gradients are summed and each rank keeps its part."""
        return None

    def borrowed_ready(self) -> None:
        """After the values of all weights that this rank borrows have come. All ranks that share its stages."""
        return None


class OuterHolding(Holding):
    """A Holding around another one, `inner`, which carries slices and has their buffers."""

    def __init__(self, inner: Holding) -> None:
        self._inner = inner
        self.no_plain_call = inner.no_plain_call

    def values_changed(self) -> None:
        self._inner.values_changed()

    def write_status_to(self, status: StatusWord) -> list[str]:
        super().write_status_to(status)
        return self._inner.write_status_to(status)

    @property
    def transport(self) -> str | None:
        return self._inner.transport

    def slots(self) -> list[Tensor]:
        return self._inner.slots()

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        return self._inner.observed(observer)

    def close(self) -> None:
        self._inner.close()

"""A Holding of nothing but `ShardedWeights`: all of `single`; others add operations of their own to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rotorch.hold.sharded_weights import ShardedWeights
from rotorch.parallel_model import Holding


class ShardsHolding(Holding):
    """One rank's shards of a module's weights.

    Args:
        module: the model.
        shards: of its weights.
    """

    def __init__(self, module: nn.Module, shards: ShardedWeights) -> None:
        self.module = module
        self.shards = shards
        self.weights = shards.held

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        with self.shards.unsharded():
            yield self.module

    def start(self) -> None:
        self.shards.start()

    def finish(self) -> None:
        self.shards.finish()

    def gradients(self) -> list[Tensor]:
        return self.shards.gradients()

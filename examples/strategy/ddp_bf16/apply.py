"""Model of `ddp_bf16`: replicas, and one sum of their gradients at the end of a step."""

from __future__ import annotations

from rotorch.comm.collectives import all_reduce_each
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement


class DDPBF16Model(SimpleShardedModel):
    """The whole model on every rank; gradients meet when the step is done."""

    def __init__(self, setup: Setup) -> None:
        placements = [ShardPlacement.whole(weight, mesh=setup.mesh) for weight in setup.spec.weights]
        super().__init__(setup.module, setup.shards(placements))
        self._mesh, self._rounds = setup.mesh, setup.strategy.bfloat16

    def finish(self) -> None:
        self.shards.unused_count_as_zero()  # others may have used what this rank's passes did not
        gradients = [leaf.grad for leaf in self.shards.leaves.values() if leaf.grad is not None]
        travelling = [gradient.bfloat16() if self._rounds else gradient for gradient in gradients]
        all_reduce_each(travelling, mesh=self._mesh)
        for gradient, summed in zip(gradients, travelling, strict=True):
            gradient.copy_(summed)
        super().finish()


def apply(setup: Setup) -> ShardedModel:
    """Holds the model whole on every rank."""
    setup.prepare_blocks()  # compiled, if the user asks for it
    return DDPBF16Model(setup)

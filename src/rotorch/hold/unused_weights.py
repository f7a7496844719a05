"""Weights that no rank's backward has reached in a step: they get no gradient, as in one process.

Optimizers pass a weight without a gradient by; one with zeros AdamW would decay, and move by its old momentum. But sums
over ranks need a gradient of each weight, so a rank that has not reached one gives zeros. At the end of a backward
ranks add up how many weights each of them has not reached, in a message that they send anyway. Only if there are any, a
second message says which, and those that no rank has reached lose their zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_sum
from rotorch.hold.sharded_model import ShardedModel


class UnusedWeights:
    """The weights that one step does not use. Made on all ranks right before the step.

    Args:
        sharded: the model.
        mesh: of all its ranks.
    """

    def __init__(self, sharded: ShardedModel, *, mesh: DeviceMesh) -> None:
        self._sharded, self._mesh = sharded, mesh
        # A gradient of earlier steps stays as it is, to the bit: zeros are added to it.
        self._without = {name for name, held in sharded.weights.items() if held.parameter.grad is None}
        self._here: set[str] = set()

    def count(self) -> int:
        """Number of weights that this rank's backward has not reached; after it, before `ShardedModel.finish`."""
        self._here = set(self._sharded.unused())
        # A rank without a part of a weight computes nothing with it: others say whether it is used.
        return sum(1 for name in self._here if self._sharded.weights[name].local.numel())

    def drop(self, total: int) -> None:
        """Takes the gradients of weights that no rank has used away; after `ShardedModel.finish`. All ranks.

        Args:
            total: the sum of `count` over the ranks.
        """
        if not total:
            return
        weights, used = self._sharded.weights, set(self._sharded.computed) - self._here
        # Something that is no pass has given it a gradient: a penalty on weights, where these are no copies.
        used |= {name for name in self._here if _has_values(weights[name].local_grad)}
        num_users = all_reduce_sum(torch.tensor([name in used for name in weights], dtype=torch.int64), mesh=self._mesh)
        for (name, held), users in zip(weights.items(), num_users.tolist(), strict=True):
            if not users and name in self._without:
                held.parameter.grad = None


def _has_values(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())

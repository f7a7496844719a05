"""The ranks that share sequences, and their exchange of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.strategy import Strategy
from rotorch.core.zigzag import KeyExchange
from rotorch.hold.sharded_model import ShardedModel
from rotorch.models.shared_sequence import SharedSequence
from rotorch.ops.fetch_keys import fetch_keys


def share_sequences(
    module: nn.Module, strategies: Sequence[Strategy], *, mesh: DeviceMesh, sharded: ShardedModel, device: torch.device
) -> SharedSequence | None:
    """Makes this rank's part in computing sequences; None if every rank has whole ones. All ranks of the job.

    Args:
        module: the model.
        strategies: of its layout; at most one of them shares sequences.
        mesh: of all ranks.
        sharded: of the outermost strategy.
        device: of this rank.
    """
    axes = [(axis, size) for strategy in strategies for axis, size in strategy.context_axes.items()]
    if not axes:
        return None
    ((axis, num_ranks),) = axes
    axis_group = AxisGroup.of_neighbours(mesh, axis, num_ranks, device=device)

    def fetch(x: Tensor, exchange: KeyExchange) -> Tensor:
        return fetch_keys(x, exchange=exchange, axis_group=axis_group, before_waiting=sharded.make_deferred_additions)

    return SharedSequence(
        module, rank=axis_group.position, num_ranks=num_ranks, fetch=fetch, all_equal=axis_group.all_equal
    )

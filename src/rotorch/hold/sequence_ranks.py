"""The ranks that share sequences, and their exchange of keys and values, or of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.strategy import Strategy
from rotorch.models.shared_sequence import SharedSequence
from rotorch.ops.redistribute import redistribute
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.strategies import sequence_ranks


def share_sequences(
    module: nn.Module,
    strategies: Sequence[Strategy],
    *,
    mesh: DeviceMesh,
    before_waiting: Callable[[], None],
    device: torch.device,
) -> SharedSequence | None:
    """Makes this rank's part in computing sequences; None if every rank has whole ones. All ranks of the job.

    Args:
        module: the model.
        strategies: of its layout; at most one of them shares sequences.
        mesh: of all ranks.
        before_waiting: called before this rank waits for others (see `redistribute`).
        device: of this rank.
    """
    shared_by = sequence_ranks(strategies)
    if shared_by.num_ranks == 1:
        return None
    ((axis, num_ranks),) = (item for strategy in strategies for item in strategy.context_axes.items())
    axis_group = AxisGroup.of_neighbours(mesh, axis, num_ranks, device=device)
    return SharedSequence(
        module,
        rank=axis_group.position,
        num_ranks=num_ranks,
        exchange=partial(redistribute, axis_group=axis_group, before_waiting=before_waiting),
        by_heads=shared_by.by_heads,
        fetches_again=shared_by.fetches_again,
        all_equal=axis_group.all_equal,
        interleaved=any(isinstance(strategy, StageStrategy) for strategy in strategies),
    )

"""The part that rings over point-to-point messages share: groups of ranks, home buffers, the exchange with a neighbour.

Weights and gradients travel in groups of their own, so neither waits for the other or for anyone's collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from rotorch.comm.home_gradients import ComingGradients
from rotorch.comm.ring import Ring, RingSetup
from rotorch.comm.wire import Wire


class MessageRing(Ring):
    """A ring whose slices and gradients are sent.

    Args:
        setup: ranks and slices.
        wire: form in which slices travel; by default as they visit.
        rooms: elements of each item's home buffer, where other slices take turns in it; by default its own slice's.
    """

    moves_weights = True
    defers_adds = False  # a slot must be free for the next unit
    name = "send_receive"

    def __init__(self, setup: RingSetup, *, wire: Wire | None, rooms: Sequence[int] | None = None) -> None:
        super().__init__(setup)
        self._wire = wire or Wire(home_dtype=self.dtype, dtype=self.wire_dtype)
        dtype, device = setup.dtype, setup.device
        # Two groups: messages of one group arrive in order, and a fetch that runs ahead must not hold a gradient back.
        self._weight_group, self._gradient_group = (
            message_group(setup.mesh.mesh.tolist(), timeout_s=setup.timeout_s) for _ in range(2)
        )
        for group in (self._weight_group, self._gradient_group):
            connect(group, device=device)
        home = [n[self.position] for n in self.numels]
        # In place, the home buffer must also hold the largest slice that takes a turn in it.
        starts = [0, *accumulate(rooms or home)]
        self._home_buffer = torch.empty(starts[-1], dtype=dtype, device=device)
        self._home_weights = [self._home_buffer[s : s + numel] for s, numel in zip(starts, home, strict=False)]
        self._home_gradients = ComingGradients(
            home, later_parts=setup.later_parts, make=partial(torch.empty, dtype=dtype, device=device)
        )
        self._largest = max((max(n) for n in self.numels), default=0)


def message_group(ranks: Sequence[int], *, timeout_s: float) -> dist.ProcessGroup | None:
    """Returns a group of a ring's ranks for messages of one kind; None for a single rank. All of them.

    It lives as long as the process: torch names a group after its ranks, and a new one of the same name would meet the
    old one's addresses in the store and fail to connect.
    """
    return None if len(ranks) == 1 else new_group(ranks, timeout=timedelta(seconds=timeout_s))


def new_group(ranks: Sequence[int], *, timeout: timedelta) -> dist.ProcessGroup:
    """Returns a new group of these ranks, which alone call it."""
    world: Any = dist.group.WORLD
    # Of a default group with a `device_id` NCCL splits its communicator, for which all of its ranks would have to come.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound


def connect(group: dist.ProcessGroup | None, *, device: torch.device) -> None:
    """Makes NCCL create a group's communicator now. All ranks of the group."""
    # For the first message all ranks would have to come, also those that have an empty slice.
    if group is not None and device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)

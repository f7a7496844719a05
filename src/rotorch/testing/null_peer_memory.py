"""Peer memory of one rank alone: its own window is every peer's, and every signal is one to itself.

It gives the operations, copies and host calls of one rank of a symmetric ring without the others; values mean nothing.
On a GPU its lanes are the streams that a ring has there, so that copies run beside products; they cross no link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import add_to_each
from rotorch.comm.transports.peer_memory import CudaLane, CudaMark, Lane


class NullLane:
    """A lane whose work is done when it is given.

    Attributes:
        num_calls: calls that the host has made: copies, sums, marks, waits and signals.
    """

    def __init__(self, copy_engine: Callable[[], AbstractContextManager[None]]) -> None:
        self._copy_engine = copy_engine
        self.num_calls = 0

    def mark(self) -> None:
        self.num_calls += 1

    def after(self, mark: Any) -> None:
        self.num_calls += 1

    def copy(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.num_calls += len(to)
        with self._copy_engine():
            for target, source in zip(to, sources, strict=True):
                target.copy_(source)

    def add(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.num_calls += 1
        add_to_each(to, sources)

    def signal(self, peer: int, *, channel: int) -> None:
        self.num_calls += 1

    def wait_signal(self, peer: int, *, channel: int) -> None:
        self.num_calls += 1

    def open(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _OwnSignals:
    """Signals of a rank to itself: each is a kernel that writes a flag, and waits for nobody."""

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros((), dtype=torch.int32, device=device)

    def put_signal(self, peer: int, channel: int) -> None:
        self._flag.fill_(1)

    def wait_signal(self, peer: int, channel: int) -> None:
        self._flag.fill_(0)


class NullPeerMemory:
    """A `PeerMemory` without peers.

    Args:
        mesh: the ring.
        device: of this rank.
        numel: elements of the window.
        dtype: of the window.
        copy_engine: makes a block for copies on CPU, which on a GPU a copy engine makes.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        numel: int,
        dtype: torch.dtype,
        copy_engine: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._device = device
        self.window = torch.empty(numel, dtype=dtype, device=device)
        self.is_counted = True
        self._lanes = [NullLane(copy_engine) for _ in range(3)]
        self.compute, self.fetches, self.hops = list[Lane](self._lanes)
        if device.type == "cuda":
            signals, streams = _OwnSignals(device), (None, *(torch.cuda.Stream(device, priority=-1) for _ in range(2)))
            self.compute, self.fetches, self.hops = (CudaLane(signals, device, stream) for stream in streams)

    @property
    def num_calls(self) -> int:
        """Calls of all lanes, on CPU."""
        return sum(lane.num_calls for lane in self._lanes)

    def of_peer(self, rank: int, start: int, numel: int) -> Tensor:
        return self.window[start : start + numel]

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        made = torch.empty(numel, dtype=dtype, device=self._device)
        for lane in (self.fetches, self.hops):
            if isinstance(lane, CudaLane):
                made.record_stream(lane.stream)
        return made

    def clear(self, channels: range) -> None:
        self._lanes[0].num_calls += 1

    def barrier(self) -> None:
        self._lanes[0].num_calls += 1

    def reached(self, mark: Any, *, timeout_s: float) -> bool:
        if isinstance(mark, CudaMark):
            mark.event.synchronize()
        return True

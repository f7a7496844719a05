"""Memory of other ranks' GPUs as this rank maps it, and the lanes on which copies, sums and signals run asynchronously.

The interface that a ring over symmetric memory needs of a device, and its CUDA implementation by torch's symmetric
memory. `rotorch.testing.peer_memory` implements it over files that CPU ranks map, and checks the order of all events.

[Note: windows]
    A window is memory of which every rank has an equally large one, mapped by all. Reading and writing a peer's window
    is a copy between addresses of this device (over NVLink, PCIe, or within a GPU that ranks share), which a copy
    engine makes while the multiprocessors compute.

[Note: lanes]
    A lane is a stream: its operations run in order, after the host has queued them. Lanes are ordered against each
    other only by `after(mark)`, which holds back later operations until all before the mark have run. A signal does the
    same from rank to rank. The host waits for none of it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import add_to_each, symmetric_backend, symmetric_empty, symmetric_rendezvous
from rotorch.comm.collectives import any_rank, gather_objects

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable of torch: 1 lets several ranks share a GPU, for tests and to measure memory, not for speed."""


class PeerMemoryUnavailable(Exception):
    """Raised where ranks cannot reach each other's memory; its text is the reason."""


class Lane(Protocol):
    """A sequence of its own of copies, sums and signals (see [Note: lanes]). Channels keep signals apart."""

    def mark(self) -> Any:
        """Marks all operations that this lane was given so far."""

    def after(self, mark: Any) -> None:
        """Holds back operations that this lane is given from now on until all before `mark` have run."""

    def copy(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copies each source, flat, to a tensor of its size and dtype: by copy engine."""

    def add(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Adds each source to a tensor of its size."""

    def signal(self, peer: int, *, channel: int) -> None:
        """Tells rank `peer` of the ring that all before this has run. It must have taken the last signal."""

    def wait_signal(self, peer: int, *, channel: int) -> None:
        """Holds back later operations until `peer` has signalled, and takes the signal."""

    def open(self) -> AbstractContextManager[Any]:
        """Within the block this lane is given several of these, and nothing else is given to the device."""

    def running(self) -> AbstractContextManager[Any]:
        """Within the block, what this process gives the device runs on this lane, behind all that it was given."""


class PeerMemory(Protocol):
    """This rank's window, those of its peers, and the lanes.

    Attributes:
        window: this rank's own, flat.
        is_counted: the window is part of what torch's allocator says that it has given.
        compute: the lane on which the model computes.
        fetches: a lane for copies that bring weights.
        hops: a lane for sums and copies of gradients.
    """

    window: Tensor
    is_counted: bool
    compute: Lane
    fetches: Lane
    hops: Lane

    def of_peer(self, rank: int, start: int, numel: int) -> Tensor:
        """Elements of the window of rank `rank` of the ring, flat."""

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Memory of this rank alone that all lanes may use."""

    def clear(self, channels: range) -> None:
        """Takes, on the compute lane, all signals that this rank has got on these channels."""

    def barrier(self) -> None:
        """Holds back later operations of the compute lane until all ranks have come here."""

    def reached(self, mark: Any, *, timeout_s: float) -> bool:
        """Waits on the host until all before `mark` have run; returns False if that takes longer than `timeout_s`."""


class CudaMark:
    """A recorded event. Its memory of the driver is used again once nobody can ask for it any more."""

    __slots__ = ("_unused", "event")

    def __init__(self, stream: torch.cuda.Stream, unused: list[torch.cuda.Event]) -> None:
        self.event, self._unused = unused.pop() if unused else torch.cuda.Event(), unused
        self.event.record(stream)

    def __del__(self) -> None:
        # Waits that were queued on it go by what it was recorded for, also when it is recorded again.
        self._unused.append(self.event)


class CudaLane:
    """A CUDA stream, or whichever is current. Changing the current one costs the host as much as a launch."""

    def __init__(self, handle: Any, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._handle, self._device, self._own = handle, device, stream
        self._is_open = False
        self._unused: list[torch.cuda.Event] = []

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)

    def mark(self) -> CudaMark:
        return CudaMark(self.stream, self._unused)

    def after(self, mark: CudaMark) -> None:
        self.stream.wait_event(mark.event)

    @contextmanager
    def open(self) -> Iterator[None]:
        if self._own is None or self._is_open:
            yield
            return
        self._is_open = True
        try:
            with torch.cuda.stream(self._own):
                yield
        finally:
            self._is_open = False

    def copy(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with self.open():
            for target, source in zip(to, sources, strict=True):  # all at once would be a kernel, not copy engines
                target.copy_(source, non_blocking=True)

    def add(self, to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with self.open():
            add_to_each(to, sources)

    def signal(self, peer: int, *, channel: int) -> None:
        with self.open():
            self._handle.put_signal(peer, channel)

    def wait_signal(self, peer: int, *, channel: int) -> None:
        with self.open():
            self._handle.wait_signal(peer, channel)  # without a timeout, which would end the CUDA context

    def running(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class CudaPeerMemory:
    """Windows by `torch.distributed._symmetric_memory`. All ranks of `mesh` must make it together.

    Args:
        mesh: the ring.
        device: of this rank.
        numel: elements of each window; the same on all ranks.
        dtype: of the windows.

    Raises:
        PeerMemoryUnavailable: on all ranks alike.
    """

    def __init__(self, *, mesh: DeviceMesh, device: torch.device, numel: int, dtype: torch.dtype) -> None:
        reason = why_no_peer_memory(mesh=mesh, device=device)
        if reason:
            raise PeerMemoryUnavailable(reason)
        self._device, self._dtype, self._size = device, dtype, mesh.size()
        try:
            # May fail on one rank only: all learn of it before one raises, or others would wait in the rendezvous.
            before = torch.cuda.memory_allocated(device)
            self.window = symmetric_empty(numel, dtype=dtype, device=device)
            self.is_counted = torch.cuda.memory_allocated(device) - before >= self.window.nbytes
        except RuntimeError as error:  # out of memory, or a driver that cannot share memory
            reason = str(error).splitlines()[0]
        if any_rank(bool(reason), mesh=mesh):  # before anyone waits for the others' windows
            raise PeerMemoryUnavailable(reason or "another rank of the ring has no room for its window")
        try:
            self._handle = symmetric_rendezvous(self.window, mesh.get_group())
        except RuntimeError as error:  # a driver or a container that lets no memory be shared
            reason = str(error).splitlines()[0]
        if any_rank(bool(reason), mesh=mesh):
            raise PeerMemoryUnavailable(reason or "another rank of the ring cannot map its peers' windows")
        self._rank = self._handle.rank
        self.compute = CudaLane(self._handle, device)
        self.fetches, self.hops = (
            CudaLane(self._handle, device, torch.cuda.Stream(device, priority=-1)) for _ in range(2)
        )

    def of_peer(self, rank: int, start: int, numel: int) -> Tensor:
        return self._handle.get_buffer(rank, (numel,), self._dtype, start)

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        made = torch.empty(numel, dtype=dtype, device=self._device)
        for lane in (self.fetches, self.hops):
            made.record_stream(lane.stream)  # when it is freed, not before they are done with it
        return made

    def clear(self, channels: range) -> None:
        # Signals of a step that broke off would let this step's waits pass too early.
        pad = self._handle.get_signal_pad(  # one 32-bit flag per channel and sender
            self._rank, (self._size * len(channels),), torch.int32, self._size * channels.start
        )
        pad.zero_()

    def barrier(self) -> None:
        with torch.cuda.stream(self.compute.stream):
            self._handle.barrier(0)

    def reached(self, mark: CudaMark, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not mark.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-4)
        return True


# ------------------------------------------------------------- where it works


@dataclass(frozen=True)
class _RankDevice:
    """Host and GPU of a rank, and the reason why it can have no window, if there is one."""

    host: str
    device: int
    uuid: str
    reason: str


def why_no_windows(device: torch.device) -> str:
    """The reason why this process cannot have windows on `device`; empty if none is known.

    Reads properties, reserves nothing.
    """
    if device.type != "cuda":
        return f"it is for CUDA devices, not for {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    backend = symmetric_backend(device)
    if backend is None:
        return "this build of torch has no symmetric memory for CUDA"
    if backend != "CUDA":
        return f"torch's symmetric memory is set to the backend {backend}; unset TORCH_SYMMMEM or write CUDA"
    return ""


def why_no_peer_memory(*, mesh: DeviceMesh, device: torch.device) -> str:
    """The reason why the ranks of `mesh` cannot reach each other's memory, equal on all of them; empty if they can.

    All ranks of the mesh must call it.
    """
    reason = why_no_windows(device)
    uuid = "" if reason else str(torch.cuda.get_device_properties(device).uuid)
    index = (device.index if device.index is not None else torch.cuda.current_device()) if not reason else -1
    devices = gather_objects(_RankDevice(platform.node(), index, uuid, reason), mesh=mesh)
    why = next((each.reason for each in devices if each.reason), "") or _why_apart(devices)
    if not why:
        others = {each.device for each in devices} - {index}
        far = sorted(other for other in others if not torch.cuda.can_device_access_peer(device, other))
        why = f"cuda:{index} has no peer access to cuda:{far[0]}" if far else ""
    return next((found for found in gather_objects(why, mesh=mesh) if found), "")


def _why_apart(devices: list[_RankDevice]) -> str:
    """The reason against windows in the hosts and GPUs of the ranks; empty if there is none."""
    if len({each.host for each in devices}) > 1:
        return "the ranks are on several hosts"
    if len({each.device for each in devices}) == len(devices) or os.environ.get(OVERLAPPING) == "1":
        return ""
    if len({each.uuid for each in devices}) == len(devices):
        return "each rank sees its own GPU only (CUDA_VISIBLE_DEVICES); let every rank see all of them"
    return f"ranks share a GPU; {OVERLAPPING}=1 allows it, for tests"

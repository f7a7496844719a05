"""Choice of a ring's transport: memory that ranks share, on CPUs or GPUs of one host, or messages between any ranks."""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import any_rank, gather_objects, group_timeout_s
from rotorch.comm.fp8 import Fp8Wire
from rotorch.comm.ring import Ring, RingSetup
from rotorch.comm.shared_file import SharedMemoryUnavailable
from rotorch.comm.transports.grouped import GroupedRing
from rotorch.comm.transports.groups import FlatChunk
from rotorch.comm.transports.hierarchical import HierarchicalRing
from rotorch.comm.transports.hopping import HoppingRing
from rotorch.comm.transports.peer_memory import OVERLAPPING, PeerMemoryUnavailable
from rotorch.comm.transports.send_receive import SendReceiveRing
from rotorch.comm.transports.shared_memory import SharedMemoryRing
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.comm.wire import Wire
from rotorch.core.crossings import even_hosts, warning_of_crossings
from rotorch.core.errors import ConfigError

logger = logging.getLogger(__name__)


def make_ring(
    transport: str,
    *,
    mesh: DeviceMesh,
    numels: Sequence[Sequence[int]],
    numels_in_parts: Sequence[Sequence[int]] | None = None,
    later_parts: Collection[int] = (),
    numels_side_by_side: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype,
    device: torch.device,
    wire_dtype: torch.dtype | None = None,
    hop_dtype: torch.dtype | None = None,
    fp8: bool = False,
    buffering: str = "out_of_place",
    ahead: int = 1,
    num_hosts: int = 2,
    num_visits: Sequence[int] = (),
    flat_chunks: Sequence[Sequence[Sequence[FlatChunk]]] = (),
) -> Ring:
    """Makes the ring of a one-axis mesh. All its ranks call it and get the same transport.

    Args:
        mesh: the ring's ranks.
        transport: "auto", "shared_memory", "symmetric_memory", "hierarchical" or "send_receive". "auto" takes shared
            memory on CPU, of one host or of each, and symmetric memory on CUDA, if every rank can, and says why if not.
        numels: elements of each slice, `numels[item][index]`.
        numels_in_parts: the same where slices of tables come in parts (`Ring.takes_parts`).
        later_parts: the items among these that are later parts of a slice (`RingSetup.later_parts`).
        numels_side_by_side: the same for a ring whose items can be read whole, if whole weights are wanted there.
        dtype: of all slices at home, and of gradients.
        device: where slices lie.
        wire_dtype: of visiting slices, if another one.
        hop_dtype: of sums of gradients that are sent, if another one; out of place.
        fp8: messages carry slices in eight bits.
        buffering: of messages: "out_of_place", or "in_place" (see hopping.py). Where slices are read from their homes'
            memory there is nothing to buffer.
        ahead: fetches under way while a slice is computed with, over messages out of place.
        num_hosts: number of hosts that "hierarchical" was asked for.
        num_visits: visits of each item, if several slices come at once, which they do over messages out of place and
            over symmetric memory; see groups.py.
        flat_chunks: of each slice then, `flat_chunks[item][index]`.

    Raises:
        ConfigError: the transport that was asked for cannot be had.
    """
    for kind, needed in (("symmetric_memory", "cuda"), ("shared_memory", "cpu")):
        if transport == kind and device.type != needed:
            raise ConfigError(
                f"rtp: transport={kind} works between {needed.upper()} ranks, not on {device.type}. "
                "Write transport=auto"
            )
    setup = RingSetup(
        mesh,
        numels,
        dtype,
        device=device,
        wire_dtype=wire_dtype,
        hop_dtype=hop_dtype,
        timeout_s=group_timeout_s(mesh, device=device),
    )
    in_parts = replace(setup, numels=numels_in_parts or numels, later_parts=later_parts)
    if transport in ("auto", "symmetric_memory") and device.type == "cuda" and mesh.size() > 1:
        try:
            return SymmetricMemoryRing(in_parts, num_visits=num_visits, flat_chunks=flat_chunks)
        except PeerMemoryUnavailable as error:
            # Raised on all ranks alike, so they go on to the next transport together without asking.
            if transport == "symmetric_memory":
                raise ConfigError(
                    f"rtp: transport=symmetric_memory is not possible: {error}. Write transport=auto"
                ) from None
            if mesh.get_local_rank() == 0:
                logger.warning("rtp: no symmetric memory (%s); slices travel by send and receive instead", error)
    no_shared_memory = ""
    if transport in ("auto", "shared_memory") and device.type == "cpu":
        ring, reason = None, ""
        try:
            if numels_side_by_side is None:
                ring = SharedMemoryRing(setup)
            else:
                ring = SharedMemoryRing(replace(setup, numels=numels_side_by_side), whole=True)
        except SharedMemoryUnavailable as error:
            reason = str(error)
        # Asked of all: one rank without it would wait for messages that the others never send.
        if not any_rank(ring is None, mesh=mesh) and ring is not None:
            return ring
        reason = reason or "another rank of the ring cannot use it"
        if ring is not None:
            # All ranks of a ring have one transport: a rank that could share memory gives it up with the others.
            ring.close()
        if transport == "shared_memory":
            raise ConfigError(f"rtp: transport=shared_memory is not possible: {reason}. Write transport=auto")
        no_shared_memory = f"rtp: no shared memory ({reason}); slices travel by send and receive instead"
    if device.type == "cuda" and mesh.size() > 1 and dist.get_backend(mesh.get_group()) == "gloo":
        raise ConfigError(
            "rtp: slices on GPUs cannot travel as messages of gloo, which takes those of CPU tensors only. Write "
            "device=cpu, give every rank a GPU of its own (then messages go over NCCL), or let ranks share one over "
            f"symmetric memory ({OVERLAPPING}=1, transport=auto)"
        )
    wire = (Fp8Wire if fp8 else Wire)(home_dtype=dtype, dtype=wire_dtype or dtype)
    if mesh.size() > 2:  # of two ranks, none shares a host with another of a ring over two
        hosts = gather_objects(platform.node(), mesh=mesh)
        as_it_is = device.type == "cpu" and wire.as_at_home and buffering == "out_of_place"
        if transport == "hierarchical" and not as_it_is:
            raise ConfigError(
                "rtp: transport=hierarchical is between CPU ranks, and sends slices as they are at home. "
                "Write transport=auto"
            )
        if transport == "hierarchical" or (transport == "auto" and as_it_is and even_hosts(hosts)):
            asked_for = num_hosts if transport == "hierarchical" else None
            over_hosts = _over_hosts(setup, hosts=hosts, asked_for=asked_for, ahead=ahead)
            if over_hosts is not None:
                return over_hosts
        if mesh.get_local_rank() == 0:
            if no_shared_memory:
                logger.warning(no_shared_memory)
            if warning := warning_of_crossings(hosts):
                logger.warning(warning)
    elif no_shared_memory and mesh.get_local_rank() == 0:
        logger.warning(no_shared_memory)
    if buffering == "in_place":
        return HoppingRing(setup, wire=wire)
    if num_visits:
        return GroupedRing(in_parts, num_visits=num_visits, flat_chunks=flat_chunks, wire=wire, ahead=ahead)
    return SendReceiveRing(in_parts, wire=wire, ahead=ahead)


def _over_hosts(
    setup: RingSetup, *, hosts: Sequence[str], asked_for: int | None, ahead: int
) -> HierarchicalRing | None:
    """Makes the ring in which the ranks of a host share slices. None if they share no memory and none was asked for.

    Raises:
        ConfigError: it was asked for, over so many hosts, and cannot be had.
    """
    mesh, found = setup.mesh, even_hosts(hosts)
    if asked_for is not None and found != asked_for:
        advice = f"hosts={found}, or transport=auto" if found > 1 else "transport=auto"
        raise ConfigError(
            f"rtp: transport=hierarchical needs {asked_for} hosts of as many ranks each, side by side, and the ring's "
            f"ranks are on {', '.join(hosts)}. Write {advice}"
        )
    ring, reason = None, "ranks of another host cannot share memory"
    try:
        ring = HierarchicalRing(setup, hosts=found, ahead=ahead)
    except SharedMemoryUnavailable as error:
        reason = str(error)
    # Asked of all: the hosts do not see each other's memory, so one of them may fail alone.
    if not any_rank(ring is None, mesh=mesh):
        if mesh.get_local_rank() == 0 and asked_for is None:  # as other choices of "auto", at a level that runs show
            each = mesh.size() // found
            logger.warning(
                "rtp: hierarchical: %d hosts of %d ranks; a slice crosses to each once per pass", found, each
            )
        return ring
    if asked_for is not None:
        raise ConfigError(f"rtp: transport=hierarchical is not possible: {reason}. Write transport=auto")
    if mesh.get_local_rank() == 0:
        logger.warning("rtp: ranks of a host share no memory (%s); each takes every slice by a message", reason)
    return None

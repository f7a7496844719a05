import os
import subprocess
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rotorch import core
from rotorch.comm import transports
from rotorch.comm.ring import RingSetup
from rotorch.comm.shared_file import own_prefix
from rotorch.comm.transports import make_ring
from rotorch.comm.transports.groups import FlatChunk
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.testing.peer_memory import FakePeerMemory


@pytest.fixture(scope="session")
def ring():
    """Makes a ring over all ranks, on a rank: `ring(transport, numels=..)`; every slice holds `slice_values`.

    After the transport: "+in_place"; "+chunks", so small that slices travel in several; "+wire", slices visit in
    float32, which holds their values exactly; "+ahead", two are on their way at a time; "+together", some visit in
    groups, each item in another number of visits.
    """
    return make


@pytest.fixture(scope="session")
def ended():
    """On a rank: `ended(patience, position)` takes a process that has ended for that rank's."""
    return put_an_ended_process


def put_an_ended_process(patience, position, *, reaped=False):
    child = subprocess.Popen(["true"])
    if reaped:
        child.wait()
    patience._processes[position] = own_prefix().replace(f"-{os.getpid()}-", f"-{child.pid}-")


def make(transport, *, numels, schedule="random"):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    transport, *variants = transport.split("+")
    if "chunks" in variants:  # of two elements in float64
        core.messages.CHUNK_BYTES = transports.messages.CHUNK_BYTES = 16
    options = dict(mesh=mesh, numels=numels, dtype=torch.float64, device=torch.device("cpu"))
    options["wire_dtype"] = torch.float32 if "wire" in variants else None
    together = in_groups(numels, size=mesh.size()) if "together" in variants and mesh.size() > 1 else {}
    if transport == "symmetric_memory":  # without GPUs
        setup = RingSetup(**options, timeout_s=300.0)
        made = SymmetricMemoryRing(setup, **together, make_memory=partial(FakePeerMemory, schedule=schedule))
    else:
        options |= together
        made = make_ring(
            transport,
            **options,
            buffering="in_place" if "in_place" in variants else "out_of_place",
            ahead=2 if "ahead" in variants else 1,
        )
    for item, sizes in enumerate(numels):
        made.home_weights(item).copy_(slice_values(item, made.position, numel=sizes[made.position]))
    torch.distributed.barrier()
    return made


def in_groups(numels, *, size):
    """Numbers of visits, and for each slice two runs of elements, each beside those of its neighbours."""
    num_visits = [(1, size, size // 2 if size % 2 == 0 else 1)[item % 3] for item in range(len(numels))]
    chunks = []
    for sizes, visits in zip(numels, num_visits, strict=True):
        of_item = []
        for index, numel in enumerate(sizes):
            first = index - index % (size // visits)
            before, group = sizes[first:index], sizes[first : first + size // visits]
            half, halves = numel // 2, sum(each // 2 for each in group)
            place = halves + sum(each - each // 2 for each in before)
            runs = FlatChunk(0, sum(each // 2 for each in before), half), FlatChunk(half, place, numel - half)
            of_item.append([run for run in runs if run.numel])
        chunks.append(of_item)
    return {"num_visits": num_visits, "flat_chunks": chunks}


def slice_values(item, index, *, numel):
    return torch.arange(numel, dtype=torch.float64) + 100.0 * (index + 1) + 1000.0 * item

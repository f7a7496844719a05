"""Choice of a ring's transport, its cleanup, and the error about a late neighbour."""

import errno
import logging
import os
import platform
import re
import signal
import tempfile
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rotorch
from rotorch.comm import shared_file
from rotorch.comm.ring import RingSetup
from rotorch.comm.shared_file import SharedMemoryUnavailable
from rotorch.comm.transports import make_ring, peer_memory
from rotorch.comm.transports.send_receive import SendReceiveRing
from rotorch.comm.transports.shared_memory import SharedMemoryRing
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.testing.ranks import run_ranks

NUMELS = [[6, 4], [3, 3]]


def choose(transport, *, device="cpu"):
    """Makes a ring and tells its transport, or the error, and what was logged."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        ring = make_ring(transport, mesh=mesh, numels=NUMELS, dtype=torch.float32, device=torch.device(device))
    except ConfigError as error:
        return str(error), records
    return ring.name, records


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room_on_rank_1(*_):
    if dist.get_rank() == 1:
        no_room()


def buffered(buffering):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = dict(numels=NUMELS, dtype=torch.float32, device=torch.device("cpu"), buffering=buffering)
    return type(make_ring("shared_memory", mesh=mesh, **options))


@pytest.mark.parametrize("buffering", ["out_of_place", "in_place"])
def test_memory_that_ranks_share_is_the_same_with_any_buffering(buffering):
    assert run_ranks(buffered, buffering, num_ranks=2) == [SharedMemoryRing] * 2


def test_ranks_of_one_host_share_memory():
    assert run_ranks(choose, "auto", num_ranks=2) == [("shared_memory", [])] * 2


def test_messages_can_be_asked_for():
    assert run_ranks(choose, "send_receive", num_ranks=2) == [("send_receive", [])] * 2


@pytest.mark.parametrize("full", [no_room, no_room_on_rank_1], ids=["all", "one"])
def test_full_shared_memory_falls_back_with_one_warning(full, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    (name, first), (other, second) = run_ranks(choose, "auto", num_ranks=2)
    assert name == other == "send_receive"
    assert len(first) == 1 and second == []
    assert "do not fit into" in first[0] and "free of" in first[0] and "send and receive" in first[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full", [no_room, no_room_on_rank_1], ids=["all", "one"])
def test_shared_memory_that_was_asked_for_and_is_full_is_an_error_alike_on_all_ranks(full, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    (first, _), (second, _) = run_ranks(choose, "shared_memory", num_ranks=2)
    assert first == second
    assert "do not fit into" in first and "free of" in first and "Write transport=auto" in first
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_falls_back(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "missing"))
    (name, warnings), _ = run_ranks(choose, "auto", num_ranks=2)
    assert name == "send_receive"
    assert "No such file" in warnings[0]


def where(names, blind=None, copies=None):
    """Choice of `auto` on ranks whose hosts have these names, one of which sees no file, or one of its own."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: names[rank])
        if rank == blind:
            patch.setattr(shared_file, "open", no_such_file, raising=False)
        if rank == copies:
            patch.setattr(shared_file, "open", own_copy, raising=False)
        return choose("auto")


def no_such_file(path, mode):
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def own_copy(path, mode):
    """The same name, and pages of its own: as on a network file system."""
    file = tempfile.TemporaryFile()  # noqa: SIM115, as its user closes it
    file.truncate(os.stat(path).st_size)
    return file


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")], ids=["one name", "two names"])
def test_what_ranks_can_write_and_read_is_shared_whatever_they_are_called(names):
    assert run_ranks(where, names, num_ranks=2) == [("shared_memory", [])] * 2


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")], ids=["one name", "two names"])
def test_a_rank_that_does_not_see_the_file_makes_them_send_messages(names):
    (name, warnings), (other, more) = run_ranks(where, names, 1, num_ranks=2)
    assert name == other == "send_receive" and not more
    assert "several hosts, or in containers that share no memory: rank 1 on" in warnings[0]
    assert f"does not see {shared_file.shared_memory_directory()}" in warnings[0]


def warned(names):
    """Warnings of a ring over messages whose ranks are on these hosts."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: names[dist.get_rank()])
        options = dict(numels=[[4] * mesh.size()], dtype=torch.float32, device=torch.device("cpu"))
        make_ring("send_receive", mesh=mesh, **options)
    return records


def test_a_ring_over_several_hosts_of_several_ranks_says_what_crosses_between_them():
    first, *others = run_ranks(warned, "aabb", num_ranks=4)
    assert others == [[], [], []]
    (warning,) = first
    assert "the 4 ranks of a ring are on 2 hosts: in each pass 8 slices of a unit cross" in warning
    assert "where 4 would be enough" in warning and "write ddp=2,rtp=2" in warning
    assert run_ranks(warned, "abc", num_ranks=3) == [[]] * 3


def test_a_file_of_that_name_that_is_another_one_is_noticed():
    (name, warnings), _ = run_ranks(where, ("a", "a"), None, 1, num_ranks=2)
    assert name == "send_receive"
    assert "several hosts, or in containers that share no memory: rank" in warnings[0]
    assert "does not see what others write" in warnings[0]


def test_shared_memory_is_not_for_other_devices():
    with pytest.raises(ConfigError, match="works between CPU ranks"):
        make_ring("shared_memory", mesh=None, numels=NUMELS, dtype=torch.float32, device=torch.device("meta"))


def test_symmetric_memory_is_not_for_cpu_ranks_before_anything_starts():
    for parallel in ("rtp=2[transport=symmetric_memory]", "ddp=2,rtp=2[transport=symmetric_memory]"):
        with pytest.raises(ConfigError, match=r"symmetric_memory works between CUDA ranks, not on cpu\. Write transp"):
            rotorch.parallelize(torch.nn.Linear(2, 2), parallel, plan={"weight": "colwise"}, device="cpu")
        assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="works between CUDA ranks, not on cpu"):
        choose_without_ranks("symmetric_memory")


def choose_without_ranks(transport):
    return make_ring(transport, mesh=None, numels=NUMELS, dtype=torch.float32, device=torch.device("cpu"))


SEATS = {
    "": [peer_memory._RankDevice("a", 0, "x", ""), peer_memory._RankDevice("a", 1, "y", "")],
    "the ranks are on several hosts": [
        peer_memory._RankDevice("a", 0, "x", ""),
        peer_memory._RankDevice("b", 0, "y", ""),
    ],
    "each rank sees its own GPU only": [
        peer_memory._RankDevice("a", 0, "x", ""),
        peer_memory._RankDevice("a", 0, "y", ""),
    ],
    "ranks share a GPU; TORCH_SYMM_MEM_ALLOW": [
        peer_memory._RankDevice("a", 0, "x", ""),
        peer_memory._RankDevice("a", 0, "x", ""),
    ],
}


@pytest.mark.parametrize("reason", SEATS)
def test_where_ranks_sit_decides_on_symmetric_memory(reason, monkeypatch):
    monkeypatch.delenv(peer_memory.OVERLAPPING, raising=False)
    found = peer_memory._why_apart(SEATS[reason])
    assert found.startswith(reason) and bool(found) == bool(reason)
    monkeypatch.setenv(peer_memory.OVERLAPPING, "1")
    assert bool(peer_memory._why_apart(SEATS[reason])) == ("hosts" in reason)


def without_a_gpu():
    mesh = init_device_mesh("cpu", (2,))
    return peer_memory.why_no_peer_memory(mesh=mesh, device=torch.device("cpu"))


def test_all_ranks_hear_why_there_is_no_symmetric_memory():
    assert run_ranks(without_a_gpu, num_ranks=2) == ["it is for CUDA devices, not for cpu"] * 2


def fallen_back(reason):
    """The ring for CUDA where windows cannot be made; the tensors are made on CPU."""
    import rotorch.comm.transports as module

    def unavailable(*_, **__):
        raise peer_memory.PeerMemoryUnavailable(reason)

    module.SymmetricMemoryRing = unavailable
    refused = choose("auto", device="cuda")[0]
    module.dist.get_backend = lambda group: "nccl"
    known = module.SendReceiveRing
    module.SendReceiveRing = lambda setup, **how: known(replace(setup, device=torch.device("cpu")), **how)
    return choose("auto", device="cuda"), choose("symmetric_memory", device="cuda"), refused


def test_without_symmetric_memory_a_ring_on_cuda_falls_back_with_one_warning():
    first, second = run_ranks(fallen_back, "no way", num_ranks=2)
    assert first[0] == (
        "send_receive",
        ["rtp: no symmetric memory (no way); slices travel by send and receive instead"],
    )
    assert second[0] == ("send_receive", [])
    assert first[2] == second[2] and "cannot travel as messages of gloo" in first[2]
    assert first[1][0] == second[1][0]
    assert "transport=symmetric_memory is not possible: no way. Write transport=auto" in first[1][0]


def mapped(directory):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ring = SharedMemoryRing(RingSetup(mesh, NUMELS, torch.float32))
    ring.home_weights(0).fill_(float(ring.position + 1))
    dist.barrier()
    seen = [float(visit.weights[0]) for visit in ring.visits(0, backward=False)]
    return os.listdir(directory), seen


def test_files_are_gone_while_memory_is_in_use(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    assert run_ranks(mapped, tmp_path, num_ranks=2) == [([], [1.0, 2.0]), ([], [2.0, 1.0])]


def unmappable(directory):
    import rotorch.comm.shared_file as module

    def fail(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if dist.get_rank() == 1:
        module.mmap.mmap = fail
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    message = ""
    try:
        SharedMemoryRing(RingSetup(mesh, NUMELS, torch.float32))
    except SharedMemoryUnavailable as error:
        message = str(error)
    dist.barrier()
    return message, os.listdir(directory)


def test_a_rank_that_cannot_map_says_so_and_files_are_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    (told, left), (error, left_too) = run_ranks(unmappable, tmp_path, num_ranks=2)
    assert "rank 1 cannot map" in error and told == error
    assert left == left_too == []


def too_large(directory):
    """More than the host has: allocating it page by page would take all memory before the file system is full."""
    import rotorch.comm.shared_file as module

    allocated = []
    module.os.posix_fallocate = lambda *extent: allocated.append(extent)
    module.available_bytes = lambda: 1 << 20
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    message = ""
    try:
        SharedMemoryRing(RingSetup(mesh, [[1 << 20, 1 << 20]], torch.float32))
    except SharedMemoryUnavailable as error:
        message = str(error)
    dist.barrier()
    return message, os.listdir(directory), allocated


def test_more_shared_memory_than_the_host_has_is_refused_before_any_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    (told, left, allocated), (error, _, allocated_too) = run_ranks(too_large, tmp_path, num_ranks=2)
    assert "do not fit into the memory that is available, 1.00 MiB" in told and error == told
    assert left == allocated == allocated_too == []


def late(transport):
    """Rank 1 takes no part in a backward pass; the passes before it were as they should be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ring = transport(RingSetup(mesh, NUMELS, torch.float32, timeout_s=5.0))
    ring.start(fresh=[True, True])
    for _ in ring.visits(0, backward=False):
        pass
    if ring.position == 1:
        return ""
    if transport is SharedMemoryRing:
        ring._patience.timeout_s = 0.5  # nobody comes
    try:
        for visit in ring.visits(0, backward=True):
            assert ring.gradient(0, visit, wait=False) is None or visit.number == 0
            ring.gradient(0, visit, wait=True)
            ring.pass_on(0, visit)
    except RankFailure as error:
        return str(error)
    raise AssertionError("did not wait")


def test_a_late_neighbour_is_named_over_shared_memory():
    message, _ = run_ranks(late, SharedMemoryRing, num_ranks=2)
    assert re.search(r"ring position 0 waited .* for slice \d of item 0 .*late", message)


def test_a_late_neighbour_is_a_rank_failure_over_messages():
    message, _ = run_ranks(late, SendReceiveRing, num_ranks=2)
    assert re.search(r"neighbour on the ring is late or gone: .*[Tt]imed out", message)


def made_again(transport):
    """Several rings one after another, each closed, with a fetch still under way at the end."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for _ in range(3):
        ring = make_ring(transport, mesh=mesh, numels=NUMELS, dtype=torch.float32, device=torch.device("cpu"))
        for items in ((0, 1), (0,)):
            ring.start(fresh=[True, True])
            for item in items:
                for visit in ring.visits(item, backward=False):
                    assert visit.weights.numel() == NUMELS[item][visit.index]
        ring.close()
        ring.close()  # does nothing more


@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_rings_can_be_made_one_after_another(transport):
    run_ranks(made_again, transport, num_ranks=2)


def killed_before_unlinking():
    from rotorch.comm import shared_file

    def offer_or_die(value, *, group, gathered=shared_file._gathered):
        if isinstance(value, tuple) and value[1]:  # the offer of a file: it is there, and nobody knows yet
            os.kill(os.getpid(), signal.SIGKILL)
        return gathered(value, group=group)

    shared_file._gathered = offer_or_die
    choose("shared_memory")


def test_a_file_that_a_killed_process_left_is_removed_by_the_next_ring(monkeypatch, tmp_path):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
    with pytest.raises(RankFailure, match="died"):
        run_ranks(killed_before_unlinking, num_ranks=2)
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"rotorch-{left.name.split('-')[1]}-{os.getpid()}-x"
    others = [tmp_path / "rotorch-1-999999-x", tmp_path / "rotorch-notes", mine]  # another space, no process, alive
    for file in others:
        file.touch()
    run_ranks(choose, "shared_memory", num_ranks=2)
    assert sorted(tmp_path.iterdir()) == sorted(others)

"""Blocks and sums that ranks of one host read in place, against what they should be; and steps that break off."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm import shared_file
from rotorch.comm.shared_axis_group import SharedAxisGroup, make_axis_group
from rotorch.core.errors import ConfigError, HeardFailure, RankFailure
from rotorch.testing.ranks import run_ranks


def make(timeout_s=60.0, transport="auto"):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("row",))
    if timeout_s == 60.0:
        return make_axis_group(mesh, "row", transport=transport, device=torch.device("cpu"))
    plain = make_axis_group(mesh, "row", transport="messages", device=torch.device("cpu"))
    return SharedAxisGroup(plain, timeout_s=timeout_s)


def of(rank, number, shape):
    return torch.full(shape, 100.0 * number + rank)


def everything(axis_group, number, *, size):
    """One of each operation, of sizes that grow from one to the next; says what is wrong."""
    n, me = axis_group.size, axis_group.position
    shapes = [(size + rank, 3) for rank in range(n)]
    for rank, block in enumerate(axis_group.blocks(of(me, number, shapes[me]), shapes=shapes)):
        if not torch.equal(block, of(rank, number, shapes[rank])):
            yield f"block {rank} of {number}"
    order = axis_group.from_own
    own_first = axis_group.blocks(of(me, number, shapes[me]), shapes=shapes, own_first=True)
    for rank, block in zip(order, own_first, strict=True):
        if not torch.equal(block, of(rank, number, shapes[rank])):
            yield f"block {rank} of {number}, from this rank's own on"
    sums = axis_group.sums()
    for target in range(n):
        sums.add(of(me, number + target, shapes[target]), target=target)
    if not torch.equal(sums.mine(), sum(of(rank, number + me, shapes[me]) for rank in range(n))):
        yield f"sum of {number}"
    total = axis_group.all_reduce(of(me, number, (size,)))
    if not torch.equal(total, sum(of(rank, number, (size,)) for rank in range(n))):
        yield f"sum over all of {number}"
    if not torch.equal(axis_group.all_reduce_max(of(me, number, (size,))), of(n - 1, number, (size,))):
        yield f"largest of {number}"
    ids = torch.arange(size) + 10 * me
    if axis_group.all_gather(ids).tolist() != [10 * rank + i for rank in range(n) for i in range(size)]:
        yield f"all of {number}"
    whole = torch.cat([of(me, number + target, (size, 2)) for target in range(n)])
    if not torch.equal(axis_group.reduce_scatter(whole), sum(of(rank, number + me, (size, 2)) for rank in range(n))):
        yield f"scattered sum of {number}"
    if not axis_group.all_equal(number) or axis_group.all_equal(number + me):
        yield f"comparison of {number}"


def many(transport):
    axis_group = make(transport=transport)
    problems = []
    for number in range(30):
        if number % 10 == 0:
            axis_group.start()
        problems += everything(axis_group, number, size=1 + 300 * (number % 7))
    return axis_group.transport, problems, sum(slot.numel() for slot in axis_group.slots())


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_operation_gives_what_it_should_over_messages_too(num_ranks):
    assert run_ranks(many, "messages", num_ranks=num_ranks) == [("messages", [], 0)] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_operation_gives_what_it_should(num_ranks):
    for transport, problems, num_bytes in run_ranks(many, "auto", num_ranks=num_ranks):
        assert transport == "shared_memory" and problems == []
        assert 0 < num_bytes <= 2 * 24576 + (num_ranks - 1) * 24576  # of at most 1803 x 3 floats, in whole pages


def at_home():
    """Two weights in uneven blocks as ranks read them, before and after their owners' change; and the slots."""
    axis_group = make()
    me, dtypes = axis_group.position, {"a": torch.float32, "b": torch.float64}
    shapes = {"a": [(2 + rank, 3) for rank in range(axis_group.size)], "b": [(5,)] * axis_group.size}
    homes = axis_group.homes(shapes, dtypes=dtypes, device=torch.device("cpu"))
    found = []
    for step in range(2):
        for number, (name, home) in enumerate(homes.items()):
            assert (home.shape, home.dtype) == (torch.Size(shapes[name][me]), dtypes[name])
            home.fill_(100.0 * step + 10.0 * number + me)
        dist.barrier()
        axis_group.start()
        for home in homes.values():
            found.append([block.unique().tolist() for block in axis_group.blocks(home)])
        dist.barrier()
    copies = [block.data_ptr() for block in axis_group.blocks(homes["b"])]
    return found, copies == [block.data_ptr() for block in axis_group.blocks(homes["b"])], len(axis_group.slots()[0])


def test_blocks_at_home_are_read_where_they_lie():
    for found, same_memory, slot_bytes in run_ranks(at_home, num_ranks=3):
        assert found == [[[first + rank] for rank in range(3)] for first in (0.0, 10.0, 100.0, 110.0)]
        assert same_memory and slot_bytes == 0  # nothing has gone through a slot


def no_room_for_homes():
    axis_group = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTORCH_SHARED_MEMORY_DIR", "/proc/nowhere")
        patch.delenv("ROTORCH_SHARED_MEMORY_LATER", raising=False)
        homes = axis_group.homes({"a": [(3,)] * 2}, dtypes={"a": torch.float32}, device=torch.device("cpu"))
    homes["a"].fill_(axis_group.position)
    axis_group.start()
    return [block.tolist() for block in axis_group.blocks(homes["a"])]


def test_without_room_for_weights_their_blocks_are_copied():
    assert run_ranks(no_room_for_homes, num_ranks=2) == [[[0.0] * 3, [1.0] * 3]] * 2


def sum_in_chunks():
    axis_group = make()
    axis_group.start()
    total = axis_group.all_reduce(torch.arange(3_000_000, dtype=torch.float32) * (axis_group.position + 1))
    expected = torch.arange(3_000_000, dtype=torch.float32) * sum(range(1, axis_group.size + 1))
    return torch.equal(total, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_larger_than_a_chunk(num_ranks):
    assert run_ranks(sum_in_chunks, num_ranks=num_ranks) == [True] * num_ranks


def broken_off():
    axis_group = make()
    me = axis_group.position
    axis_group.start()
    assert list(everything(axis_group, 9, size=20)) == []
    dist.barrier()
    axis_group.start()
    with pytest.raises(ValueError, match="here"):
        for number, _ in enumerate(axis_group.blocks(of(me, 0, (5,)))):
            if number == me:  # ranks leave at different places, and one of them has made a part already
                raise ValueError("here")
    if me == 0:
        axis_group.sums().add(of(me, 1, (5,)), target=1)
    dist.barrier()  # as before every step
    axis_group.start()
    return list(everything(axis_group, 3, size=4))


def test_after_a_step_that_broke_off_the_next_one_is_right():
    assert run_ranks(broken_off, num_ranks=3) == [[], [], []]


def nested():
    axis_group = make()
    axis_group.start()
    blocks = axis_group.blocks(of(axis_group.position, 0, (5,)))
    next(blocks)
    with pytest.raises(AssertionError, match="before the last one was over"):
        axis_group.all_reduce(torch.ones(3))
    return True


def test_an_operation_inside_another_one_is_refused():
    assert run_ranks(nested, num_ranks=2) == [True, True]


def late():
    axis_group = make(timeout_s=2.0)
    axis_group.start()
    axis_group.all_reduce(torch.ones(3))
    if axis_group.position == 1:
        return ""
    with pytest.raises(RankFailure) as told:
        axis_group.all_reduce(torch.ones(3))
    return str(told.value)


def test_a_rank_that_is_late_is_named():
    message, _ = run_ranks(late, num_ranks=2)
    assert message == "position 0 on axis 'row' waited 2 s for position 1, which is late or gone"


def gone(ended):
    axis_group = make(timeout_s=300.0)
    axis_group.start()
    axis_group.all_reduce(torch.ones(3))
    if axis_group.position == 1:
        return ""
    ended(axis_group._whole.patience, 1)
    with pytest.raises(HeardFailure) as told:
        axis_group.all_reduce(torch.ones(3))
    return str(told.value)


def test_a_rank_that_has_ended_is_noticed_at_once(ended):
    message, _ = run_ranks(gone, ended, num_ranks=2, timeout_s=60)
    assert message == "rank 1 has ended, and this one waits for a block of it"


def growing(directory):
    axis_group = make()
    axis_group.start()
    list(axis_group.blocks(torch.ones(1)))
    dist.barrier()
    if axis_group.position == 0:
        directory.rmdir()
    dist.barrier()
    return [float(block.sum()) for block in axis_group.blocks(torch.full((5000,), float(axis_group.position)))]


def test_memory_that_is_made_after_the_launchers_directory_has_gone(monkeypatch, tmp_path):
    """Blocks may be larger than all before at any time; the directory goes as soon as all ranks have built."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_LATER", str(tmp_path))
    assert run_ranks(growing, tmp_path / "own", num_ranks=2) == [[0.0, 5000.0]] * 2
    assert not list(tmp_path.iterdir())


def without_room(transport):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("row",))
    try:
        return make_axis_group(mesh, "row", transport=transport, device=torch.device("cpu")).transport
    except ConfigError as error:
        return str(error)


def test_without_shared_memory_blocks_travel_as_messages(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path / "missing"))
    assert run_ranks(without_room, "auto", num_ranks=2) == ["messages"] * 2
    for told in run_ranks(without_room, "shared_memory", num_ranks=2):
        assert "No such file" in told and "Write transport=auto" in told


def while_the_launcher_removes_its_directory(launchers, later):
    axis_group = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(launchers))
        patch.setenv("ROTORCH_SHARED_MEMORY_LATER", str(later))
        patch.setattr(shared_file, "sweep", lambda _: launchers.is_dir() and launchers.rmdir())
        homes = axis_group.homes({"a": [(3,)] * 2}, dtypes={"a": torch.float32}, device=torch.device("cpu"))
    homes["a"].fill_(axis_group.position)
    dist.barrier()
    axis_group.start()
    found = [block.tolist() for block in axis_group.blocks(homes["a"])]
    dist.barrier()
    return found, len(axis_group.slots()[0])


def test_a_launchers_directory_may_go_while_a_file_is_made(tmp_path):
    (launchers := tmp_path / "launchers").mkdir()
    work = partial(while_the_launcher_removes_its_directory, launchers, tmp_path)
    assert run_ranks(work, num_ranks=2) == [([[0.0] * 3, [1.0] * 3], 0)] * 2
    assert list(tmp_path.iterdir()) == []

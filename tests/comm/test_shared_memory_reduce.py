"""Small sums through shared memory: what gloo would give, the same on all ranks, however early or late they come."""

import gc
import math
import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch import parallelize
from rotorch.comm import shared_memory_reduce
from rotorch.comm.collectives import all_reduce_max, all_reduce_sum, all_reduce_sum_later, barrier, open_shared_reduces
from rotorch.comm.meter import Meter
from rotorch.comm.observe import Activity, Observer, observe_waits
from rotorch.comm.shared_memory_reduce import SharedMemoryReduce, shared_reduce_of
from rotorch.core.errors import RankFailure
from rotorch.core.traffic import Kind
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks

CPU = torch.device("cpu")


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def of_rank(rank, number):
    """A rank's tensor for sum `number`: any size, from nothing to more than two slots hold, any dtype."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    numel = [1, 3, 0, 5_000, 40_000, 16_384, 2][number % 7]
    dtype = [torch.float64, torch.float32, torch.int64][number % 3]
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 100).to(dtype)


def sums_at_any_time(rounds):
    mesh, n, me = mesh_of(dist.get_world_size()), dist.get_world_size(), dist.get_rank()
    open_shared_reduces(mesh, device=CPU)
    nap, bits = random.Random(me), []
    for number in range(rounds):
        if nap.random() < 0.2:
            time.sleep(nap.random() * 0.01)  # ranks are never as far as each other
        given = of_rank(me, number)
        assert shared_reduce_of(dist.group.WORLD, tensor=given) is not None
        if number % 4 == 3:
            assert all_reduce_max(float(me + number), mesh=mesh) == n - 1 + number
        if number % 2:
            all_reduce_sum(given, mesh=mesh)
        else:
            later = all_reduce_sum_later(given, mesh=mesh)
            assert later() is later() is given  # whoever asks twice gets the same sum
        expected = sum(of_rank(rank, number) for rank in range(n))
        torch.testing.assert_close(given, expected)
        bits.append(given.double().sum().item())
    return bits


@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_sums_are_right_at_any_time_and_the_same_everywhere(n):
    of_ranks = run_ranks(sums_at_any_time, 120, num_ranks=n)
    assert all(bits == of_ranks[0] for bits in of_ranks)


def sums_over_axes():
    mesh, me = mesh_of(2, 2), dist.get_rank()
    open_shared_reduces(mesh, device=CPU)
    open_shared_reduces(mesh, device=CPU)  # a second model over the same ranks
    row, column = me // 2, me % 2
    found = []
    for axis in (mesh["a"], mesh["b"], mesh):
        tensor = torch.tensor([10.0**me])
        assert all(
            shared_reduce_of(g, tensor=tensor) for g in ([axis.get_group()] if axis.ndim == 1 else [dist.group.WORLD])
        )
        found.append(all_reduce_sum(tensor, mesh=axis).item())
    assert found == [10.0**column + 10.0 ** (2 + column), 10.0 ** (2 * row) * 11, 1111.0]


def test_each_axis_of_a_mesh_meets_by_itself():
    run_ranks(sums_over_axes, num_ranks=4)


def counted_bytes():
    mesh, counted = mesh_of(dist.get_world_size()), []
    for opened in (False, True):
        if opened:
            open_shared_reduces(mesh, device=CPU)
        with Meter() as meter:
            all_reduce_sum(torch.ones(600), mesh=mesh)
            all_reduce_sum(torch.ones(1), mesh=mesh)  # a number, which is left out
            all_reduce_sum(
                torch.ones(shared_memory_reduce.MOST_BYTES // 4 // mesh.size() + 1), mesh=mesh
            )  # too large to meet for
            barrier(mesh=mesh)
        counted.append((dict(meter.sent_bytes), dict(meter.num_messages), dict(meter.sent_by_group)))
        all_reduce_sum(torch.ones(600), mesh=mesh)
        assert meter.num_messages[Kind.ALL_REDUCE] == 2  # it has stopped listening
    return counted


def test_a_sum_counts_as_the_all_reduce_that_it_is():
    sent, met = run_ranks(counted_bytes, num_ranks=3)[1]
    assert sent == met and sent[1] == {Kind.ALL_REDUCE: 2}


def refusal(call):
    with pytest.raises(RankFailure) as raised:
        call()
    return str(raised.value)


def somebody_is_late():
    place = SharedMemoryReduce(dist.group.WORLD, timeout_s=0.3)
    if dist.get_rank() == 1:
        time.sleep(1.5)
    said = refusal(lambda: place.sum(torch.ones(1)))
    return said, refusal(lambda: place.sum(torch.ones(1)))


def test_a_sum_that_was_left_is_the_last_one_for_everybody():
    (early, again), (late, _), _ = run_ranks(somebody_is_late, num_ranks=3)
    assert re.search("rank [12] (did not come to a sum of all ranks within 1 s|has left a sum)", early)
    assert "this rank has left a sum of all ranks in the middle. Start the ranks again" in again
    assert re.search("rank [02] has left a sum of all ranks in the middle", late)  # and does not count with old numbers


def somebody_ends(ended, reaped):
    """Rank 1 does not come, and what rank 0 takes for its process has ended."""
    place = SharedMemoryReduce(dist.group.WORLD, timeout_s=300.0)
    place.sum(torch.ones(1))
    said = None
    if dist.get_rank() == 0:
        ended(place._patience, 1, reaped=reaped)
        said = refusal(lambda: place.sum(torch.ones(1)))
    dist.barrier()
    return said


@pytest.mark.parametrize("reaped", [False, True])
def test_a_rank_that_has_ended_is_noticed_at_once(ended, reaped):
    said = run_ranks(somebody_ends, ended, reaped, num_ranks=2, timeout_s=60)
    assert said == ["rank 1 has ended, and this one waits for it in a sum", None]


def they_do_different_things(how):
    place, first = SharedMemoryReduce(dist.group.WORLD, timeout_s=60.0), dist.get_rank() == 0
    if how == "sizes":
        return refusal(lambda: place.sum(torch.ones(1 if first else 3)))
    return refusal(lambda: (place.sum if first else place.maximum)(torch.ones(1)))


@pytest.mark.parametrize(("how", "theirs"), [("sizes", "12 bytes to be summed"), ("kinds", "4 bytes to be compared")])
def test_ranks_that_do_different_things_are_told(how, theirs):
    said = run_ranks(they_do_different_things, how, num_ranks=2)
    ours = "4 bytes to be summed"
    told = [f"ranks do different things: this one comes with {ours}, rank 1 with {theirs}",
            f"ranks do different things: this one comes with {theirs}, rank 0 with {ours}"]  # fmt: skip
    left = [
        f"rank {rank} has left a sum of all ranks in the middle. Start the ranks again, from a checkpoint"
        for rank in (1, 0)
    ]
    assert all(one in (mine, other) for one, mine, other in zip(said, told, left, strict=True)) and set(said) & set(
        told
    )


def any_values():
    mesh, me = mesh_of(2), dist.get_rank()
    open_shared_reduces(mesh, device=CPU)
    assert math.isnan(all_reduce_max(math.nan if me else 1.0, mesh=mesh))
    assert all_reduce_max(-math.inf if me else -1e300, mesh=mesh) == -1e300
    halves = all_reduce_sum(torch.full((3, 5), 1.5 + me, dtype=torch.bfloat16), mesh=mesh)
    assert halves.dtype == torch.bfloat16 and torch.equal(halves, torch.full((3, 5), 4.0, dtype=torch.bfloat16))
    assert all_reduce_sum(torch.tensor(2.0 + me), mesh=mesh).shape == ()
    largest = torch.ones(shared_memory_reduce.MOST_BYTES // 4 // 2)
    assert shared_reduce_of(dist.group.WORLD, tensor=largest) and float(all_reduce_sum(largest, mesh=mesh).min()) == 2.0
    one, two = torch.ones(1), torch.ones(2)
    ends = [all_reduce_sum_later(one, mesh=mesh), all_reduce_sum_later(two, mesh=mesh)]
    barrier(mesh=mesh)
    assert [float(end()[0]) for end in ends] == [2.0, 2.0]


def test_any_values_and_dtypes():
    run_ranks(any_values, num_ranks=2)


def mapped():
    """Number of shared files that this rank maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("rotorch-" in line for line in maps)


def models_come_and_go():
    counts = []
    for _ in range(4):
        model = parallelize(torch.nn.Linear(3, 3), "ddp=2,fsdp=2", device="cpu", plan={}, loss=lambda m, b: m(b).sum())
        counts.append(mapped())
        model.close()
        del model
        gc.collect()
    return counts


def test_models_that_are_closed_leave_no_memory():
    for counts in run_ranks(models_come_and_go, num_ranks=4):
        assert counts[0] > 1 and counts[-1] == counts[1] == counts[0]


def a_model_is_closed_and_stays(path, layout):
    """Shared files before a model is closed and after it."""
    model = parallelize(causal_lm(load_config(path)), layout, device="cpu")
    before = mapped()
    model.close()
    return before, mapped()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("around", ["", "ddp=1,", "pp=1,"])
def test_sums_of_a_closed_model_take_no_memory_under_any_strategy_around_it(tiny, around):
    layout = f"{around}megatron=2[transport=shared_memory]"
    for before, after in run_ranks(a_model_is_closed_and_stays, tiny("llama"), layout, num_ranks=2):
        assert after < before


def without_shared_memory():
    os.environ["ROTORCH_SHARED_MEMORY_DIR"] = "/nonexistent"
    mesh = mesh_of(2)
    open_shared_reduces(mesh, device=CPU)
    assert shared_reduce_of(dist.group.WORLD, tensor=torch.ones(1)) is None
    assert all_reduce_sum(torch.ones(2), mesh=mesh).tolist() == [2.0, 2.0]


def test_without_shared_memory_sums_are_sent():
    run_ranks(without_shared_memory, num_ranks=2)


def forgotten_with_its_group():
    group = dist.new_group([0, 1])
    shared_memory_reduce.open_shared_reduce(group, device=CPU)
    assert len(shared_memory_reduce._shared_reduces) == 1
    dist.destroy_process_group(group)
    del group
    return len(shared_memory_reduce._shared_reduces)


def test_a_meeting_goes_with_its_group():
    assert run_ranks(forgotten_with_its_group, num_ranks=2) == [0, 0]


def observed_sums():
    mesh, observer = mesh_of(2), Observer()
    open_shared_reduces(mesh, device=CPU)
    with observe_waits(observer):
        if dist.get_rank() == 1:
            time.sleep(0.05)
        all_reduce_sum(torch.ones(3), mesh=mesh)
        barrier(mesh=mesh)
    all_reduce_sum(torch.ones(3), mesh=mesh)  # nobody looks any more
    return [(span.doing, span.name, span.end_s - span.start_s > 0.03) for span in observer.spans]


def test_pictures_show_who_waits_for_a_sum():
    early, _ = run_ranks(observed_sums, num_ranks=2)
    assert early[0] == (Activity.COLLECTIVE, "sum", True)
    assert [name for _, name, _ in early[1:]] in ([], ["maximum"])  # too short to be seen, perhaps

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from rotorch._torch_private import in_backward
from rotorch.bench.contender import Independent
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.ops.deferred_logits import LOGITS_BLOCK
from rotorch.shard.storages import SharedMappings, owned_bytes
from rotorch.testing.ranks import run_ranks
from rotorch.traced.live_storages import LiveStorages, _Storage


def _beside_mem_tracker(task):
    from torch.distributed._tools.mem_tracker import MemTracker

    gc.collect()
    before = sum(t.untyped_storage().nbytes() for t in _other_tensors())  # left by whoever ran before the fork
    contender = Independent(task, shares=[0])
    contender.forward_backward(0)
    contender.update()
    gc.collect()
    found = measure_tensors(contender, step=1)
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(contender.module, contender.optimizer)
    with tracker:
        contender.forward_backward(0)
        contender.update()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return found, {str(kind): num_bytes for kind, num_bytes in snapshot.items()}, before


def test_the_peak_is_what_torch_s_own_tracker_finds(task):
    ((found, theirs, before),) = run_ranks(_beside_mem_tracker, task, num_ranks=1)
    assert found.peak_bytes == pytest.approx(theirs["Total"] + before, abs=16)
    assert found.peak["weights"] == theirs["_MemRefType.PARAM"]
    assert found.peak["optimizer"] == theirs["_MemRefType.OPT"]
    # Logits that are kept count there as activations, their gradients as temporaries.
    assert 0 < theirs["_MemRefType.ACT"] - found.peak["activations"] < found.peak["logits"]
    assert sum(found.peak.values()) == found.peak_bytes


def test_a_temporary_counts_while_it_lives():
    gc.collect()  # tensors in cycles that tests before this one left would count, and be gone afterwards
    x = torch.ones(1000)
    with LiveStorages() as live:
        y = x + 1
        z = y * 2
        del y
        _ = z + 1
    total, moment = live.peak()
    rest = sum(t.untyped_storage().nbytes() for t in _other_tensors(x, z, _))
    assert total - rest == 3 * 4000
    assert moment["other"] == total


def _other_tensors(*mine):
    keys, others = {t.untyped_storage()._cdata for t in mine}, {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type == "cpu":
            others[found.untyped_storage()._cdata] = found
    return [t for key, t in others.items() if key not in keys]


def test_activations_are_what_backward_finds():
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(512, 8)
    with LiveStorages() as live:
        live.name([weight], category="weights")
        (x @ weight).tanh().sum().backward()
        live.name([weight.grad], category="gradients")
    moment = live.peak()[1]
    assert (
        moment["activations"] == 512 * 8 * 4 + 2 * 4
    )  # tanh's output, the loss, and the gradient of 1 that backward starts from
    assert moment["weights"] == 8 * 8 * 4


def test_logits_are_what_the_head_makes_and_what_is_made_of_them():
    hidden, weight = torch.randn(16, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    targets = torch.arange(16)
    with LiveStorages() as live:
        with record_function(LOGITS_BLOCK):
            logits = F.linear(hidden, weight)
        scores = torch.log_softmax(logits.float() * 2, dim=-1)
        loss = F.nll_loss(scores, targets)
        kept = live.peak()[1]["logits"]
        del logits
        loss.backward()
    total, moment = live.peak()
    assert kept == 3 * 16 * 100 * 4  # the product, its double, and its soft-max
    assert moment["logits"] == kept  # at the highest moment two kept ones and a gradient, or two gradients and one
    others = live.other_at_peak()
    assert sum(moment.values()) == total and all("forward" in m or "backward" in m or "before" in m for m in others)


def test_a_storage_that_is_emptied_and_refilled_is_followed():
    gathered = torch.empty(1000)
    with LiveStorages() as live:
        gathered.untyped_storage().resize_(0)
        first = live.peak()[0]
        gathered.untyped_storage().resize_(8000)
        assert live.peak()[0] - first == 4000  # 8000 now, 4000 before it was emptied
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_mapped_memory_counts_where_it_is_owned(tmp_path):
    (tmp_path / "ring").write_bytes(bytes(8192))
    ring = torch.from_file(str(tmp_path / "ring"), shared=True, size=2048, dtype=torch.float32)
    private = torch.from_file(str(tmp_path / "ring"), shared=False, size=2048, dtype=torch.float32)
    mappings = SharedMappings()
    assert mappings.contains(ring.untyped_storage())
    assert not mappings.contains(private.untyped_storage())
    home = ring[512:1024]
    assert owned_bytes([home, home.view(2, 256), ring[1000:1100]]) == 4 * (1100 - 512)
    assert owned_bytes([ring.view(32, 64)[:, 16:32], ring.view(32, 64)[4:6, 20:40]]) == 4 * (32 * 16 + 2 * 8)
    assert owned_bytes([private[:10], private[5:20]]) == 8192
    with LiveStorages() as live:
        before = live.peak()[0]
        view = ring[:100]
        view.add_(1.0)
        assert live.peak()[0] == before
        live.name([home], category="weights")
    total, moment = live.peak()
    assert (total - before, moment["weights"]) == (2048, 2048)


def test_backward_is_known_from_forward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(in_backward()))
    seen.append(in_backward())
    x.sum().backward()
    assert seen == [False, True]


class Collected(_Storage):
    """A storage that another one goes with when it is looked at, as in a run of the garbage collector."""

    alive = None

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if self.alive:
            self.alive.popitem()


def test_storages_may_go_while_a_backward_is_noticed(monkeypatch):
    live = LiveStorages()
    with live:
        x = torch.ones(2, requires_grad=True).mul(2).sum()
        live._alive |= {-number: Collected(8, made=False) for number in range(3)}
        monkeypatch.setattr(Collected, "alive", live._alive)
        x.backward()
        monkeypatch.setattr(Collected, "alive", None)

"""rtp over the state machine of symmetric memory is exact, and in order: on models, without GPUs.

The windows are files that CPU ranks map, lanes run at random, and whatever the model reads or writes while a copy may
be under way is found (`rotorch.testing.peer_memory`). What CUDA does is tested in tests/gpu.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

import rotorch
from rotorch.comm.meter import Meter
from rotorch.comm.ring import RingSetup
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core import row_parts
from rotorch.core.errors import RankFailure
from rotorch.core.layout import combine_layouts
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies.rtp import apply
from rotorch.strategies.rtp.plan import RTP
from rotorch.testing.parity import parallel_losses
from rotorch.testing.peer_memory import FakeLane, FakePeerMemory
from rotorch.testing.ranks import run_ranks
from rotorch.testing.verify import BAR, verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(autouse=True)
def over_symmetric_memory(monkeypatch):
    """Every ring that ranks forked from here make; they watch what they compute until they end."""
    with Meter():
        pass

    def make_ring(
        transport, *, mesh, numels_in_parts, later_parts, dtype, device, wire_dtype, num_visits, flat_chunks, **_
    ):
        setup = RingSetup(mesh, numels_in_parts, dtype, device=device, wire_dtype=wire_dtype, later_parts=later_parts)
        ring = SymmetricMemoryRing(setup, num_visits=num_visits, flat_chunks=flat_chunks, make_memory=FakePeerMemory)
        watching = ring._memory.watched()
        watching.__enter__()
        ring.watching = watching
        return ring

    monkeypatch.setattr(apply, "make_ring", make_ring)
    monkeypatch.setattr(RTP, "on_device", lambda strategy, _: strategy)


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        pytest.param("rtp=3", "qwen3", marks=pytest.mark.slow),
        pytest.param("rtp=2[recompute=none]", "mixtral", marks=pytest.mark.slow),
        ("rtp=3[recompute=slice]", "gemma2"),
        ("ddp=2,rtp=2", "llama"),
        ("rtp=4[transport=symmetric_memory,visits=2]", "llama"),
        pytest.param("rtp=4[transport=symmetric_memory,visits=1,recompute=slice]", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_float64_parity(parallel, model, tiny):
    report = verify(tiny(model), parallel=parallel, layers=1, steps=2, timeout_s=240)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.max_rel_err_loss <= BAR
    assert report.max_rel_err_grad <= BAR


def account(path, precision, layout="rtp=3[transport=symmetric_memory]"):
    """The first loss, what slots take beside what the Layouts say, and what was fetched in the last step."""
    config = load_config(path)
    config.num_hidden_layers = 2
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, layout, device="cpu", **precision).materialize(seed=3)
    copies = []
    copy = FakeLane.copy

    def counted(lane, to, sources):
        if lane.name == "fetches":
            copies.extend(each.nbytes for each in to)
        copy(lane, to, sources)

    with mock.patch.object(FakeLane, "copy", counted):
        losses = list(parallel_losses(model, num_steps=1, vocab_size=config.vocab_size))
        copies.clear()
        model.forward_backward({"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}, accumulate=True)
    ring, strategy = model.sharded.ring, model.strategies[0]
    said = combine_layouts(strategy.layout(unit, position=ring.position) for unit in model.spec.units)
    ring.watching.__exit__(None, None, None)
    slots = sum(slot.nbytes for slot in ring.slots())
    return losses, slots, said.slots_bytes, {slot.dtype for slot in ring.slots()}, sum(copies)


@pytest.mark.parametrize("precision", ["autocast_dtype", pytest.param("param_dtype", marks=pytest.mark.slow)])
def test_slots_take_what_the_layouts_say_and_slices_visit_in_the_precision_of_the_pass(tiny, precision):
    precisions = {}, {precision: torch.bfloat16}
    full, half = (run_ranks(account, tiny("llama"), each, num_ranks=3) for each in precisions)
    pairs = zip(full, half, strict=True)
    for (losses, taken, said, dtypes, fetched), (rounded, taken_16, said_16, dtypes_16, fetched_16) in pairs:
        assert (taken, taken_16) == (said, said_16) and taken_16 < taken
        assert dtypes == {torch.float32} and dtypes_16 == {torch.float32, torch.bfloat16}
        assert fetched_16 == fetched / 2 > 0
        assert rounded == pytest.approx(losses, rel=4 * 2.0**-8)  # four roundings of bfloat16


@pytest.mark.parametrize("options", [pytest.param("", marks=pytest.mark.slow), ",visits=2"])
def test_slots_are_no_larger_for_a_large_vocabulary(tiny, tmp_path, monkeypatch, options):
    """Tables come in parts, also beside slices that come together, and gradients are those of one process."""
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({**json.loads(Path(tiny("llama")).read_text()), "vocab_size": 6001}))
    layout = f"rtp=4[transport=symmetric_memory{options}]"
    ranks = run_ranks(account, path, {}, layout, num_ranks=4)
    (small, *_) = run_ranks(account, tiny("llama"), {}, layout, num_ranks=4)
    assert all(taken == said for _, taken, said, _, _ in ranks)
    assert max(taken for _, taken, *_ in ranks) <= 1.01 * small[1]
    report = verify(path, parallel=layout, layers=1, steps=1, timeout_s=240)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def test_a_copy_that_does_not_wait_for_the_model_is_found(tiny, monkeypatch):
    after = FakeLane.after
    monkeypatch.setattr(FakeLane, "after", lambda lane, mark: lane.name != "fetches" and after(lane, mark))
    with pytest.raises(RankFailure, match=r"OutOfOrder: rank \d: fetches writes what compute reads"):
        verify(tiny("llama"), parallel="rtp=3", layers=2, steps=2, timeout_s=240)

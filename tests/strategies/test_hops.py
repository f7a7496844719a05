"""`hops=bfloat16`: gradients under way in half the bytes, and no more rounding than one per rank."""

from types import SimpleNamespace

import pytest
import torch

import rotorch
from rotorch.comm.meter import Meter
from rotorch.comm.ring import GradientBuffer, RingSetup, Visit
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core.errors import ConfigError
from rotorch.core.layout import combine_layouts
from rotorch.core.spec import Range
from rotorch.models.hf import causal_lm, load_config
from rotorch.ops.rotate import SliceGradient
from rotorch.strategies import parse_parallel
from rotorch.strategies.rtp import apply
from rotorch.strategies.rtp.plan import RTP
from rotorch.testing.peer_memory import FakePeerMemory
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import micro_batch_of, traffic_problems

pytestmark = pytest.mark.usefixtures("warm")

LAYOUTS = (
    ("rtp=3[transport=send_receive]", {}),
    pytest.param("rtp=4[transport=send_receive,visits=2]", {}, marks=pytest.mark.slow),
    pytest.param("ddp=2,rtp=2[transport=send_receive]", {}, marks=pytest.mark.slow),
    pytest.param("rtp=2[transport=send_receive]", {"param_dtype": torch.bfloat16}, marks=pytest.mark.slow),
    pytest.param("rtp=2[transport=send_receive]", {"autocast_dtype": torch.bfloat16}, marks=pytest.mark.slow),
)


def gradients(path, layout, precision):
    """Gradients of a step with two micro-batches, traffic, and bytes of slots."""
    config = load_config(path)
    with rotorch.on_meta():
        module = causal_lm(config).train()
        module = module if precision else module.double()
    model = rotorch.parallelize(module, layout, device="cpu", **precision).materialize(seed=3)
    text = torch.randint(config.vocab_size, (4 * model.num_batch_ranks, 64), generator=torch.Generator().manual_seed(1))
    share = text.chunk(model.num_batch_ranks)[model.batch_rank]
    batch = [{"input_ids": rows, "labels": rows} for rows in share.chunk(2)]
    model.forward_backward(batch)
    model.module.zero_grad()
    model.forward_backward(batch)
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.forward_backward(batch[0], accumulate=True)  # a step of one micro-batch is what the next one expects
    with Meter(smallest_counted_bytes=32) as meter:  # a block of a slice may have few elements
        model.forward_backward(batch[0], accumulate=True)
    problems = list(traffic_problems(model, meter, batch=micro_batch_of(model, batch[0])))
    *_, rtp = model.strategies
    ring = model.mesh["rtp"].get_local_rank()
    said = combine_layouts(rtp.layout(unit, position=ring) for unit in model.spec.units)
    taken = sum(slot.nbytes for slot in model.sharded.slots())
    model.close()
    return grads, problems, taken, said.slots_bytes


def hopping(layout):
    return layout[:-1] + ",hops=bfloat16]"


def check(path, layout, precision, *, counts_traffic=True):
    size = {"ddp=2,": 4}.get(layout[:6], int(layout.partition("rtp=")[2][0]))
    before = run_ranks(gradients, path, layout, precision, num_ranks=size, timeout_s=240)
    after = run_ranks(gradients, path, hopping(layout), precision, num_ranks=size, timeout_s=240)
    for (exact, *_, slots, _), (rounded, problems, taken, said) in zip(before, after, strict=True):
        assert not problems or not counts_traffic, problems
        assert taken == said < slots
        off = {name: float((rounded[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        assert max(off.values()) < size * 2.0**-8, max(off.items(), key=lambda o: o[1])
        if not precision:
            assert off["model.norm.weight"] < 1e-12  # whole weights' gradients do not hop
            assert off["model.layers.0.mlp.down_proj.weight"] > 1e-4


@pytest.mark.parametrize(("layout", "precision"), LAYOUTS)
def test_gradients_are_rounded_once_per_rank_and_sent_in_half_the_bytes(tiny, layout, precision):
    check(tiny("llama"), layout, precision)


@pytest.fixture
def over_peer_memory(monkeypatch):
    """Every ring that ranks forked from here make lies in symmetric memory, that of a stand-in for CUDA."""

    def make_ring(_, *, mesh, numels_in_parts, later_parts, dtype, device, wire_dtype, hop_dtype, **given):
        setup = RingSetup(
            mesh,
            numels_in_parts,
            dtype,
            device=device,
            wire_dtype=wire_dtype,
            hop_dtype=hop_dtype,
            later_parts=later_parts,
        )
        together = {name: given[name] for name in ("num_visits", "flat_chunks")}
        ring = SymmetricMemoryRing(setup, **together, make_memory=FakePeerMemory)
        ring._memory.watched().__enter__()
        return ring

    monkeypatch.setattr(apply, "make_ring", make_ring)
    monkeypatch.setattr(RTP, "on_device", lambda strategy, _: strategy)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("rtp=3[transport=symmetric_memory]", {}),
        pytest.param("rtp=4[transport=symmetric_memory,visits=2]", {}, marks=pytest.mark.slow),
        pytest.param("rtp=2[transport=symmetric_memory]", {"param_dtype": torch.bfloat16}, marks=pytest.mark.slow),
    ],
)
def test_so_they_are_in_symmetric_memory(tiny, over_peer_memory, layout, precision):
    check(tiny("llama"), layout, precision, counts_traffic=False)


def test_a_token_that_comes_often_is_summed_before_it_is_rounded():
    """The sum of 4,096 ones in bfloat16 would end at 256."""
    sums = torch.zeros(3, 2, dtype=torch.bfloat16)
    ring = SimpleNamespace(
        dtype=torch.float32, gradient=lambda *_, **__: GradientBuffer(sums.view(-1), fresh=False, stays=True)
    )
    unit = SimpleNamespace(
        trained=True,
        item=0,
        ring=ring,
        reached=set(),
        slices=SimpleNamespace(weights=[None]),
        gradients=lambda buffer, *, index: [buffer.flat.view(3, 2)],
    )
    receiver = SliceGradient(unit, Visit(0, None, 0), wait=True)
    ids = torch.full((4096,), 5)
    receiver.add_rows(0, ids, torch.ones(4096, 2), rows=Range(4, 3))
    assert sums.tolist() == [[0, 0], [4096, 4096], [0, 0]]


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ("transport=shared_memory", "transport=shared_memory"),
        ("transport=hierarchical", "transport=hierarchical"),
        ("transport=send_receive,buffering=in_place", "buffering=in_place"),
        ("recompute=slice", "transport=auto on CPU"),
    ],
)
def test_where_nothing_hops_it_is_refused(tiny, options, because):
    def made():
        with rotorch.on_meta():
            module = causal_lm(load_config(tiny("llama")))
        rotorch.parallelize(module, f"rtp=4[{options},hops=bfloat16]", device="cpu")

    with pytest.raises(ConfigError, match=r"rtp: hops=bfloat16 is for messages out of place .*, not for") as refused:
        made()
    assert because in str(refused.value) and "Write rtp=4[hops=bfloat16,transport=send_receive]" in str(refused.value)


def test_for_weights_of_as_few_bits_it_is_refused(tiny):
    with rotorch.on_meta():
        module = causal_lm(load_config(tiny("llama"))).bfloat16()
    with pytest.raises(ConfigError, match="not for weights of 16 bits, whose gradients have as many"):
        rotorch.parallelize(module, "rtp=4[transport=send_receive,hops=bfloat16]", device="cpu")


def test_a_ring_of_one_sends_none():
    (alone,) = parse_parallel("rtp=1[hops=bfloat16]")
    assert alone.on_device("cpu") == alone

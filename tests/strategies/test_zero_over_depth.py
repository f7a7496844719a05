"""tesseract whose layers share their blocks at rest: exact, to the byte, and with a part of the optimizer's state."""

from functools import partial

import pytest
import torch
from on_grids import llama, sent

import rotorch
from rotorch.core.grid_memory import messages_of
from rotorch.core.messages import SUM_CHUNK_BYTES
from rotorch.core.traffic import Kind
from rotorch.models.hf import causal_lm, load_config
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import micro_batch_of
from rotorch.testing.verify import verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("tesseract=1x1x3[zero=true]", "gpt_neox"),  # fused blocks in uneven shards
        ("tesseract=2x2x2[zero=true]", "llama"),
        ("ddp=2,tesseract=1x1x2[zero=true]", "qwen3"),
        pytest.param("tesseract=2x2x2[zero=true,transport=messages]", "olmo2", marks=pytest.mark.slow),
        pytest.param("tesseract=2x2x2[zero=true]", "gemma2", marks=pytest.mark.slow),
        pytest.param("tesseract=2x2x2[zero=true]", "gpt_neox", marks=pytest.mark.slow),
        pytest.param("tesseract=2x2x2[zero=true]", "qwen3", marks=pytest.mark.slow),
    ],
)
def test_is_exact(tiny, layout, family):
    report = verify(tiny(family), parallel=layout, layers=2, steps=2, timeout_s=600)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


@pytest.mark.parametrize("parallel", ["tesseract=2x2x2[zero=true]", "tesseract=4x4x4[zero=true]"])
def test_bytes_are_the_layouts_to_the_byte(tiny, parallel):
    total = num_ranks(parse_parallel(parallel))
    for rank in (0, total - 1):
        found, said = sent(llama(tiny, num_key_value_heads=8, vocab_size=330), parallel, rank=rank)
        assert found == said, rank


def test_shards_send_what_whole_gradients_do(tiny):
    """A sum is a reduce-scatter and an all-gather; here of gradients and then of weights."""
    module = partial(llama, tiny, num_key_value_heads=8, vocab_size=328)
    whole, _ = sent(module(), "tesseract=2x2x2", rank=0)
    cut, _ = sent(module(), "tesseract=2x2x2[zero=true]", rank=0)
    assert cut[Kind.BROADCAST] == whole[Kind.BROADCAST] and cut[Kind.REDUCE] == whole[Kind.REDUCE]
    # What norms' gradients are summed over rows is half as much, too; nothing else differs.
    assert 0.98 * sum(whole.values()) < sum(cut.values()) <= sum(whole.values())
    assert cut[Kind.ALL_REDUCE] < whole[Kind.ALL_REDUCE]


def held(config, parallel):
    """Bytes of this rank at rest (weights, gradients, averages of AdamW), of its slots, and what its Layout says."""
    with rotorch.on_meta():
        model = rotorch.parallelize(causal_lm(config), parallel, device="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.arange(2 * 12).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        optimizer.zero_grad()
        model.forward_backward(batch)
        optimizer.step()
    weights = sum(h.local.nbytes for h in model.weights.values())
    storages = [h.local.untyped_storage().nbytes() for h in model.weights.values()]
    gradients = sum(h.local_grad.nbytes for h in model.weights.values())
    averages = sum(s["exp_avg"].to_local().nbytes for s in optimizer.state.values())
    slots = sum(slot.nbytes for slot in model.sharded.slots())
    unsharded = [leaf.untyped_storage().nbytes() for leaf in model.sharded.shards.leaves.values()]
    position = torch.distributed.get_rank()
    said = model.strategies[0].layout_of(model.spec, batch=micro_batch_of(model, batch), position=position)
    model.close()
    return weights, sum(storages), gradients, averages, sum(unsharded), slots, said.resident_bytes, said.slots_bytes


@pytest.mark.parametrize("parallel", ["tesseract=1x1x3[zero=true,transport=shared_memory]"])
def test_a_rank_holds_its_shard_at_rest_and_nothing_else(tiny, parallel):
    config = load_config(tiny("llama"))
    config.num_hidden_layers = 2
    total = 0
    for weights, storages, gradients, averages, unsharded, slots, said, said_slots in run_ranks(
        held, config, parallel, num_ranks=3
    ):
        assert weights == storages == gradients == averages == said
        assert unsharded == 0
        assert slots == said_slots > 0
        total += weights
    with rotorch.on_meta():
        whole = sum(p.numel() * 4 for p in causal_lm(config).parameters())
    assert total == whole


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([1, 2, 3], [(0, 2), (2, 3)]),
        ([9, 1, 1, 2], [(0, 1), (1, 4)]),
        ([4, 4], [(0, 1), (1, 2)]),
    ],
)
def test_neighbours_travel_together_up_to_a_limit(sizes, expected):
    quarter = SUM_CHUNK_BYTES // 2 // 4
    assert messages_of([quarter * size for size in sizes], depth=2) == [range(*each) for each in expected]

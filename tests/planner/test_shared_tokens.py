"""Sequences that ranks share, as the planner sees them: tokens, keys, blocks, work and messages of one rank."""

from dataclasses import replace

import pytest
from shapes import attending, transformer

from rotorch.core.shared_context import KeysAndValues, SequenceRanks
from rotorch.core.traffic import MicroBatch
from rotorch.core.zigzag import KeyExchange, block_size, blocks_of, zigzag
from rotorch.planner.cluster import load_cluster
from rotorch.planner.planned import Planned
from rotorch.planner.prediction import predict
from rotorch.planner.shared_tokens import (
    TracedAttention,
    attention_passes,
    backward_bytes,
    blocks_of_rank,
    kept_bytes,
    own_tokens,
    slowest_exchange,
)
from rotorch.planner.speeds import speeds_of
from rotorch.planner.step_time import step_time
from rotorch.planner.workload import Numerics, fold
from rotorch.strategies import parse_parallel

BY_KEYS = SequenceRanks(4)
AGAIN = SequenceRanks(4, fetches_again=True)
BY_HEADS = SequenceRanks(4, by_heads=True)


@pytest.mark.parametrize(("tokens", "ranks"), [(1024, 8), (1000, 3), (7, 2)])
def test_a_rank_has_the_longest_part(tokens, ranks):
    parts = [sum(chunk.length for chunk in chunks) for chunks in zigzag(tokens, num_ranks=ranks)]
    assert own_tokens(MicroBatch(3, tokens), num_ranks=ranks) == MicroBatch(3, max(parts))


@pytest.mark.parametrize("tokens", [5, 31, 4096, 100_000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_are_those_that_the_model_attends_in(tokens, ranks):
    each = [
        [block for chunk in chunks for block in blocks_of(chunk, num_tokens=tokens)]
        for chunks in zigzag(tokens, num_ranks=ranks)
    ]
    found = blocks_of_rank(tokens, ranks, None)
    assert found.pairs == max(sum(block.length * block.stop for block in blocks) for blocks in each)
    assert max(block.length for blocks in each for block in blocks) <= block_size(tokens)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_computes_its_part_of_a_causal_half(ranks):
    pairs = blocks_of_rank(4096, ranks, None).pairs
    assert 1.0 < pairs / (4096 * 4097 / 2 / ranks) < 1.07


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("window", [None, 100])
def test_keys_that_are_kept_are_those_that_the_exchange_brings(window, device):
    needed = max(KeyExchange(1001, 4, rank, window).num_needed for rank in range(4))
    attention = TracedAttention(query_bytes=64.0, key_bytes=16.0, window=window)
    # Where a kernel takes chunks at once, also sums of scores, and on GPUs the outputs of each, as wide as queries.
    outputs = 251 * (4 + 64 * (device == "cuda")) if window is None else 0
    batch = MicroBatch(3, 1001)
    assert kept_bytes(attention, batch=batch, shared_by=BY_KEYS, device=device) == 3 * (needed * 16 + outputs)
    assert kept_bytes(attention, batch=batch, shared_by=AGAIN, device=device) == 3 * (251 * 16 + outputs)
    more = backward_bytes(attention, batch=batch, shared_by=AGAIN)
    assert more == backward_bytes(attention, batch=batch, shared_by=BY_KEYS) + 3 * needed * 16
    assert needed == 1001 if window is None else needed <= 1001 // 4 + 1 + 2 * 99


def test_heads_that_share_keys_are_repeated_in_a_block_of_backward():
    batch, alone = MicroBatch(1, 8192), TracedAttention(query_bytes=512.0, key_bytes=128.0, window=8191)
    grouped = replace(alone, heads=8)
    more = backward_bytes(grouped, batch=batch, shared_by=BY_KEYS) - backward_bytes(
        alone, batch=batch, shared_by=BY_KEYS
    )
    assert more == 8192 * (2 * 1024 - 128)


def test_heads_that_are_exchanged_are_kept_by_one_rank():
    """Of 1,001 tokens of 4 ranks, 251 of one; eight heads, whose keys two or four share."""
    batch = MicroBatch(3, 1001)
    attention = TracedAttention(query_bytes=64.0, key_bytes=32.0, heads=8, key_heads=4)
    queries, keys, sums = 1001 * 64 / 4, 1001 * 32 / 4, 1001 * 4 * 8 / 4
    dealt = 3 * (2 * queries + keys + sums - 251 * 64)  # outputs are as wide as queries
    assert kept_bytes(attention, batch=batch, shared_by=BY_HEADS, device="cpu") == dealt
    windows = replace(attention, window=100)  # block by block, each computed again
    assert kept_bytes(windows, batch=batch, shared_by=BY_HEADS, device="cpu") == 3 * (queries + keys - 251 * 64)
    few = replace(attention, key_heads=2)  # two ranks have the same keys
    assert kept_bytes(few, batch=batch, shared_by=BY_HEADS, device="cpu") == dealt + 3 * keys
    wide = replace(attention, is_square=False)  # no fused kernel takes values of another width
    assert kept_bytes(wide, batch=batch, shared_by=BY_HEADS, device="cpu") == 3 * (queries + keys - 251 * 64)
    all_tokens = replace(attention, window=1001)
    assert kept_bytes(all_tokens, batch=batch, shared_by=BY_HEADS, device="cpu") == dealt
    uneven = replace(attention, key_heads=5, heads=5)  # two of five heads
    assert uneven.dealt(4) == (0.4, 0.4 * 64, 0.4 * 32)


@pytest.mark.parametrize("by_heads", [False, True])
def test_an_attention_to_all_tokens_is_computed_once(by_heads):
    model = fold(attending(transformer(layers=1)))
    passes = attention_passes(
        model, model.classes[0], batch=MicroBatch(1, 4096), shared_by=replace(BY_KEYS, by_heads=by_heads)
    )
    assert passes.backward_input.flops == pytest.approx(2.5 * passes.forward.flops)
    assert passes.forward.flops == 4 * 4096**2 / 2 / 4 * model.attention_width


def test_all_ranks_wait_for_the_one_that_sends_or_gets_most():
    spec, (ring,) = attending(transformer(layers=1)), parse_parallel("rtp=4[context=4]")
    unit = next(unit for unit in spec.units if unit.note(KeysAndValues) is not None)
    forward, backward = slowest_exchange(unit, strategy=ring, batch=MicroBatch(2, 64))
    width = unit.note(KeysAndValues).width
    assert forward.sent_bytes == backward.sent_bytes == 2 * (64 - 64 // 4) * width * 4
    (by_heads,) = parse_parallel("rtp=4[context=4,exchange=heads]")
    expected = by_heads.activation_transfers(unit, batch=MicroBatch(2, 64), position=1)  # equal parts: as every rank
    assert slowest_exchange(unit, strategy=by_heads, batch=MicroBatch(2, 64)) == expected
    assert len({transfer.sent_bytes for transfer in expected}) == 2  # sets, and outputs
    assert not slowest_exchange(unit, strategy=parse_parallel("rtp=4")[0], batch=MicroBatch(2, 64))


def test_attention_in_blocks_is_computed_once_more_in_backward():
    model = fold(attending(transformer(layers=1), window=100))
    passes = attention_passes(model, model.classes[0], batch=MicroBatch(1, 4096), shared_by=BY_KEYS)
    assert passes.backward_input.flops == pytest.approx(3.5 * passes.forward.flops)
    assert passes.forward.flops == 4 * blocks_of_rank(4096, 4, 100).pairs * model.attention_width


def seconds(text, *, rows, tokens):
    spec, strategies = attending(transformer(layers=4)), parse_parallel(text)
    plan = Planned(
        model=fold(spec).short().under(strategies[-1]),
        strategies=strategies,
        batch=MicroBatch(rows, tokens, itemsize=2),
        accumulation=1,
        speeds=speeds_of(load_cluster("h100x8"), dtype="bfloat16"),
        numerics=Numerics(),
    )
    return step_time(plan)


def test_ranks_that_share_a_sequence_compute_a_part_each_and_wait_for_keys():
    whole, shared = seconds("fsdp=8", rows=1, tokens=16384), seconds("fsdp=8[context=8]", rows=8, tokens=16384)
    # Of the same tokens per rank; blocks are computed again, and masked scores are computed.
    assert whole.compute_s < shared.compute_s < 1.8 * whole.compute_s
    assert shared.busy_s["collective"] > whole.busy_s["collective"]
    assert seconds("fsdp=8[context=8]", rows=1, tokens=16384).compute_s < 0.4 * whole.compute_s


def test_stages_pass_on_the_tokens_that_a_rank_has():
    """Strategies around those whose ranks share sequences are told of a rank's own part."""
    spec = transformer(layers=6, width=64)
    strategies = (*parse_parallel("pp=3"), *parse_parallel("fsdp=2[context=2]"))
    sent = [
        predict(spec, strategies=strategies, rank=rank, batch=MicroBatch(3, 9)).sent_bytes["send"] for rank in (0, 1)
    ]
    assert sent == [3 * tokens * 64 * 4 for tokens in (5, 4)]

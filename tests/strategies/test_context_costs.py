"""Costs of shared sequences: bytes that ranks send, and bytes that they keep."""

import pytest
import torch
from context_models import MODELS, TINY, tiny_config
from small_configs import SIZES, config_of

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.traffic import Kind, MicroBatch
from rotorch.core.zigzag import KeyExchange, zigzag
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.models.shared_sequence import SharedSequence
from rotorch.strategies import parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import sent_and_said

pytestmark = pytest.mark.usefixtures("warm")


# ---- what it sends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "num_tokens"),
    [
        ("tsp=2[transport=send_receive]", 8),
        ("rtp=4[context=2,transport=send_receive]", 10),
        ("tsp=4[transport=send_receive]", 9),
        ("fsdp=4[context=4]", 13),
        ("fsdp=2[context=2,recompute=block]", 8),
        ("tsp=2[transport=send_receive,exchange=heads]", 9),
        ("fsdp=4[context=4,exchange=heads,recompute=block]", 13),  # two heads of keys, each for two ranks
        ("tsp=2[transport=send_receive,recompute=slice]", 9),  # keys are fetched again
        ("tsp=2[transport=send_receive,recompute=slice,exchange=heads]", 9),  # heads are not
    ],
)
def test_bytes_of_keys_and_values_are_the_formulas_to_the_byte(tiny, layout, num_tokens):
    """Weights and keys apart: one process as one of the ranks."""
    config = load_config(tiny("llama"))
    with rotorch.on_meta():
        module = causal_lm(config).train()
    (strategy,) = parse_parallel(layout)
    batch = global_batch(
        seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=num_tokens,
        vocab_size=config.vocab_size,
    )  # fmt: skip
    with as_rank(1, num_ranks=strategy.num_ranks):
        sent, said = sent_and_said(module, layout, batch=batch)
    assert sent == said
    size, of_keys = 2 * 4 * config.num_hidden_layers, 2 * config.num_key_value_heads * config.head_dim  # rows, bytes
    forwards = 2 if "block" in layout or strategy.sequence_ranks.fetches_again else 1
    if strategy.exchange == "gather":
        part = KeyExchange(num_tokens, strategy.context, 1)
        expected = size * of_keys * (forwards * part.num_sent + part.num_received)
    else:
        chunks = zigzag(num_tokens, num_ranks=strategy.context)
        mine, *others = (sum(chunk.length for chunk in chunks[rank]) for rank in (1, 0, 2, 3)[: strategy.context])
        heads, keys = (
            config.num_attention_heads // strategy.context,
            max(config.num_key_value_heads // strategy.context, 1),
        )
        of_queries, of_set = heads * config.head_dim, (heads + 2 * keys) * config.head_dim
        forward = len(others) * mine * of_set + sum(others) * of_queries  # sets to all, outputs of one's own back
        expected = size * (forwards * forward + len(others) * mine * of_queries + sum(others) * of_set)
    with rotorch.on_meta():
        spec = strategy.units_of(describe(causal_lm(config), context=True))
    micro_batch = MicroBatch(2, num_tokens)
    moved = [t for unit in spec.units for t in strategy.activation_transfers(unit, batch=micro_batch, position=1)]
    assert sum(t.sent_bytes for t in moved) == expected > 0
    if strategy.kind == "fsdp":  # whose weights are gathered: messages are keys
        assert sent[Kind.SEND] == expected


@pytest.mark.parametrize(("exchange", "model"), [("gather", "llama"), ("heads", "llama"), ("gather", "gpt_oss")])
def test_under_autocast_what_attentions_compute_with_travels(exchange, model):
    """Rotary embeddings give float32 also under autocast; attentions convert it, and here that is done before."""
    config = tiny_config(model)
    with rotorch.on_meta():
        module, spec = causal_lm(config).train(), describe(causal_lm(config), context=True)
    layout = f"fsdp=2[context=2,exchange={exchange}]"
    batch = global_batch(seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=12, vocab_size=96)
    with as_rank(1, num_ranks=2):
        parallel = rotorch.parallelize(module, layout, device="cpu", autocast_dtype=torch.bfloat16)
        parallel.materialize(seed=0)
        with Meter() as meter:
            parallel.forward_backward(batch)
        parallel.close()
    (strategy,) = parse_parallel(layout)
    micro_batch = MicroBatch(2, 12, itemsize=2)
    moved = [t for unit in spec.units for t in strategy.activation_transfers(unit, batch=micro_batch, position=1)]
    assert meter.sent_bytes[Kind.SEND] == sum(t.sent_bytes for t in moved) > 0


@pytest.mark.parametrize("model", ["mistral", "gemma3_text", "gpt_oss"])
def test_bytes_of_keys_within_windows(model):
    """The Layout knows the window of each layer; long sequences send no more than short ones where all have one."""
    config, sent = tiny_config(model), {}
    for num_tokens in (24, 48):
        batch = global_batch(
            seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=num_tokens, vocab_size=96
        )
        with rotorch.on_meta():
            module = causal_lm(config).train()
        with as_rank(0, num_ranks=2):
            found, expected = sent_and_said(module, "fsdp=2[context=2]", batch=batch)
        assert found == expected
        sent[num_tokens] = found[Kind.SEND]
    assert (sent[48] == sent[24]) == (model == "mistral")


# ---- what a rank keeps ---------------------------------------------------------------------------------------------

LONG = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}


def kept_by(model, layout, num_tokens):
    """Bytes that autograd keeps when backward begins, each storage once, without weights."""
    with rotorch.on_meta():
        config = config_of(model, **TINY | MODELS[model] | LONG, use_cache=False)
        module = causal_lm(config).train()
    parallel = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
    ids = torch.arange(num_tokens).view(1, -1) % 96
    weights = {held.local.untyped_storage().data_ptr() for held in parallel.weights.values()}
    kept, sizes = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # alive, so that no other takes its place
        return tensor

    def unpack(tensor):
        if not sizes:
            sizes.append(sum(each.untyped_storage().nbytes() for each in kept.values()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        parallel.forward_backward({"input_ids": ids, "labels": ids})
    parallel.close()
    return sizes[0]


def test_a_rank_keeps_as_much_of_four_times_as_many_tokens_but_for_their_keys():
    """Neither masks nor scores, which grow with the square of the length."""
    num_tokens = 256
    alone = run_ranks(kept_by, "llama", "rtp=4", num_tokens, num_ranks=4)
    shared = run_ranks(kept_by, "llama", "tsp=4", 4 * num_tokens, num_ranks=4)
    of_keys = 2 * 2 * 16 * SIZES["num_hidden_layers"] * 4 * num_tokens * 4
    assert max(shared) <= 1.08 * max(alone) + of_keys
    outputs = SIZES["num_hidden_layers"] * num_tokens * 128 * 4  # of attentions, of a rank's heads
    by_heads = run_ranks(kept_by, "llama", "tsp=4[exchange=heads]", 4 * num_tokens, num_ranks=4)
    assert max(by_heads) <= 1.08 * max(alone) + outputs
    assert max(by_heads) == min(by_heads)  # no rank keeps more than another


def bytes_of_keys(num_tokens):
    """Of all layers together: each time an attention's keys are there again, and at the end; and those of one."""
    with rotorch.on_meta():
        module = causal_lm(tiny_config("llama", use_cache=False)).train()
    parallel = rotorch.parallelize(module, "tsp=2[recompute=slice]", device="cpu").materialize(seed=0)
    ids, fetched, found = torch.arange(num_tokens).view(1, -1) % 96, [], []

    def note(*_):
        found.append(sum(each.untyped_storage().nbytes() for each in fetched))

    fetch_again = SharedSequence._fetch_again

    def watched(self, keys, *, output, **more):
        fetched.append(keys)
        fetch_again(self, keys, output=output, **more)
        output.register_hook(note)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedSequence, "_fetch_again", watched)
        parallel.forward_backward({"input_ids": ids, "labels": ids})
    note()
    parallel.close()
    return found, max(each.nbytes for each in fetched)


def test_keys_of_one_layer_exist_at_a_time():
    for found, of_layer in run_ranks(bytes_of_keys, 64, num_ranks=2):
        assert max(found) == of_layer and found[-1] == 0


def test_keys_that_are_fetched_again_are_not_kept():
    num_tokens, layers = 1024, SIZES["num_hidden_layers"]
    kept = run_ranks(kept_by, "llama", "tsp=4[recompute=all_but_attention]", num_tokens, num_ranks=4)
    again = run_ranks(kept_by, "llama", "tsp=4[recompute=slice]", num_tokens, num_ranks=4)
    needed = [KeyExchange(num_tokens, 4, rank).num_needed for rank in range(4)]
    keys, own = (2 * 2 * 16 * layers * tokens * 4 for tokens in (min(needed), num_tokens // 4))
    assert all(k - a >= keys - own for k, a in zip(kept, again, strict=True))

"""Sequences that ranks share: exact on many models, to the byte, refused where they could not be right."""

import re

import pytest
import torch
from context_models import MODELS, TINY, module_of, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from small_configs import SIZES, config_of

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.shared_context import KeysAndValues, SequenceRanks, key_value_transfers
from rotorch.core.spec import Combine, Unit, UnitKind
from rotorch.core.traffic import Kind, MicroBatch, Phase
from rotorch.core.zigzag import HeadExchange, KeyExchange, blocks_of, seen_by, zigzag
from rotorch.drop_in.plain_loops import check_plain_loop
from rotorch.models import describe as describing
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.strategies import batch_ranks, context_ranks, format_parallel, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.batches import global_batch
from rotorch.testing.compare import relative_error
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import CausalLM, compute_exactly
from rotorch.testing.verify import BAR, verify_subject

pytestmark = pytest.mark.usefixtures("warm")

# ---- the text, and who has what ------------------------------------------------------------------------------------


def test_tsp_is_short_for_a_ring_that_shares_a_sequence():
    assert parse_parallel("tsp=4") == parse_parallel("rtp=4[context=4]")
    assert parse_parallel("ddp=2,tsp=2[recompute=slice]") == parse_parallel("ddp=2,rtp=2[recompute=slice,context=2]")
    assert format_parallel(parse_parallel("tsp=4")) == "rtp=4[context=4]"


@pytest.mark.parametrize(
    ("layout", "shares", "sharing"),
    [("tsp=4", 1, 4), ("rtp=4[context=2]", 2, 2), ("ddp=3,fsdp=4[context=2]", 6, 2), ("rtp=4", 4, 1)],
)
def test_ranks_that_share_a_sequence_have_one_share_of_the_batch(layout, shares, sharing):
    strategies = parse_parallel(layout)
    assert (batch_ranks(strategies), context_ranks(strategies)) == (shares, sharing)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("rtp=4[context=3]", "context=3 does not divide rtp=4"),
        ("fsdp=2[context=4]", "Write context=2"),
        ("tsp=4[context=2]", "Write rtp=4[context=..]"),
        ("tsp=2[exchange=ring]", "exchange"),
        ("megatron=2[context=2]", "megatron has no option 'context'"),
    ],
)
def test_refused_by_the_text_alone(layout, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_parallel(layout)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [4, 7, 24, 31, 1000])
def test_chunks_cover_a_sequence_and_weigh_the_same(num_tokens, num_ranks):
    chunks = zigzag(num_tokens, num_ranks=num_ranks)
    every = sorted(i for of_rank in chunks for chunk in of_rank for i in range(chunk.start, chunk.stop))
    assert every == list(range(num_tokens))
    lengths = [sum(chunk.length for chunk in of_rank) for of_rank in chunks]
    assert max(lengths) - min(lengths) <= 1
    scores = [sum(i + 1 for chunk in of_rank for i in range(chunk.start, chunk.stop)) for of_rank in chunks]
    if num_tokens == 1000:
        assert max(scores) <= 1.02 * min(scores)


@given(
    num_tokens=st.integers(4, 200),
    num_ranks=st.integers(1, 4),
    window=st.none() | st.integers(1, 250),
)
def test_every_rank_gets_the_keys_that_its_tokens_see_and_no_others(num_tokens, num_ranks, window):
    """Keys numbered by token: what ranks send lies where blocks look for it, and gradients have their way back."""
    parts = [KeyExchange(num_tokens, num_ranks, rank, window) for rank in range(num_ranks)]
    for part in parts:
        keys = [None] * part.num_needed
        for other in parts:
            own = [token for chunk in other.chunks for token in range(chunk.start, chunk.stop)]
            sent, received = other.sends(part.rank), part.receives(other.rank)
            assert [each.length for each in sent] == [each.length for each in received]
            for there, here in zip(sent, received, strict=True):
                keys[here.start : here.stop] = own[there.start : there.stop]
        assert None not in keys
        wanted = {
            key for chunk in part.chunks for token in range(chunk.start, chunk.stop)
            for key in range(0 if window is None else max(0, token - window + 1), token + 1)
        }  # fmt: skip
        assert keys == sorted(wanted)
        for chunk in part.chunks:
            for block in blocks_of(chunk, num_tokens=num_tokens):
                seen = seen_by(block, window=window)
                assert keys[part.offset(seen) :][: seen.length] == list(range(seen.start, seen.stop))
    assert sum(part.num_sent for part in parts) == sum(part.num_received for part in parts)


@given(num_tokens=st.integers(4, 60), num_ranks=st.integers(1, 4), num_sets=st.integers(4, 9))
def test_every_rank_gets_all_tokens_of_its_heads_and_they_find_their_way_back(num_tokens, num_ranks, num_sets):
    """Numbered by set and token. Back at home they are where they were."""
    parts = [HeadExchange(num_tokens, num_ranks, rank, num_sets).moves for rank in range(num_ranks)]
    own = [
        {(s, place): (s, token) for s in range(num_sets) for place, token in enumerate(tokens_of(chunks))}
        for chunks in zigzag(num_tokens, num_ranks=num_ranks)
    ]

    def moved(moves, given):
        return [
            {
                there: given[source][here]
                for source in range(num_ranks)
                for here, there in zip(
                    places_of(moves[source].sends[rank]), places_of(moves[rank].receives[source]), strict=True
                )
            }
            for rank in range(num_ranks)
        ]

    dealt = moved(parts, own)
    assert [set(each) for each in dealt] == [
        {(s, token) for s in range(moves.num_made[0]) for token in range(num_tokens)} for moves in parts
    ]
    assert all(found[1] == place[1] for each in dealt for place, found in each.items())  # tokens in order
    assert sorted(found for each in dealt for found in each.values()) == [
        (s, token) for s in range(num_sets) for token in range(num_tokens)
    ]
    assert moved([moves.back for moves in parts], dealt) == own
    assert sum(moves.sent for moves in parts) == sum(moves.received for moves in parts)


def tokens_of(chunks):
    return [token for chunk in chunks for token in range(chunk.start, chunk.stop)]


def places_of(part):
    """Heads and tokens of a part, in the order in which a message has them."""
    return [(head, token) for token in tokens_of(part.tokens) for head in tokens_of([part.heads])]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_no_rank_computes_more_scores_than_another_and_few_are_masked(num_ranks):
    num_tokens = 4096
    scores = [
        sum(
            block.length * seen_by(block, window=None).length
            for chunk in chunks
            for block in blocks_of(chunk, num_tokens=num_tokens)
        )
        for chunks in zigzag(num_tokens, num_ranks=num_ranks)
    ]
    assert max(scores) <= 1.02 * min(scores)
    assert sum(scores) <= 1.1 * num_tokens * (num_tokens + 1) / 2


def test_keys_sent_are_three_quarters_of_a_gather_or_those_of_a_window():
    for c in (2, 4, 8):
        parts = [KeyExchange(1 << 12, c, rank) for rank in range(c)]
        assert sum(part.num_sent for part in parts) == 3 * (c - 1) * (1 << 12) // 4
        of_length = [[KeyExchange(t, c, rank, 128).num_sent for rank in range(c)] for t in (1 << 12, 1 << 17)]
        assert of_length[0] == of_length[1] and max(of_length[0]) <= 2 * 127


def test_keys_go_out_in_forward_and_gradients_come_back():
    """Two rows of 24 tokens with 12 features in float32. A send's payload is what it sends."""
    unit = Unit("attention", UnitKind.MODULE, Combine.SUM, (), notes=(KeysAndValues(width=12),))
    part = KeyExchange(24, 3, 1)
    for num_forwards in (1, 2):
        found = key_value_transfers(
            unit, batch=MicroBatch(2, 24), shared_by=SequenceRanks(3), axis="rtp", position=4, num_forwards=num_forwards
        )
        assert [t.sent_bytes for t in found] == [
            96 * tokens for tokens in (*[part.num_sent] * num_forwards, part.num_received)
        ]
        assert [t.payload_bytes for t in found] == [t.sent_bytes for t in found]
        assert [t.phase for t in found] == [Phase.FORWARD] + [Phase.BACKWARD] * num_forwards
        assert {(t.kind, t.axis, t.num_messages) for t in found} == {(Kind.SEND, "rtp", 2)}


# ---- the same as one process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param("rtp=2[context=2]", "llama", marks=pytest.mark.slow),
        ("tsp=3", "gpt_oss"),
        pytest.param("rtp=4[context=2]", "mistral", marks=pytest.mark.slow),
        pytest.param("tsp=4", "gemma2", marks=pytest.mark.slow),
        ("fsdp=2[context=2]", "gemma3_text"),
        pytest.param("fsdp=4[context=2,recompute=block]", "cohere2", marks=pytest.mark.slow),
        ("fsdp=3[context=3,reshard=false]", "qwen3"),
        ("tsp=2[transport=send_receive]", "gemma3_text"),  # slices visit: heads would be others on each rank
        ("tsp=2[transport=send_receive,recompute=slice]", "qwen3"),
        ("tsp=2[transport=send_receive,buffering=in_place,recompute=none]", "phi3"),
        pytest.param("tsp=2[recompute=slice]", "llama", marks=pytest.mark.slow),
        pytest.param("rtp=4[context=2,transport=send_receive]", "gpt_oss", marks=pytest.mark.slow),
        ("ddp=2,tsp=2", "cohere2"),
        pytest.param("ddp=2,fsdp=2[context=2]", "llama", marks=pytest.mark.slow),
        pytest.param("tsp=2[recompute=all_but_attention,transport=send_receive]", "cohere2", marks=pytest.mark.slow),
        pytest.param("tsp=2[recompute=none]", "mistral", marks=pytest.mark.slow),
        ("tsp=2[exchange=heads]", "gemma3_text"),  # two heads of keys
        pytest.param("tsp=4[exchange=heads]", "qwen3", marks=pytest.mark.slow),
        ("fsdp=4[context=4,exchange=heads]", "mistral"),  # fewer heads of keys than ranks
        pytest.param(
            "rtp=4[context=2,exchange=heads,transport=send_receive,recompute=slice]", "cohere2", marks=pytest.mark.slow
        ),
        ("fsdp=2[context=2,exchange=heads,recompute=block]", "gemma2"),  # by the model's own code
        ("pp=2,tsp=2", "gemma3_text"),
        # With padding: below.
        pytest.param("pp=2,fsdp=2[context=2,recompute=block]", "mistral", marks=pytest.mark.slow),
        pytest.param("pp=2[schedule=zb_h1],rtp=2[context=2,exchange=heads]", "cohere2", marks=pytest.mark.slow),
        *(
            pytest.param(f"tsp={n}", model, marks=pytest.mark.slow)
            for n in (2, 3, 4)
            for model in MODELS
            if (n, model) not in {(3, "gpt_oss"), (4, "gemma2")}  # above
        ),
    ],
)
def test_is_exact(layout, model):
    """Sequences of 32 tokens: on three ranks chunks are not equally long."""
    config = tiny_config(model)
    compute_exactly(config)
    subject = CausalLM(config, 1)
    report = verify_subject(
        subject, name=model, parallel=layout, steps=1, seed=0, timeout_s=300, device="cpu", directory=None
    )
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.num_modules_compared > 12


def gradients_on(shares, config, layout):
    """Loss, gradients, and the evaluation of a model on this rank's share of the batches."""
    with exact_arithmetic():
        model = rotorch.parallelize(module_of(config), layout, device="cpu")
        batches = shares[model.batch_rank]
        loss = float(model.forward_backward(batches))
        gradients = {name: model.full_tensor(name, grad=True) for name in model.weights}
        found = model.evaluate(batches)
    model.close()
    return loss, gradients, found.loss, found.num_targets


def padded_batches():
    """Two shares of two micro-batches, of 13 and 11 tokens, whose rows end in padding."""
    shares = []
    for share in range(2):
        batches = []
        for num_tokens in (13, 11):
            batch = global_batch(
                seed=share, step=num_tokens, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=num_tokens,
                vocab_size=SIZES["vocab_size"],
            )  # fmt: skip
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, num_tokens - 4 :] = 0
            batch["labels"][1, num_tokens - 4 :] = -100
            batches.append(batch)
        shares.append(batches)
    return shares


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("mistral", "rtp=4[context=2]"),
        pytest.param("gpt_oss", "rtp=4[context=2]", marks=pytest.mark.slow),  # by the model's own code
        pytest.param("gemma3_text", "fsdp=4[context=2,exchange=heads]", marks=pytest.mark.slow),
        # Backward computes a layer again behind forwards of micro-batches with another length and other padding.
        ("mistral", "pp=2,fsdp=2[context=2,recompute=block]"),
    ],
)
def test_padding_and_micro_batches_of_other_lengths(model, layout):
    config = tiny_config(model)
    compute_exactly(config)
    shares = padded_batches()[: batch_ranks(parse_parallel(layout))]
    results = run_ranks(gradients_on, shares, config, layout, num_ranks=4)
    micro_batches = [batch for share in shares for batch in share]
    num_targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    expected = 0.0
    with exact_arithmetic():
        reference = module_of(config)
        for batch in micro_batches:
            loss = reference(**batch, num_items_in_batch=num_targets).loss
            loss.backward()
            expected += loss.item()
    for loss, gradients, evaluated, counted in results:
        assert loss == pytest.approx(expected, rel=BAR)
        assert evaluated == pytest.approx(expected, rel=BAR)
        assert counted == num_targets
        for name, parameter in reference.named_parameters():
            scale = max(float(parameter.grad.abs().max()), 1e-6)
            assert float((gradients[name] - parameter.grad).abs().max()) <= BAR * scale, name


@pytest.mark.parametrize(
    ("model", "layout"),
    [("gemma3_text", "tsp=2"), ("gpt_oss", "fsdp=2[context=2]"), ("gemma3_text", "tsp=2[exchange=heads]")],
)
def test_documents_of_a_row_stay_apart(model, layout):
    """Their borders lie elsewhere in each row, within chunks and between them, also between this rank's two."""
    config = tiny_config(model)
    compute_exactly(config)
    batch = global_batch(seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=3, num_tokens=22, vocab_size=96)
    lengths = [(5, 11, 6), (6, 16), (1, 20, 1)]
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    results = run_ranks(gradients_on, [[batch]], config, layout, num_ranks=2)
    with exact_arithmetic():
        reference, expected = module_of(config), 0.0
        num_targets = int((batch["labels"][:, 1:] != -100).sum())
        for row, of_row in enumerate(lengths):
            for name in ("input_ids", "labels"):
                assert sum(of_row) == batch[name].shape[1]
            parts = [batch[name][row].split(of_row) for name in ("input_ids", "labels")]
            for ids, labels in zip(*parts, strict=True):
                loss = reference(input_ids=ids[None], labels=labels[None], num_items_in_batch=num_targets).loss
                loss.backward()
                expected += loss.item()
    for loss, gradients, evaluated, counted in results:
        assert loss == pytest.approx(expected, rel=BAR) and evaluated == pytest.approx(expected, rel=BAR)
        assert counted == num_targets
        for name, parameter in reference.named_parameters():
            scale = max(float(parameter.grad.abs().max()), 1e-6)
            assert float((gradients[name] - parameter.grad).abs().max()) <= BAR * scale, name


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("llama", "fsdp=2[exchange=heads]", "says what ranks that share a sequence exchange, and none do. Write"),
        (
            "llama",
            "tsp=3[exchange=heads]",
            "8 heads, with 2 of keys and values, cannot be dealt to 3 ranks. Write exchange=gather",
        ),
        (
            "llama",
            "tsp=6[exchange=heads]",
            "8 heads, with 2 of keys and values, cannot be dealt to 6 ranks. Write exchange=gather, or context=2",
        ),
        (
            "gemma2",
            "fsdp=4[context=4,exchange=heads]",
            "its own code has an attention of whole groups. Write exchange",
        ),
        (
            "gpt_oss",
            "tsp=2[exchange=heads]",
            "gives each rank some heads of an attention, and GptOssForCausalLM can",
        ),
    ],
)
def test_heads_that_cannot_be_exchanged_are_refused(model, layout, said):
    """Sinks are numbers of a head: with some heads they would be others'."""
    with rotorch.on_meta():
        spec = describe(causal_lm(tiny_config(model)), context=True)
    (strategy,) = parse_parallel(layout)
    with pytest.raises(ConfigError, match=re.escape(said)):
        strategy.check(spec)


# ---- what is refused -----------------------------------------------------------------------------------------------

LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    },
    "original_max_position_embeddings": 32,
    "num_attention_heads": 4,
}
"""Angles are others where the last position of what is computed lies behind a limit."""


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("mamba", {}, "nothing of it attends by transformers' interface"),
        ("bloom", {}, "nothing of it attends by transformers' interface"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "its tokens look at others by more than attention"),
        ("llama4_text", {}, "its tokens look at others by more than attention"),  # chunks, in its masks only
        ("phi3", LONG_ROPE, "gives something else"),
        ("mixtral", {"output_router_logits": True}, "more than a sum over tokens"),
        ("doge", {}, "no masks (KeyError: '`rotorch_shared_sequence` is not a valid"),  # an interface of its own
    ],
)  # fmt: skip
def test_a_model_whose_tokens_look_at_others_in_other_ways_is_refused(kind, more, said):
    with rotorch.on_meta():
        module = causal_lm(config_of(kind, **TINY | more))
    assert said in try_shared(module).refused
    with pytest.raises(ConfigError, match="context=2 gives each rank a part of a sequence"):
        rotorch.parallelize(module, "tsp=2", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compile": True}, "compile would trace through"),
        ({"plan": {"model.layers.*.mlp.up_proj": "colwise"}}, "2 ranks, but there are 1"),
    ],
)
def test_arguments_that_do_not_go_with_it(arguments, said):
    with rotorch.on_meta():
        module = causal_lm(tiny_config("llama"))
    with pytest.raises(ConfigError, match=re.escape(said)):
        rotorch.parallelize(module, "tsp=2", device="cpu", **arguments)


def what_a_batch_says(config, change, apart):
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, "tsp=2", device="cpu").materialize(seed=0)
    batch = global_batch(
        seed=model.context_rank if apart else 0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=8,
        vocab_size=96,
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        model.forward_backward(change(batch))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "apart", "said"),
    [
        (lambda b: {**b, "token_type_ids": b["input_ids"]}, False, "the batch's 'token_type_ids' cannot be cut"),
        (
            lambda b: {
                **b,
                "position_ids": torch.arange(8).expand(2, -1) % 5,
                "attention_mask": torch.ones_like(b["labels"]),
            },
            False,
            "Leave attention_mask out",
        ),
        (lambda b: {k: v[:, :1] for k, v in b.items()}, False, "a sequence of 1 tokens has none for some ranks"),
        (lambda b: {**b, "attention_mask": torch.ones(2, 1, 8, 8)}, False, "'attention_mask' is [2, 1, 8, 8], not"),
        (lambda b: b, True, "ranks that share a sequence were given different batches"),
    ],
)
def test_batches_that_cannot_be_shared(change, apart, said):
    for found in run_ranks(what_a_batch_says, tiny_config("llama"), change, apart, num_ranks=2):
        assert said in found


# ---- why attentions rotate weight by weight ------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False])
def test_heads_that_differ_between_ranks_would_give_wrong_gradients(monkeypatch, guarded):
    """Without the guard attentions run on visiting slices, other heads on each rank: wrong, and nothing says so."""
    if not guarded:
        monkeypatch.setattr(describing, "runs_whole", lambda module, classes, found: classes)
        monkeypatch.setattr(describing, "with_sequences_shared", lambda spec, module, found: spec)
    config = tiny_config("qwen3")
    compute_exactly(config)
    report = verify_subject(
        CausalLM(config, 1), name="qwen3", parallel="tsp=2[transport=send_receive]", steps=1, seed=0, timeout_s=300,
        device="cpu", directory=None,
    )  # fmt: skip
    assert report.ok is guarded
    if not guarded:
        assert report.max_rel_err_grad > 0.1


# ---- loops of one's own --------------------------------------------------------------------------------------------


def calls(config):
    module = module_of(config)
    ids = torch.arange(10).view(1, -1)
    with torch.no_grad():
        expected = module(input_ids=ids).logits
    model = rotorch.parallelize(module, "tsp=2", device="cpu")
    with pytest.raises(ConfigError, match=re.escape("Write loss = model.forward_backward(batch)")):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        found = model(input_ids=ids).logits
    again = model.predict({"input_ids": ids[:, :1]}).logits  # shorter than the ranks are many
    model.forward_backward({"input_ids": ids, "labels": ids})
    implementation = model.config._attn_implementation
    model.close()
    return relative_error(found, expected), relative_error(again, expected[:, :1]), implementation


def test_calls_without_gradients_compute_whole_sequences():
    for found, again, implementation in run_ranks(calls, tiny_config("llama"), num_ranks=2):
        assert max(found, again) < 1e-6
        assert implementation == "sdpa"  # the function of a pass is gone


def test_trainers_are_refused():
    with pytest.raises(ConfigError, match="ranks that share a sequence train by"):
        check_plain_loop(parse_parallel("ddp=2,tsp=2"), who="Trainer")


def in_bfloat16(config, options):
    with rotorch.on_meta():
        module = causal_lm(config).train()
    model = rotorch.parallelize(module, "tsp=2", device="cpu", **options).materialize(seed=0)
    batch = global_batch(seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=16, vocab_size=96)
    loss = float(model.forward_backward(batch))
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor())
    model.close()
    return loss, norm


@pytest.mark.parametrize(
    "options",
    [{"autocast_dtype": torch.bfloat16}, pytest.param({"param_dtype": torch.bfloat16}, marks=pytest.mark.slow)],
)
def test_passes_in_bfloat16(options):
    config = tiny_config("qwen3")
    (loss, norm), _ = run_ranks(in_bfloat16, config, {}, num_ranks=2)
    for found, of_gradients in run_ranks(in_bfloat16, config, options, num_ranks=2):
        assert found == pytest.approx(loss, rel=1e-2) and of_gradients == pytest.approx(norm, rel=5e-2)
        assert found != loss

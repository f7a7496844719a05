"""Encoders, vision models and encoder-decoders of transformers with their own heads and losses, against one process."""

import importlib

import pytest
import torch

import rotorch
from rotorch.parallelize import code_of
from rotorch.strategies import STRATEGIES, num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.ranks import run_ranks

MESSAGES = "rtp=2[transport=send_receive]"
NUM_ROWS, NUM_TOKENS, VOCAB = 8, 7, 40
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for kind in ("ddp", "fsdp", "rtp", "summa", "tesseract"):
        code_of(STRATEGIES[kind])
    importlib.import_module("torch._dynamo")
    for build in (masked_bert, vit, t5, eurobert, t5gemma):
        build()


def masked_bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES))


def classifying_bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=16, num_labels=3, **SIZES)
    return BertForSequenceClassification(config)


def regressing_bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=16, num_labels=1, **SIZES)
    return BertForSequenceClassification(config)


def eurobert():
    from transformers import EuroBertConfig, EuroBertForTokenClassification

    sizes = {name: size for name, size in SIZES.items() if "prob" not in name}
    config = EuroBertConfig(vocab_size=VOCAB, num_labels=3, num_key_value_heads=2, classifier_dropout=0.0, **sizes)
    config.pad_token_id = 0
    return EuroBertForTokenClassification(config)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_channels=1, num_labels=3, **SIZES))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def t5gemma():
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
    from transformers.models.t5gemma import T5GemmaModuleConfig

    part = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager",
    }  # fmt: skip
    encoder, decoder = T5GemmaModuleConfig(**part), T5GemmaModuleConfig(**part)
    config = T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=VOCAB, dropout_rate=0.0)
    config.decoder.bos_token_id = 0
    config._attn_implementation = "eager"
    return T5GemmaForConditionalGeneration(config)


def drawn(*shape, high=VOCAB):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def ignoring(labels):
    """The same with unequal numbers of targets per row."""
    places = torch.arange(labels.shape[1])
    return labels.masked_fill(places < torch.arange(len(labels))[:, None] % 5, -100)


def sentences(labels):
    mask = (torch.arange(NUM_TOKENS) < torch.arange(NUM_ROWS)[:, None] % 3 + 5).long()
    return {"input_ids": drawn(NUM_ROWS, NUM_TOKENS), "attention_mask": mask, "labels": labels}


def pictures():
    pixels = torch.randn(NUM_ROWS, 1, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"pixel_values": pixels, "labels": drawn(NUM_ROWS, high=3)}


CASES = {
    masked_bert: lambda: sentences(ignoring(drawn(NUM_ROWS, NUM_TOKENS))),
    classifying_bert: lambda: sentences(drawn(NUM_ROWS, high=3)),
    regressing_bert: lambda: sentences(torch.linspace(-1, 1, NUM_ROWS, dtype=torch.float64)),
    eurobert: lambda: sentences(ignoring(drawn(NUM_ROWS, NUM_TOKENS, high=3))),
    vit: pictures,
    t5: lambda: sentences(ignoring(drawn(NUM_ROWS, 6))),
    t5gemma: lambda: sentences(ignoring(drawn(NUM_ROWS, 6))),
}


def built(build):
    torch.manual_seed(0)
    return build().double().train()


def on_one_process(build):
    module, batch = built(build), CASES[build]()
    with exact_arithmetic():
        loss = module(**batch).loss
        loss.backward()
    return loss.item(), {name: p.grad for name, p in module.named_parameters()}


def on_this_rank(build, layout):
    model = rotorch.parallelize(built(build), layout, device="cpu")
    each = NUM_ROWS // model.num_batch_ranks
    mine = {name: rows[model.batch_rank * each :][:each] for name, rows in CASES[build]().items()}
    halves = [{name: rows[half::2].contiguous() for name, rows in mine.items()} for half in range(2)]
    with exact_arithmetic():
        loss = model.forward_backward(halves)
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    cut = sum(unit.num_bytes for unit in model.spec.cut_units) / model.spec.num_bytes
    model.close()
    return float(loss), grads, cut


QUICK = [
    *((build, "rtp=2") for build in CASES if build is not t5gemma),
    (t5, MESSAGES),
    (vit, MESSAGES),
    (masked_bert, "fsdp=2"),
    (classifying_bert, "tesseract=2x2x1[transport=messages]"),
]
MORE = [
    (t5gemma, "rtp=2"),  # an encoder and a decoder, as t5
    (vit, "summa=2x2"),
    *((build, MESSAGES) for build in CASES if build not in (t5, vit)),
    (masked_bert, "ddp=2"),
    (masked_bert, "rtp=4[transport=send_receive,recompute=slice]"),
    (t5, "fsdp=2"),
    (vit, "ddp=2"),
    (vit, "tesseract=2x2x2"),
    (eurobert, "summa=2x2"),
    (masked_bert, "summa=2x2"),
    (regressing_bert, "ddp=2,summa=2x2"),
]


@pytest.mark.parametrize(("build", "layout"), [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)])
def test_a_task_of_transformers_as_it_is(build, layout):
    loss, grads = on_one_process(build)
    for found, found_grads, cut in run_ranks(on_this_rank, build, layout, num_ranks=num_ranks(parse_parallel(layout))):
        assert found == pytest.approx(loss, rel=1e-10)
        assert cut > 0.8  # norms are large beside such small layers
        largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
        for name, expected in grads.items():
            expected = torch.zeros_like(found_grads[name]) if expected is None else expected
            floor = max(float(expected.abs().max()), 1e-3 * largest)
            assert float((found_grads[name] - expected).abs().max()) <= 1e-10 * floor, name

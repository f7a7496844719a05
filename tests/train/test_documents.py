"""Documents that share a window are apart: its loss and gradients are the sums of theirs, in float64.

tests/conformance/test_float64_parity.py holds every layout to one process on such windows.
"""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from rotorch.core.errors import ConfigError
from rotorch.models.trial.documents import why_documents_meet
from rotorch.run_config import BatchSizes, load_run_config
from rotorch.testing.verify import BAR
from rotorch.train.checks.resuming import check_same_order, data_position
from rotorch.train.checks.samples import check_data
from rotorch.train.data.batches import check_source, prepare_corpus, train_and_held_out
from rotorch.train.data.tokens import ByteTokens
from rotorch.train.data.windows import BEGINS_DOCUMENT, IGNORED_LABEL, NOT_A_TARGET, TokenWindows

END = ByteTokens().end_id
LENGTH = 24
CONFIG = LlamaConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).double()


def sums(model, inputs, labels, **more):
    """Sum of the losses of all targets, and its gradients."""
    logits = model(input_ids=inputs, use_cache=False, **more).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def of_batch(model, batch):
    return sums(model, batch["input_ids"], batch["shift_labels"], position_ids=batch["position_ids"])


def of_documents(model, documents, targets):
    """The same of documents that the model sees one by one; `targets` says which of their ids count."""
    found = []
    for ids, learnt in zip(documents, targets, strict=True):
        if len(ids) > 1:
            labels = torch.tensor([i if t else IGNORED_LABEL for i, t in zip(ids, learnt, strict=True)])
            found.append(sums(model, torch.tensor([ids[:-1]]), labels[None, 1:]))
    return [sum(parts) for parts in zip(*found, strict=True)]


def far_apart(ours, theirs):
    """Largest difference of a loss or a gradient, relative to the largest of its kind."""
    scale = max(float(t.abs().max()) for t in theirs[1:])
    loss = abs(float(ours[0] - theirs[0])) / max(1.0, float(theirs[0]))
    return max(loss, *(float((a - b).abs().max()) / scale for a, b in zip(ours[1:], theirs[1:], strict=True)))


def text_windows(ids):
    ids = np.array(ids, np.uint16)
    options = dict(sequence_length=LENGTH, seed=0, tokens=ByteTokens(), documents="apart")
    return TokenWindows(ids, ranges=[range(len(ids) // (LENGTH + 1))], **options)


ids_of_text = st.lists(st.one_of(st.just(END), *[st.integers(0, 255)] * 4), min_size=LENGTH + 1, max_size=LENGTH + 1)


def split_behind_ends(ids):
    borders = [0, *(i + 1 for i, token in enumerate(ids[:-1]) if token == END), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


@settings(max_examples=200)
@given(ids=ids_of_text)
def test_a_window_of_text_is_the_sum_of_its_documents(model, ids):
    (batch,) = text_windows(ids).micro_batches(0, global_batch=1, micro_batch=1)
    documents = split_behind_ends(ids)
    if max(map(len, documents)) == 1:
        assert set(batch["shift_labels"][0].tolist()) == {IGNORED_LABEL}
        return
    theirs = of_documents(model, documents, [[True] * len(part) for part in documents])
    assert far_apart(of_batch(model, batch), theirs) < BAR


def test_rows_of_a_batch_have_their_own_borders(model):
    rows = [[*b"a ring of ranks", END, *b"and more"], [*b"no", END, *b"weights stay for long"]]
    rows = [[*row, *[32] * (LENGTH + 1 - len(row))] for row in rows]
    batch = text_windows([*rows[0], *rows[1]]).to_batch(np.array(rows))
    documents = [part for row in rows for part in split_behind_ends(row)]
    theirs = of_documents(model, documents, [[True] * len(part) for part in documents])
    assert far_apart(of_batch(model, batch), theirs) < BAR


RECORDS = [{"prompt": "2+2=", "response": "4"}, {"prompt": "Say", "response": "ring"}, {"prompt": "?", "response": "!"}]


def instruction_windows(folder, *, apart=True):
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    checked = check_source(
        folder / "records.jsonl",
        sequence_length=LENGTH,
        held_out_fraction=0.0,
        cache_dir=folder / "cache",
        instructions=("prompt", "response"),
        pack=True,
        apart=apart,
    )
    options = dict(sequence_length=LENGTH, seed=0, held_out_fraction=0.0, documents=checked.documents)
    return checked, train_and_held_out(prepare_corpus(checked), tokens=checked.tokens, **options)[0]


def test_a_window_of_packed_instructions_is_the_sum_of_its_records(model, tmp_path):
    _, windows = instruction_windows(tmp_path)
    (batch,) = windows.micro_batches(0, global_batch=1, micro_batch=1)
    parts = [(list(r["prompt"].encode()), [*r["response"].encode(), END]) for r in RECORDS]
    documents = [[*prompt, *response] for prompt, response in parts]
    targets = [[False] * len(prompt) + [True] * len(response) for prompt, response in parts]
    assert far_apart(of_batch(model, batch), of_documents(model, documents, targets)) < BAR
    lengths = [len(document) for document in documents]
    assert batch["position_ids"][0, : sum(lengths)].tolist() == [place for n in lengths for place in range(n)]


def test_joined_instructions_are_the_token_file_of_before(tmp_path):
    joined, windows = instruction_windows(tmp_path, apart=False)
    assert joined.documents == "joined" and max(windows.window(0)) - NOT_A_TARGET < 257 < BEGINS_DOCUMENT
    (batch,) = windows.micro_batches(0, global_batch=1, micro_batch=1)
    assert "position_ids" not in batch
    assert instruction_windows(tmp_path)[0].path != joined.path


def spoilt(batch, *, how):
    """A batch with one mistake in how its documents are kept apart."""
    positions, labels = batch["position_ids"].clone(), batch["shift_labels"].clone()
    row = positions[0]
    border = int((row == 0).nonzero()[1])
    match how:
        case "a label at a border":
            labels[0, border - 1] = batch["input_ids"][0, border]
        case "positions that run on":
            row[:] = torch.arange(len(row))
        case "a border one token late":
            row[border], row[border + 1 :] = row[border - 1] + 1, torch.arange(len(row) - border - 1)
        case "a border one token early":
            row[border - 1 :] = torch.arange(len(row) - border + 1)
    return {**batch, "position_ids": positions, "shift_labels": labels}


@pytest.mark.parametrize(
    "how", ["a label at a border", "positions that run on", "a border one token late", "a border one token early"]
)
def test_a_mistake_at_a_border_would_be_seen(model, how):
    ids = [*b"a ring of", END, *b"ranks, in turn"]
    (batch,) = text_windows([*ids, 33]).micro_batches(0, global_batch=1, micro_batch=1)
    documents = split_behind_ends([*ids, 33])
    theirs = of_documents(model, documents, [[True] * len(part) for part in documents])
    assert far_apart(of_batch(model, batch), theirs) < BAR
    assert far_apart(of_batch(model, spoilt(batch, how=how)), theirs) > 1e-5


def test_held_out_numbers_leave_out_what_is_no_target():
    ids = [*b"a ring of", END, *b"ranks", END, *b"in turn", END, 33]
    (part,) = text_windows(ids).evaluation_batches(micro_batch=2)
    assert part.num_targets == int((part.batch["shift_labels"] != IGNORED_LABEL).sum()) == LENGTH - 3
    assert part.num_bytes == len(b"a ring ofranksin turn") - 3  # of each document all but the first


def test_a_tokenizer_without_an_end_cannot_tell_documents(tmp_path, byte_level_bpe):
    (tmp_path / "tokenizer.json").write_text(byte_level_bpe.to_str().replace("<|endoftext|>", "<|nothing|>"))
    (tmp_path / "text.txt").write_text("a ring of ranks\n" * 9)
    with pytest.raises(ConfigError, match=r"names no token that ends a document.*data.documents = 'joined'"):
        check_source(tmp_path / "text.txt", tokens=tmp_path, cache_dir=tmp_path / "cache", apart=True)


APART = ("llama", "gpt2", "gpt_neox", "gemma3_text", "mistral", "mixtral", "cohere2")
TOGETHER = ("mamba", "bloom", "qwen3_next", "gpt_oss")
"""A state, distances counted in the row, a convolution, and masks that transformers makes without positions."""


@pytest.mark.parametrize("kind", APART)
def test_models_that_keep_documents_apart(kind):
    assert why_documents_meet(AutoConfig.for_model(kind)) == ""


@pytest.mark.parametrize("kind", TOGETHER)
def test_models_that_do_not(kind):
    why = why_documents_meet(AutoConfig.for_model(kind))
    assert "a document's outputs change" in why and not math.isnan(float(why.split("change by ")[1].split()[0]))


def checked_data(folder, model_type, **data):
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS * 9))
    (folder / "text.txt").write_text("a ring of ranks\n" * 99)
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    lines += [f'source = "{folder}/{"records.jsonl" if data.get("kind") else "text.txt"}"', "sequence_length = 24"]
    lines += [f'cache_dir = "{folder}"', "[model]", 'config = "config.json"', "[train]", "steps = 1"]
    (folder / "run.toml").write_text("\n".join(["[data]", *lines, ""]))
    return check_data(load_run_config(folder / "run.toml"), model_config=AutoConfig.for_model(model_type))


def test_instructions_share_samples_where_the_model_keeps_them_apart(tmp_path):
    checked = checked_data(tmp_path, "llama", kind="instructions")
    assert checked.instructions.pack and checked.documents == "marked"
    checked = checked_data(tmp_path, "mamba", kind="instructions")
    assert not checked.instructions.pack and checked.documents == "joined"
    assert checked_data(tmp_path, "mamba", kind="instructions", pack=True, documents="joined").instructions.pack
    assert not checked_data(tmp_path, "llama", kind="instructions", pack=False).instructions.pack
    assert checked_data(tmp_path, "llama").documents == "joined"
    assert checked_data(tmp_path, "llama", documents="apart").documents == "apart"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "instructions", "pack": True}, "data.pack = true.*Write data.pack = false"),
        ({"documents": "apart"}, "data.documents = 'apart': .*'mamba': .*Write data.documents = 'joined'"),
    ],
)
def test_asking_a_model_that_cannot_is_refused(tmp_path, data, words):
    with pytest.raises(ConfigError, match=words):
        checked_data(tmp_path, "mamba", **data)


def test_a_run_goes_on_with_the_samples_that_it_was_begun_with(tmp_path):
    """Checkpoints that do not say are of runs whose documents were joined."""
    checked = checked_data(tmp_path, "llama", kind="instructions")
    config = load_run_config(tmp_path / "run.toml")
    sizes = BatchSizes(micro_batch=4, accumulation=1, batch_ranks=1)

    def go_on(*, data, run):
        manifest = SimpleNamespace(data=data, run=run, seed=config.train.seed)
        check_same_order(tmp_path, manifest, config=config, sizes=sizes, source=checked)

    go_on(data=data_position(config, sizes=sizes, source=checked), run={})
    with pytest.raises(ConfigError, match=r"data\.pack = false, and here it is true. Write data.pack=false"):
        go_on(data={}, run={"data": {"pack": False}})
    with pytest.raises(ConfigError, match=r"data\.documents = joined, and here it is apart"):
        go_on(data={"data.pack": True}, run={})

"""The MiniLM example on a tiny random checkpoint of the same kind and a few made-up speeches: no network."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from rotorch.testing.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WORDS = {1800: "commerce militia treaty", 1900: "railroad tariff gold", 2000: "internet budget health"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A BERT without a classifier, as it would be published, and speeches of three ages."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("speeches")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", *" ".join(WORDS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(model)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    sizes["initializer_range"] = 0.5  # as if it had learnt to tell words apart
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)).save_pretrained(model)
    for number in range(24):
        year = list(WORDS)[number % 3]
        file = folder / f"{year + number}.txt"
        file.write_text(" ".join(f"{word.capitalize()} {word}." for word in WORDS[year].split() * 8))
        file.with_suffix(".json").write_text(json.dumps({"year": year + number}))
    return model, folder


def run_example(inputs, steps):
    """Runs the example on this rank; returns its losses, and how many of the held-out passages it tells right."""
    fetch = ModuleType("fetch")
    fetch.Unavailable, fetch.minilm, fetch.speeches = RuntimeError, lambda: inputs[0], lambda: inputs[1]
    sys.modules["fetch"] = fetch
    sys.argv = ["07_minilm.py", str(steps)]
    found = runpy.run_path(str(EXAMPLES / "07_minilm.py"))
    return found["losses"], found["accuracy"]


def test_a_classifier_is_learnt_alike_on_one_rank_and_on_two(inputs, monkeypatch):
    from transformers import BertForSequenceClassification  # noqa: F401  # forked ranks would each load it

    from rotorch.strategies.rtp import apply  # noqa: F401

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ((alone, accuracy),) = run_ranks(run_example, inputs, 40, num_ranks=1)
    assert alone[-1] < 0.5 * alone[0] and accuracy > 0.9
    for losses, right in run_ranks(run_example, inputs, 40, num_ranks=2):
        assert losses[:10] == pytest.approx(alone[:10], rel=1e-5)
        assert losses == pytest.approx(alone, rel=1e-3) and right == pytest.approx(accuracy, abs=0.02)


def test_where_an_input_cannot_be_had_it_says_why(monkeypatch, capsys):
    def cannot_be_had():
        raise ConnectionError("no network here")

    fetch = ModuleType("fetch")
    fetch.Unavailable, fetch.minilm, fetch.speeches = ConnectionError, cannot_be_had, cannot_be_had
    monkeypatch.setitem(sys.modules, "fetch", fetch)
    monkeypatch.setattr(sys, "argv", ["07_minilm.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "07_minilm.py"))
    assert not ended.value.code
    assert capsys.readouterr().out == "skipped: an input cannot be had here: no network here\n"

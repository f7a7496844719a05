"""Hostile files of a tokenizer, and records of prompts and responses: read, or refused in one line."""

import json
import os
import re

import numpy as np
import pytest
from commands import rotorch, write_run
from hostile import FEW, JSON, MANY, bent, is_one_line, spoilt
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rotorch.core.errors import ConfigError
from rotorch.train.data import tokens
from rotorch.train.data.batches import check_source, prepare_corpus
from rotorch.train.data.instructions import open_chat
from rotorch.train.data.tokens import _panics_unheard, library_errors, open_tokens


def whole_tokenizers():
    """One of each kind of model that the library knows, with what else there is spread over them."""
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3, "Ġ": 4}, [("a", "b")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    pieces = [("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0), ("</s>", -3.0), ("<0x41>", -3.0)]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("x", "y")])
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "[EOS]": 3}, unk_token="[UNK]"))
    word_piece.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    word_piece.decoder = decoders.WordPiece()
    word_piece.post_processor = processors.TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", 3)])
    word_level = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.enable_truncation(5)
    word_level.enable_padding(length=4)
    return [json.loads(each.to_str()) for each in (bpe, unigram, word_piece, word_level)]


WHOLE = whole_tokenizers()


def with_model(number, **changes):
    return {**WHOLE[number], "model": {**WHOLE[number]["model"], **changes}}


PANICS = with_model(0, continuing_subword_prefix="[UNK]")
"""A file that the library does not refuse: its Rust panics, which is no Exception in Python, and says so on stderr."""
NO_UNKNOWN = with_model(3, unk_token="[GONE]")
"""A file that is read, and cannot tokenise what is not in its vocabulary."""


def use(content, directory):
    """Does with a tokenizer.json all that a run does with one."""
    file = directory / "tokenizer.json"
    file.write_bytes(content)
    try:
        opened = open_tokens(file)
        opened.encode("a ab\U0001f300é \ud800")
        ids = np.concatenate(list(opened.encode_pieces([(b"a ab", True), (b"\xffx", True)])))
        assert opened.dtype == ids.dtype and not (ids >= opened.vocab_size).any()
        if opened.vocab_size < 1 << 20:  # else it is no tokenizer of the model's
            opened.num_bytes(ids)
        opened.decode([0, 1, 2, 10**6])
    except ConfigError as error:
        is_one_line(error)
        assert "tokenizer" in str(error)


@MANY
@given(content=st.sampled_from(WHOLE).flatmap(bent).map(json.dumps))
@example(content=json.dumps(PANICS))
@example(content=json.dumps(NO_UNKNOWN))
@example(content=json.dumps({**WHOLE[0], "added_tokens": [{**WHOLE[0]["added_tokens"][0], "id": 2**32 - 1}]}))
def test_any_tokenizer_json_that_is_nearly_whole(content, tmp_path_factory):
    use(content.encode(), tmp_path_factory.getbasetemp())


@FEW
@given(content=st.binary(max_size=100) | st.sampled_from(WHOLE).flatmap(spoilt).map(lambda v: json.dumps(v).encode()))
@example(content=b"[" * 200_000)
def test_any_tokenizer_json(content, tmp_path_factory):
    use(content, tmp_path_factory.getbasetemp())


def test_a_panic_is_one_line_and_other_words_on_stderr_stay(tmp_path, capfd):
    (tmp_path / "tokenizer.json").write_text(json.dumps(PANICS))
    with pytest.raises(ConfigError, match=r"tokenizer.json': not a tokenizer.json, or a damaged one: range end index"):
        open_tokens(tmp_path)
    assert capfd.readouterr().err == ""
    with _panics_unheard():
        os.write(2, b"a word")
    assert capfd.readouterr().err == "a word"
    with pytest.raises(KeyboardInterrupt), library_errors("x"):
        raise KeyboardInterrupt


def test_what_cannot_be_tokenised_is_shown(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(NO_UNKNOWN))
    opened = open_tokens(tmp_path)
    assert list(next(opened.encode_pieces([(b"a b", True)]))) == [1, 2]
    with pytest.raises(ConfigError, match=r"cannot tokenise 'b zebra': .*Missing \[UNK\].*Write another tokenizer, or"):
        list(opened.encode_pieces([(b"a", True), (b"b zebra", True)]))


def test_ctrl_c_while_a_batch_is_tokenised_does_not_tokenise_it_again(tmp_path, monkeypatch):
    class Interrupted:
        def encode_batch_fast(self, *_, **__):
            raise KeyboardInterrupt

    (tmp_path / "tokenizer.json").write_text(json.dumps(WHOLE[0]))
    opened = open_tokens(tmp_path)
    again = []
    monkeypatch.setattr(opened, "_tokenizer", Interrupted())
    monkeypatch.setattr(opened, "encode", again.append)
    with pytest.raises(KeyboardInterrupt):
        list(opened.encode_pieces([(b"a", True)]))
    assert again == []


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_MOST_BYTES", 1 << 20)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"a tokenizer\.json has at most"):
        open_tokens(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", ["[" * 200_000, "5", '{"eos_token": [1]}', '{"eos_token": "\\ud800"}', "\xff"])
def test_any_hint_beside_a_tokenizer(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(WHOLE[0]))
    (tmp_path / "tokenizer_config.json").write_text(content, "latin-1")
    assert open_tokens(tmp_path).end_id == 3


# ---------------------------------------------------------------- with a chat template

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory, byte_level_bpe_text):
    directory = tmp_path_factory.mktemp("chat")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe_text), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").unlink()
    return directory


def test_any_tokenizer_config_beside_it(chat):
    file = chat / "tokenizer_config.json"
    whole = json.loads(file.read_text()) | {"chat_template": TEMPLATE}

    @FEW
    @given(content=bent(whole) | spoilt(whole))
    @example(content=whole | {"chat_template": "{{ 1 / 0 }}"})
    @example(content=whole | {"chat_template": "{% for"})
    @example(content=whole | {"chat_template": {"other": "x"}})
    @example(content=whole | {"added_tokens_decoder": {"400": {"content": "user:", "special": True}}})
    def hold(content):
        file.write_text(json.dumps(content))
        try:
            convert([{"prompt": "a", "response": "b"}], chat, tokenizer=chat)
        except ConfigError as error:
            is_one_line(error)

    try:
        hold()
    finally:
        file.write_text(json.dumps(whole))


def test_code_that_a_tokenizer_brings_is_not_run_and_nobody_is_asked(tmp_path, byte_level_bpe, monkeypatch):
    PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    brought = {"tokenizer_class": "Brought", "auto_map": {"AutoTokenizer": ["brought.Brought", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | brought))
    (tmp_path / "brought.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"transformers cannot open it: .*custom code") as caught:
        open_chat(str(tmp_path))
    is_one_line(caught.value)
    assert not (tmp_path / "it ran").exists()


# ---------------------------------------------------------------- records

FIELDS = st.sampled_from(["prompt", "response", "messages", "x\ny"])
TEXTS = st.sampled_from(["", "a ring", "\ud800", "<|endoftext|>", "\0"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "\ud800"]), "content": TEXTS | JSON})
    | st.dictionaries(st.sampled_from(["role", "content"]), JSON, max_size=2),
    max_size=3,
)
RECORDS = st.dictionaries(FIELDS, TEXTS | MESSAGES | JSON, max_size=4) | JSON


def convert(records, directory, *, tokenizer):
    (directory / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return to_windows(directory, tokenizer=tokenizer)


def to_windows(directory, *, tokenizer):
    checked = check_source(
        directory / "records.jsonl",
        tokens=tokenizer,
        sequence_length=8,
        held_out_fraction=0.0,
        cache_dir=directory / "cache",
        instructions=("prompt", "response"),
    )
    return prepare_corpus(checked)


@pytest.mark.parametrize("kind", ["bytes", "vocabulary", "template"])
def test_any_records_of_prompts_and_responses(kind, chat, tokenizer_json, tmp_path):
    tokenizer = {"bytes": "bytes", "vocabulary": tokenizer_json, "template": chat}[kind]

    @FEW
    @given(records=st.lists(RECORDS, min_size=1, max_size=3))
    @example(records=[{"prompt": "p", "response": "r", "messages": [{"role": "x"}]}])
    @example(records=[{"prompt": "p", "response": "r", "messages": 5}])
    @example(records=[{"messages": [{"role": "assistant", "content": "r"}], "response": 5}])
    @example(records=[{"prompt": "\ud800", "response": "\ud800"}])
    def hold(records):
        try:
            file = convert(records, tmp_path, tokenizer=tokenizer)
        except ConfigError as error:
            is_one_line(error)
            assert re.search(r"records.jsonl'(, line \d+)?: ", str(error))
        else:
            assert file.header.num_tokens % 9 == 0
        assert {path.name for path in tmp_path.iterdir()} <= {"records.jsonl", "cache", "tokenizer"}

    hold()


@FEW
@given(content=st.binary(max_size=100))
def test_any_bytes_as_records(content, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp()
    (directory / "records.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        to_windows(directory, tokenizer="bytes")
    is_one_line(caught.value)


@pytest.mark.parametrize(
    ("tokenizer", "record", "told"),
    [
        (PANICS, "{}", "tokenizer.json': not a tokenizer.json, or a damaged one"),
        (NO_UNKNOWN, '{"prompt": "a", "response": "zebra"}', "line 1: tokenizer '.*': cannot tokenise 'zebra'"),
        (WHOLE[0], '{"prompt": "a", "response": 5}', "line 1: field 'response' is of type int"),
    ],
    ids=["panics", "cannot tokenise", "record"],
)
def test_a_run_says_it_in_one_line_and_writes_nothing(tokenizer, record, told, tmp_path, warm):
    toml = write_run(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "records.jsonl").write_text(record + "\n")
    before = sorted(tmp_path.iterdir())
    settings = [f"data.tokenizer={tmp_path}", f"data.source={tmp_path / 'records.jsonl'}", "data.kind=instructions"]
    done = rotorch(tmp_path / "log", "train", toml, *settings)
    assert done.code == 2 and sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "log"])
    line = done.stderr.splitlines()[-1]
    assert re.search(told, line), line
    assert [each for each in done.stderr.splitlines() if "no end-of-text token" not in each] == [line]

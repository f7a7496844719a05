import json
import logging
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rotorch.core.errors import ConfigError
from rotorch.train.data.tokens import ByteTokens, VocabularyTokens, check_vocabulary, open_tokens


def saved(tokenizer, folder):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids_of(tokens, *documents, piece=1 << 20):
    pieces = [
        (document[at : at + piece], at + piece >= len(document))
        for document in documents
        for at in range(0, len(document), piece)
    ]
    return np.concatenate(list(tokens.encode_pieces(pieces)))


def test_bytes_stand_for_themselves():
    tokens = ByteTokens()
    ids = ids_of(tokens, b"a\xff", b"\0")
    assert ids.tolist() == [97, 255, 256, 0, 256] and ids.dtype == np.uint16
    assert tokens.num_bytes(ids) == 3
    assert tokens.decode(tokens.encode("naïve ☕")) == "naïve ☕"
    assert tokens.decode([104, 256, 105, 300]) == "hi"


@given(st.text())
def test_bytes_round_trip(text):
    tokens = ByteTokens()
    ids = np.array(tokens.encode(text))
    assert tokens.num_bytes(ids) == len(text.encode()) and tokens.decode(ids) == text


def test_documents_end_with_the_end_token(tokenizer_json, english):
    tokens = open_tokens(tokenizer_json)
    ids = ids_of(tokens, english.encode(), b"two")
    assert tokens.end_id == 0 and tokens.vocab_size == 300 and ids.dtype == np.uint16
    assert ids.tolist() == [*tokens.encode(english), 0, *tokens.encode("two"), 0]
    assert tokens.decode(ids) == english + "two"
    assert open_tokens(tokenizer_json.parent).digest == tokens.digest


@settings(max_examples=40)
@given(st.text())
def test_byte_level_tokens_know_their_bytes(byte_level_bpe_text, tmp_path_factory, text):
    tokenizer = Tokenizer.from_str(byte_level_bpe_text)
    tokens = VocabularyTokens(saved(tokenizer, tmp_path_factory.getbasetemp() / "tokenizer"))
    ids = ids_of(tokens, text.encode() or b"x")
    assert tokens.num_bytes(ids) == len(text.encode() or b"x")
    assert tokens.decode(ids) == (text or "x")


# How the tokenizer.json of Llama 3 cuts text into words; Qwen's differs in the digits only.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("words", ["gpt2", "llama3"])
@pytest.mark.parametrize("piece", [1, 7, 64, 200])
def test_where_a_long_document_is_cut_changes_no_token(words, piece, byte_level_bpe, tmp_path, english):
    text = "\n\n".join(f"def f{n}(x):\n    return x + {n}\n\n\nclass C:  # naïve.\n\n" for n in range(20)) + english
    if words == "llama3":
        byte_level_bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level_bpe.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokens = open_tokens(saved(byte_level_bpe, tmp_path))
    ids = ids_of(tokens, text.encode(), piece=piece)
    assert tokens.decode(ids) == text and tokens.num_bytes(ids) == len(text.encode())
    if piece >= 64:  # shorter pieces than a line must be cut within it
        assert ids.tolist() == [*tokens.encode(text), 0]


def test_undecodable_bytes_are_replaced(tokenizer_json):
    tokens = open_tokens(tokenizer_json)
    assert tokens.decode(ids_of(tokens, b"caf\xe9", "☕".encode()[:2])) == "caf\ufffd\ufffd"
    assert tokens.decode(ids_of(tokens, "☕".encode(), piece=1)) == "☕"


def test_text_that_spells_a_special_token_stays_text(tokenizer_json):
    tokens = open_tokens(tokenizer_json)
    ids = ids_of(tokens, b"a<|endoftext|>b")
    assert ids.tolist().count(0) == 1 and ids[-1] == 0
    assert tokens.decode(ids) == "a<|endoftext|>b" and tokens.num_bytes(ids) == 15


def test_what_a_tokenizer_does_to_prompts_is_not_done_to_a_corpus(byte_level_bpe, tmp_path, english):
    byte_level_bpe.enable_truncation(8)
    byte_level_bpe.enable_padding(length=8)
    byte_level_bpe.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokens = open_tokens(saved(byte_level_bpe, tmp_path))
    assert tokens.decode(ids_of(tokens, english.encode(), b"two")) == english + "two"
    assert ids_of(tokens, b"two").tolist().count(0) == 1


def test_ids_that_a_tokenizer_begins_texts_with(byte_level_bpe, tmp_path):
    plain, begun = tmp_path / "plain.json", tmp_path / "begun.json"
    byte_level_bpe.save(str(plain))
    byte_level_bpe.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    byte_level_bpe.save(str(begun))
    assert open_tokens().start_ids == open_tokens(plain).start_ids == []
    assert open_tokens(begun).start_ids == [0]


def test_the_end_token_is_found_or_given(byte_level_bpe, tmp_path, caplog):
    byte_level_bpe.add_special_tokens(["<stop>", "<other>"])
    folder = saved(byte_level_bpe, tmp_path)
    assert open_tokens(folder).end_id == 0
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<other>"}))
    assert open_tokens(folder).end_id == 301
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert open_tokens(folder).end_id == 300
    (folder / "tokenizer_config.json").write_text("[broken")
    assert open_tokens(folder).end_id == 301
    given = open_tokens(folder, eos_token="<|endoftext|>")
    assert given.end_id == 0 and given.digest != open_tokens(folder).digest
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"eos_token '<stopp>' is not one of its tokens.*<stop>"):
        open_tokens(folder, eos_token="<stopp>")


def test_without_an_end_token_documents_are_joined_and_that_is_said(tmp_path, caplog):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["ab"], trainers.BpeTrainer(show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    with caplog.at_level(logging.WARNING):
        tokens = open_tokens(saved(tokenizer, tmp_path))
    assert "no end-of-text token" in caplog.text and tokens.end_id is None
    assert ids_of(tokens, b"ab", b"c").tolist() == [*tokens.encode("ab"), *tokens.encode("c")]


def test_sentencepiece_like_tokens_know_their_bytes(tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for letters in ("▁ring", "▁a", "é", "round"):
        for symbol in (*letters, letters):
            vocabulary.setdefault(symbol, len(vocabulary))
    merges = []
    for word in ("▁ring", "▁a", "round"):
        for at in range(1, len(word)):
            vocabulary.setdefault(word[: at + 1], len(vocabulary))
            merges.append((word[:at], word[at]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokens = open_tokens(saved(tokenizer, tmp_path))
    text = " a ring round é ☕"
    ids = ids_of(tokens, text.encode())
    assert tokens.end_id == ids[-1] == 1 and tokens.decode(ids) == text
    assert tokens.num_bytes(ids) == len(text.encode())
    assert sum(tokens.num_bytes(ids[at : at + 1]) for at in range(len(ids))) == len(text.encode())


def test_other_tokenizers_count_the_bytes_they_decode_to(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "[SEP]": 1, "ring": 2, "##s": 3, "a": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    tokens = open_tokens(saved(tokenizer, tmp_path), eos_token="[SEP]")
    ids = ids_of(tokens, b"a rings")
    assert ids.tolist() == [4, 2, 3, 1] and tokens.num_bytes(ids) == len("a rings")


def test_a_vocabulary_with_holes_or_of_more_than_16_bits(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "<eos>": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = open_tokens(saved(tokenizer, tmp_path))
    assert tokens.vocab_size == 70_001 and tokens.dtype == np.uint32
    assert ids_of(tokens, b"a b").tolist() == [0, 70_000, 5]


def test_ids_that_only_the_model_has_decode_to_nothing(tokenizer_json):
    assert open_tokens(tokenizer_json).decode([*open_tokens(tokenizer_json).encode("ring"), 299_999]) == "ring"


def test_added_words_count_their_bytes(byte_level_bpe, tmp_path):
    byte_level_bpe.add_tokens([AddedToken("☕☕")])
    tokens = open_tokens(saved(byte_level_bpe, tmp_path))
    ids = ids_of(tokens, "x☕☕".encode())
    assert 300 in ids and tokens.num_bytes(ids) == 7


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    for path, content, message in [
        (tmp_path / "missing.json", None, "no such file"),
        (tmp_path, None, "no such file.*tokenizer.json"),
        (tmp_path / "bad.json", "{", "not a tokenizer.json, or a damaged one"),
        (tmp_path / "config.json", '{"model_type": "llama"}', "not a tokenizer.json, or a damaged one"),
    ]:
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=re.escape(str(path)) + "': " + message) as caught:
            open_tokens(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="vocabulary is empty"):
        open_tokens(saved(Tokenizer(models.BPE()), tmp_path))
    with pytest.raises(ConfigError, match="no path given"):
        open_tokens("")
    with pytest.raises(ConfigError, match="bytes end a document with id 256"):
        open_tokens("bytes", eos_token="</s>")


def test_a_model_must_have_a_row_for_every_token():
    check_vocabulary(257, model_vocab=257)
    check_vocabulary(257, model_vocab=320)
    with pytest.raises(ConfigError, match=r"the tokens need 257 ids, the model has 256.*vocab_size = 257"):
        check_vocabulary(257, model_vocab=256)

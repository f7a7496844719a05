"""Prompts and responses: only responses are targets, as the chat template writes them; bad lines by their number."""

import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.train.data.batches import check_source, prepare_corpus, train_and_held_out

TEMPLATE = (
    "{% for m in messages %}{{ '<|endoftext|>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|>assistant:' }}{% endif %}"
)
RECORDS = [{"prompt": "2+2=", "response": "4"}, {"prompt": "Say ring", "response": "ring"}]


def write(folder, records):
    file = folder / "records.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return file


def windows(folder, records, *, length=24, **options):
    """The training batch of all windows, in file order."""
    options.setdefault("instructions", ("prompt", "response"))
    checked = check_source(
        write(folder, records), sequence_length=length, held_out_fraction=0.0, cache_dir=folder / "cache", **options
    )
    file = prepare_corpus(checked)
    train, _ = train_and_held_out(file, tokens=checked.tokens, sequence_length=length, seed=0, held_out_fraction=0.0)
    return checked, train


def shown(train, index):
    """Input and labels of a window as lists."""
    batch = train.to_batch([train.stored(index)])
    return batch["input_ids"][0].tolist(), batch["shift_labels"][0].tolist()


def test_only_responses_are_targets(tmp_path):
    _, train = windows(tmp_path, RECORDS)
    assert len(train) == 2
    ids, labels = shown(train, 0)
    assert ids == [*b"2+2=4", 256, *[256] * 18]
    assert labels == [-100] * 3 + [*b"4", 256] + [-100] * 19
    ids, labels = shown(train, 1)
    assert bytes(ids[:12]) == b"Say ringring" and labels[7:12] == [*b"ring", 256] and set(labels[12:]) == {-100}


def test_packed_examples_share_a_window_whole(tmp_path):
    _, train = windows(tmp_path, RECORDS, pack=True)
    ids, labels = shown(train, 0)
    assert len(train) == 1 and ids[:19] == [*b"2+2=4", 256, *b"Say ringring", 256]
    assert [label for label in labels if label != -100] == [*b"4", 256, *b"ring", 256]
    assert labels[5] == -100  # the end of one example does not predict the next
    _, train = windows(tmp_path, RECORDS, pack=True, length=17)
    assert len(train) == 2


def test_held_out_loss_counts_responses_only(tmp_path):
    _, train = windows(tmp_path, RECORDS)
    (part,) = train.evaluation_batches(micro_batch=2)
    assert part.num_targets == 2 + 5 == int((part.batch["shift_labels"] != -100).sum())
    assert part.num_bytes == 1 + 4


def test_a_long_response_loses_its_end_and_a_long_prompt_the_example(tmp_path, caplog):
    records = [{"prompt": "p" * 20, "response": "r" * 20}, {"prompt": "p" * 40, "response": "r"}]
    _, train = windows(tmp_path, records)
    assert len(train) == 1
    _, labels = shown(train, 0)
    assert labels.count(ord("r")) == 5
    assert "1 examples left out" in caplog.text and "line 2" in caplog.text


@pytest.fixture
def chat(tmp_path, byte_level_bpe):
    directory = tmp_path / "chat"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def test_the_chat_template_writes_the_conversation(tmp_path, chat):
    turns = [("user", "a ring"), ("assistant", "turns"), ("user", "and"), ("assistant", "again")]
    records = [
        {"prompt": "a ring", "response": "turns"},
        {"messages": [{"role": role, "content": content} for role, content in turns]},
    ]
    checked, train = windows(tmp_path, records, tokens=chat, length=64)
    decode = checked.instructions.chat.decode
    ids, labels = shown(train, 0)
    assert decode(ids).startswith("<|endoftext|>user:a ring<|endoftext|>assistant:turns")
    assert ids[0] == 0  # the special token, not its letters
    assert decode([label for label in labels if label != -100]) == "turns"
    _, labels = shown(train, 1)
    assert decode([label for label in labels if label != -100]) == "turnsagain"
    assert torch.tensor(labels).max() < 300


def test_another_template_is_another_token_file(tmp_path, chat):
    first, _ = windows(tmp_path, RECORDS, tokens=chat)
    (chat / "chat_template.jinja").write_text(TEMPLATE.replace(":", ";"))
    assert windows(tmp_path, RECORDS, tokens=chat)[0].path != first.path


GOOD = RECORDS[0]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([GOOD, "{"], "records.jsonl', line 2: not valid JSON"),
        ([GOOD, "[1]"], "line 2: of type list; every line must be an object such as"),
        ([GOOD, {"prompt": "p"}], "line 2: no field 'response'; the fields are prompt. Write data.prompt_field"),
        ([{"prompt": 3, "response": "r"}], "line 1: field 'prompt' is of type int, not a string"),
        ([GOOD, "", {"prompt": "p", "response": ""}], "line 3: field 'response' is empty"),
        ([{"messages": []}], "line 1: 'messages' need a tokenizer with a chat template"),
        ([], "empty: no record"),
        ([{"prompt": "p" * 99, "response": "r"}], "no record has a response within 24 tokens"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, records, words):
    with pytest.raises(ConfigError) as caught:
        windows(tmp_path, records)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "'messages' is of type str, not a list"),
        ([{"role": "user"}], "message 1 is no"),
        ([{"role": "user", "content": "x"}], "no message has the role 'assistant'"),
    ],
)
def test_a_broken_conversation(tmp_path, chat, messages, words):
    with pytest.raises(ConfigError, match=r"line 1: ") as caught:
        windows(tmp_path, [{"messages": messages}], tokens=chat)
    assert words in str(caught.value)


def test_text_files_are_no_instructions(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"reads \.jsonl files"):
        check_source(tmp_path / "a.txt", instructions=("prompt", "response"), sequence_length=8)


def test_the_run_file_says_so(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nconfig = "c"\n[data]\nkind = "instructions"\n[train]\nsteps = 1\n')
    assert load_run_config(tmp_path / "run.toml").data.kind == "instructions"
    with pytest.raises(ConfigError, match=r"data.kind = 'chat'"):
        load_run_config(tmp_path / "run.toml", overrides=["data.kind=chat"])

"""`rotorch init`, and what follows a run: `rotorch eval` and `rotorch generate` of its checkpoint, under any layout."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from commands import Command, rotorch, write_run
from transformers import LlamaConfig, LlamaForCausalLM

from rotorch import cli
from rotorch.cli.init_data import init_data
from rotorch.core.errors import ConfigError
from rotorch.train.continue_text import Printer
from rotorch.train.data.tokens import ByteTokens
from rotorch.train.saved_model import open_saved_model

SENTENCE = "It was the best of times, it was the worst of times. "


def published(directory: Path, **changes) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = LlamaConfig(**{"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, **sizes, **changes})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def json_of(directory: Path, *arguments: object) -> dict:
    """Numbers of a command that must end well."""
    file = directory / "numbers.json"
    command = rotorch(directory / "said", *arguments, "--json", file)
    assert command.code == 0, command.stderr
    return json.loads(file.read_text())


def test_a_run_from_a_directory_and_a_text_without_editing(tmp_path, warm):
    published(tmp_path / "mine")
    (tmp_path / "text.txt").write_text(SENTENCE * 200)
    file = tmp_path / "mine.toml"
    first = rotorch(tmp_path / "said", "init", tmp_path / "mine", "--data", tmp_path / "text.txt", "--out", file)
    assert first.code == 0, first.stderr
    written = tomllib.loads(file.read_text())
    assert written["model"] == {"init": "mine"} and written["data"]["source"] == "text.txt"
    assert written["sample"]["prompt"] == "It was the"
    assert all("#" in line for line in file.read_text().splitlines() if line.startswith(("lr", "steps", "layout")))
    again = rotorch(tmp_path / "said", "init", tmp_path / "mine", "--data", tmp_path / "text.txt", "--out", file)
    assert again.code == 2 and "--force" in again.stderr and len(again.stderr.splitlines()) == 1

    trained = json_of(tmp_path, "train", file, f'data.cache_dir="{tmp_path / "cache"}"', "train.tensorboard=false")
    assert trained["step"] == written["train"]["steps"] and len(trained["sample"]) > len("It was the")
    run = tmp_path / "runs" / "mine"
    measured = json_of(tmp_path, "eval", run)
    assert measured["part"] == "held out" and measured["step"] == trained["step"]
    assert measured["bits_per_byte"] == pytest.approx(trained["held_out_bits_per_byte"], rel=1e-5)
    assert json_of(tmp_path, "eval", run, "--parallel", "rtp=2")["loss"] == pytest.approx(measured["loss"], rel=1e-5)
    other = json_of(tmp_path, "eval", run, "--data", tmp_path / "text.txt", "--windows", 5)
    assert (other["part"], other["num_windows"], other["num_tokens"]) == ("all", 5, 5 * 64)

    asked = ("generate", run, "--prompt", SENTENCE[:20], "--length", 12)
    one, *others = (json_of(tmp_path, *asked, "--parallel", layout) for layout in ("single", "rtp=2"))
    assert one["num_tokens"] == 12 and others == [one]  # the seed decides, whatever the layout
    likeliest = ("generate", run, "--temperature", 0, "--prompt", "It", "--length", 500)
    assert json_of(tmp_path, *likeliest)["num_tokens"] == 62  # up to the model's last position


PAIR = {"question": "Naïve 😀?\x7f", "chosen": SENTENCE, "rejected": "No."}
MESSAGES = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": SENTENCE}]
RECORDS = {
    "asked.jsonl": ({"instruction": "Say it", "output": SENTENCE}, ("instructions", "instruction", "output")),
    "asked.parquet": ({"id": "3", "prompt": "Say it", "response": SENTENCE}, ("instructions", "prompt", "response")),
    "plain.jsonl": ({"id": 3, "content": SENTENCE}, ("text", "content")),
    "story.parquet": ({"id": "3", "story": SENTENCE}, ("text", "story")),
    "pairs.jsonl": (PAIR, ("preferences", "question")),
    "pairs.parquet": ({"chosen": "Say: " + SENTENCE, "rejected": "Say: no."}, ("preferences",)),
}


def test_kinds_of_records_are_told_apart(tmp_path):
    for name, (record, expected) in RECORDS.items():
        file = tmp_path / name
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 300), file)
        else:
            file.write_text((json.dumps(record) + "\n") * 300)
        found = init_data(str(file), written=name)
        data = tomllib.loads("\n".join(found.lines))
        fields = [data[key] for key in ("text_field", "prompt_field", "response_field") if key in data]
        assert (found.kind, *fields) == expected and data.get("kind", "text") == found.kind and data["source"] == name
        assert found.longest_bytes == {"text": 0, "instructions": 59}.get(found.kind, found.longest_bytes)
        assert found.num_pairs == (300 if found.kind == "preferences" else 0)
    (tmp_path / "all.json").write_text(json.dumps([PAIR] * 3))
    with pytest.raises(ConfigError, match=r"all\.json is one JSON document"):
        init_data(str(tmp_path / "all.json"), written="all.json")


def test_a_run_of_pairs_is_written(tmp_path):
    published(tmp_path / "mine")
    (tmp_path / "pairs.jsonl").write_text((json.dumps(PAIR) + "\n") * 300)
    told = ("--data", tmp_path / "pairs.jsonl", "--out", tmp_path / "pairs.toml", "--parallel", "rtp=2")
    command = rotorch(tmp_path / "said", "init", tmp_path / "mine", *told)
    assert command.code == 0, command.stderr
    written = tomllib.loads((tmp_path / "pairs.toml").read_text())
    assert written["data"]["sequence_length"] == 64  # a prompt with one response
    assert (written["train"]["global_batch"], written["train"]["steps"]) == (14, 21) and written["dpo"] == {"beta": 0.1}
    assert written["optimizer"]["lr"] == 1e-6 and written["sample"]["prompt"] == PAIR["question"]
    assert "eval" not in command.stdout  # which takes text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("init", "nothing"), "no 'nothing'"),
        (("init", "small"), "vocabulary of 100 is too small for bytes (257)"),
        (("init", "mine", "--data", "gone.txt"), "gone.txt"),
        (("init", "mine", "--data", "short.txt"), "short.txt"),
        (("init", "mine", "--data", "numbers.jsonl"), "no field of text; the fields are n"),
        (("init", "mine", "--data", "long.jsonl"), "have 390 bytes and more, and samples 64 tokens"),
        (("init", "mine", "--data", "chats.jsonl"), "a tokenizer with a chat template"),
        (("init", "old"), "weights of old are in pytorch_model.bin"),
        (("init", "owner/name"), "hf://owner/name for a model of the hub"),
        (("init", "hf://owner"), "init = 'hf://owner': is no name of the hub"),
        (("init", "mine", "--data", "text.txt", "--parallel", "rtp=3,rtp=2"), "rtp=3,rtp=2"),
        (("init", "mine", "--data", "text.txt", "--out", "no/such/run.toml"), "no directory"),
        (("generate", "mine"), "mine: not a checkpoint of rotorch (no manifest.json), but a model of Hugging Face"),
        (("eval", "nothing"), "nothing: no such directory"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, words):
    published(tmp_path / "mine")
    published(tmp_path / "small", vocab_size=100)
    (tmp_path / "text.txt").write_text(SENTENCE * 200)
    (tmp_path / "short.txt").write_text("It")
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "Why is it so?" * 30, "response": "So."}) + "\n")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_bytes((tmp_path / "mine" / "config.json").read_bytes())
    (tmp_path / "old" / "pytorch_model.bin").touch()
    before = sorted(tmp_path.rglob("*"))
    command = Command(tmp_path.parent / f"{tmp_path.name}-said", *arguments, cwd=tmp_path)
    command.wait()
    assert command.code == 2 and words in command.stderr and len(command.stderr.splitlines()) == 1, command.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_not_there_is_said_before_torch_is_loaded(tmp_path):
    (tmp_path / "mine.toml").touch()
    asked = (["eval", "gone"], ["generate", "gone"], ["export", "gone", "x"], ["init", "hf://a/mine@v2"])
    code = f"import sys; from rotorch import cli; print([cli.run(a) for a in {asked!r}], 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[2, 2, 2, 2] False\n"
    assert done.stderr.count("gone: no such directory") == 3 and "mine.toml exists" in done.stderr


def test_a_checkpoint_is_refused_under_what_cannot_use_it(tmp_path):
    run = write_run(tmp_path)
    short = ("optimizer.warmup_steps=0", "train.steps=1", "data.held_out_fraction=0")
    assert rotorch(tmp_path / "said", "train", run, *short).code == 0
    learnt = rotorch(tmp_path / "said", "eval", tmp_path / "run")  # by then nothing of its text is unseen
    assert learnt.code == 2 and "the run held nothing out of" in learnt.stderr
    for layout, words in (("pp=2", "2 stages over LlamaForCausalLM"), ("rtp=x", "rtp=x")):
        with pytest.raises(ConfigError, match=words):
            open_saved_model(str(tmp_path / "run"), layout=layout, device="cpu")
    with pytest.raises(ConfigError, match="parallel: 100000000 ranks on one machine would take"):
        open_saved_model(str(tmp_path / "run"), layout="ddp=100000000", device="cpu")
    pipeline = rotorch(tmp_path / "said", "generate", tmp_path / "run", "--parallel", "zeropp=1x2")
    assert pipeline.code == 2 and "pipeline" in pipeline.stderr
    long = rotorch(tmp_path / "said", "generate", tmp_path / "run", "--prompt", "x" * 40)
    assert long.code == 2 and "40 tokens, and the model takes 32 positions" in long.stderr


def test_windows_of_a_pass_have_room_and_are_no_more_than_there_are(tmp_path, warm):
    run = write_run(tmp_path)
    assert rotorch(tmp_path / "said", "train", run, "optimizer.warmup_steps=0", "train.steps=1").code == 0
    asked = ("eval", tmp_path / "run", "--micro-batch")
    too_many = rotorch(tmp_path / "said", *asked, 10**12)
    assert too_many.code == 2 and too_many.stderr.count("\n") == 1, too_many.stderr
    fits = int(re.search(r"eval --micro-batch 10{12}: .* Write --micro-batch (\d+) or less", too_many.stderr)[1])
    assert json_of(tmp_path, *asked, fits)["loss"] == pytest.approx(json_of(tmp_path, *asked, 1)["loss"], rel=1e-6)


def test_characters_are_printed_whole(capsys):
    printer = Printer(ByteTokens())
    printer.put(torch.tensor([[1, 2]]))  # the prompt
    shown = []
    for byte in "é€!".encode():
        printer.put(torch.tensor([byte]))
        shown.append(capsys.readouterr().out)
    printer.end()
    assert shown == ["", "é", "", "", "€", "!"] and capsys.readouterr().out == "\n"

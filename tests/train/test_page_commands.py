"""Shell and TOML blocks of docs/*.md: commands and run files are run, in a directory that has what they name.

tests/test_code_blocks.py reads all of them; here are the few that nothing runs, and why.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from commands import Command
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from test_code_blocks import NO_PROGRAM, blocks, commands, every_block, first_line

ROOT = Path(__file__).resolve().parents[2]

NOT_RUN = {
    "make": "test_code_blocks.py looks for the target",
    "pip": "it needs the network",
    "torchrun": "four hosts; tests/train/test_two_hosts.py starts such jobs, and a tutorial another",
    "sbatch": "tests/clusters/test_slurm.py starts it, where there is Slurm",
    "rotorch eval runs/my_run --tasks hellaswag": "questions of the hub; tests/train/test_measure_tasks.py has its own",
    "rotorch calibrate": "tests/test_calibrate_command.py runs it",
    "rotorch --install-completion": "it writes into the home directory; tests/test_completion.py completes",
    "rotorch train my_run.toml train.checkpoint_dir=s3": "a bucket; tests/train/test_object_store.py has its own",
    "rotorch inspect s3": "the same",
}
"""Beginnings of commands that are not run here, and the reasons."""

PLACEHOLDERS = {"MODEL": "models/my-chat-model/config.json", "RUN.toml": "my_run.toml", "DIR": "timelines"}
SMALL_BENCH = ("--rounds", "1", "--steps", "1", "--no-process-memory")
RUN = """
[model]
config = "llama/config.json"
[data]
source = "text.txt"
sequence_length = 32
cache_dir = "cache"
[train]
steps = 4
micro_batch = 1
global_batch = 8
checkpoint_every = 2
out = "runs/my_run"
timeout_s = 300
tensorboard = false
[sample]
length = 0
"""
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WATCH = """
class Watch:
    def __init__(self, info):
        self.out = info.directory

    def on_step(self, record):
        with open(f"{self.out}/watched.txt", "a") as file:
            file.write(f"{record.step}\\n")
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory, byte_level_bpe_text):
    """A directory that has what the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("llama", "shards", "models", "runs", "timelines"):
        (folder / name).mkdir()
    (folder / "llama" / "config.json").write_bytes((ROOT / "configs" / "tiny" / "llama.json").read_bytes())
    (folder / "config.json").write_bytes((ROOT / "configs" / "tiny" / "llama.json").read_bytes())
    (folder / "my.toml").write_bytes((ROOT / "src/rotorch/planner/clusters/h100x8.toml").read_bytes())
    sentences = [f"Ring {number} went round, slice by slice, and came home again." for number in range(200)]
    (folder / "text.txt").write_text("\n".join(sentences))
    for file in (folder / "shards" / "a.jsonl", folder / "test.jsonl"):
        file.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences))
    pairs = [{"prompt": f"Ring {n}?", "chosen": "It went round.", "rejected": "It fell."} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "my_run.toml").write_text(RUN)
    (folder / "my_package.py").write_text(WATCH)
    model = folder / "models" / "my-chat-model"
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=304, max_position_embeddings=4096, **sizes)).save_pretrained(model)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_bpe_text), eos_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    return folder


def run(here: Path, *words: str, code: int = 0) -> Command:
    command = Command(here / "said", *words, cwd=here)
    assert command.wait() == code, f"rotorch {shlex.join(words)}\n{command.stdout}\n{command.stderr}"
    return command


def every_command() -> list[tuple[str, list[str]]]:
    """Page and words of each command, in the order of the pages."""
    return [
        (page, words)
        for page, language, text in every_block()
        if language in ("", "bash") and page.startswith("docs/") and (page, first_line(text)) not in NO_PROGRAM
        for words in commands(text)
    ]


def is_run(words: list[str]) -> bool:
    return not shlex.join(words).startswith(tuple(NOT_RUN))


def test_every_reason_is_of_a_command_that_is_there():
    there = [shlex.join(words) for _, words in every_command()]
    assert [begins for begins in NOT_RUN if not any(said.startswith(begins) for said in there)] == []


@pytest.mark.slow  # tests/test_code_blocks.py reads these commands, and other tests run their like
def test_every_command_of_the_pages_runs(here, warm):
    run(here, "train", "my_run.toml", "train.steps=2")
    for name in ("demo", "a", "b"):
        shutil.copytree(here / "runs" / "my_run", here / "runs" / name)
    asked, steps = [(page, words) for page, words in every_command() if is_run(words)], 4
    assert len(asked) > 15
    for page, words in asked:
        words = [PLACEHOLDERS.get(word, word) for word in words]
        if words[0] == "./sweep.py":  # a script of the reader's, which writes a run file
            told = words[words.index("|") + 2 :]
            command = [sys.executable, "-m", "rotorch", *told]
            done = subprocess.run(command, input=RUN.encode(), cwd=here, capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
            continue
        assert words[0] == "rotorch", page
        if "--resume" in words:
            steps += 2
        more = [f"train.steps={steps}"] if "--resume" in words else []
        more += SMALL_BENCH if words[1] == "bench" else []
        run(here, *words[1:], *more)
    assert (here / "rates.svg").exists() and (here / "both.html").exists() and (here / "exported").is_dir()


RUNS = [text for _, text in blocks(ROOT / "docs" / "how_to.md") if text.startswith("[")]
SETTINGS = ("train.steps=2", "train.micro_batch=1", "data.cache_dir=cache", "data.sequence_length=64")


@pytest.mark.slow  # tests/test_code_blocks.py reads them, and other tests run their like
def test_every_run_file_of_the_pages_is_trained(here, warm, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(here / "hub"))
    for number, text in enumerate(RUNS):
        blocks_of_model = "" if "[model]" in text else '[model]\nconfig = "llama/config.json"\n'
        (here / f"run{number}.toml").write_text(blocks_of_model + text)
        told = [*SETTINGS, f"train.out=runs/page{number}", "sample.length=0"]
        if "loggers" in text:  # packages of their own
            told += ["train.loggers=[]", "data.source=text.txt"]
        refused = run(here, "train", f"run{number}.toml", *told, code=2 if "hf://" in text else 0).stderr
        assert ("cannot be had from the hub" in refused) is ("hf://" in text)
        if "my_package.Watch" in text:
            assert (here / f"runs/page{number}/watched.txt").read_text() == "1\n2\n"
    assert len(RUNS) == 4

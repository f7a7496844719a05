"""Code blocks of the pages: each of them runs, or is read as it would be run, or has its reason here."""

import os
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer.main

from rotorch import cli
from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.strategies import parse_parallel
from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)
)
"""The tutorials run in tests/test_tutorials.py."""

RUN_BY = {
    ("README.md", "import torch"): "tests/test_examples.py",
    ("docs/drop_in.md", "import torch"): "tests/test_examples.py",
    ("docs/drop_in.md", "import rotorch.hf"): "tests/hf/test_trainers.py",
    ("docs/drop_in.md", "from peft import LoraConfig"): "tests/hf/test_trainers.py",
    ("docs/drop_in.md", "import peft"): "tests/hf/test_trainers.py",
    ("docs/drop_in.md", "model = rotorch.parallelize(AutoModelFor"): "tests/hf/test_trainers.py",
    ("docs/drop_in.md", "import rotorch.accelerate"): "tests/adapters/test_adapters_page.py",
    ("docs/drop_in.md", "import lightning"): "tests/adapters/test_adapters_page.py",
    ("docs/drop_in.md", "class Training(lightning.LightningModule"): "tests/adapters/test_adapters_page.py",
    ("docs/drop_in.md", "groups = rotorch.optim.muon_groups("): "here",
    ("docs/long_context.md", 'model = rotorch.parallelize(model, "rtp='): "here",
}
"""Tests that run blocks of Python, by page and first line."""

NO_PROGRAM = {
    ("README.md", "held-out    2.7605 bits per byte"): "the last lines of `make train`",
    ("CONTRIBUTING.md", "8    cli/"): "layers, which tests/test_architecture.py compares with its table",
    ("docs/architecture.md", "rank 0, batch x                    rank "): "a picture",
    ("docs/architecture.md", "cli/                                    "): "a tree of directories",
    ("docs/architecture.md", "nn.Module on meta ── describe ──> ModelS"): "a picture",
    ("docs/checkpoints.md", "runs/my_run/checkpoints/step-00000100/"): "a listing of files",
    ("docs/long_context.md", "tokens      0 . . . 1 . . . 2 . . . 3 . "): "a picture",
    ("docs/repository.md", "src/rotorch/"): "a tree, which tests/test_architecture.py compares with the directories",
}
"""Blocks that nobody runs, and the reasons."""

OTHER_PAGES = {
    "docs/failures.md": "messages, as their tests have seen them",
    "docs/bad_inputs.md": "the same",
    "examples/strategy/README.md": "tests/strategies/test_installed.py installs this strategy, and runs it",
}
"""Pages whose blocks others hold to the code."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of a page's code blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def every_block() -> Iterator[tuple[str, str, str]]:
    """Page, language and text."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name not in OTHER_PAGES:
            for language, text in blocks(page):
                yield name, language, text


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command of a block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words:
            yield words


def first_line(text: str) -> str:
    """The beginning of a block, as the tables above name it."""
    return text.strip().splitlines()[0][:40]


def reads(words: list[str]) -> str:
    """Reads a command as it would be run; "" if all of it is understood, else what is not."""
    if "|" in words and words[0].startswith("./"):  # a script of the reader's, whose output is read
        return reads(words[words.index("|") + 1 :])
    program, *arguments = words
    match program:
        case "rotorch":
            whole = typer.main.get_command(cli.app)
            if arguments[0].startswith("--"):
                known = {name for parameter in whole.params for name in parameter.opts}
                return "" if arguments[0] in known else f"rotorch {arguments[0]}: no option"
            command = whole.commands.get(arguments[0])
            if command is None:
                return f"rotorch {arguments[0]}: no command"
            try:
                command.make_context(arguments[0], arguments[1:])
                for word, value in pairwise(arguments):
                    if word == "--parallel":
                        parse_parallel(value)
            except (cli._UsageError, ConfigError) as error:
                return f"{shlex.join(words)}: {error}"
            return ""
        case "torchrun" | "sbatch":
            if program == "torchrun" and "rotorch" not in arguments:
                return ""  # a script of the reader's
            start = arguments.index("rotorch" if program == "torchrun" else "slurm.sbatch") + 1
            return reads(["rotorch", *(["train"] if program == "sbatch" else []), *arguments[start:]])
        case "make":
            targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
            asked = {word for word in arguments if "=" not in word}
            return f"make {asked - targets}: no target" if asked - targets else ""
        case "python" | "pytest":
            files = [word for word in arguments if "/" in word and not word.startswith(("--", "benchmarks/results"))]
            lost = [word for word in files if not (ROOT / word).exists()]
            return f"{program} {lost}: no file" if lost else ""
        case "pip":
            asked = re.findall(r"rotorch\[(\w+)\]", shlex.join(arguments))
            known = re.findall(r"^(\w+(?:-\w+)?) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
            return "" if set(asked) <= set(known) else f"pip: no extra {asked}"
    return f"{shlex.join(words)}: no known program"


def test_every_block_is_run_or_read_or_has_its_reason() -> None:
    found = []
    for page, language, text in every_block():
        key = (page, first_line(text))
        if language == "python":
            compile(text, page, "exec")
            found += [] if key in RUN_BY else [f"{page}: nothing runs {key[1]!r}"]
        elif language in ("", "bash") and key not in NO_PROGRAM:
            found += [f"{page}: {wrong}" for words in commands(text) if (wrong := reads(words))]
        elif language not in ("", "bash", "toml"):
            found.append(f"{page}: a block of {language}, which no test knows")
    assert not found, "\n".join(found)


def test_every_reason_is_of_a_block_that_is_there() -> None:
    there = {(page, first_line(text)) for page, _, text in every_block()}
    lost = {*RUN_BY, *NO_PROGRAM} - there
    assert not lost
    for test in RUN_BY.values():
        assert test == "here" or (ROOT / test).exists()


def test_a_mistake_in_a_block_is_found() -> None:
    assert reads(["rotorch", "train", "run.toml", "--paralell", "rtp=2"])
    assert reads(["rotorch", "verify", "config.json", "--parallel", "rpt=2"])
    assert reads(["rotorch", "trian"]) and reads(["make", "nothing"]) and reads(["python", "docs/gone.py"])
    assert reads(["torchrun", "-m", "rotorch", "train", "--nothing"]) and reads(["curl", "x"])
    assert not reads(["rotorch", "train", "run.toml", "--parallel", "ddp=2,rtp=2"])


@pytest.mark.parametrize("page", [page for page, language, _ in every_block() if language == "toml"])
def test_blocks_of_a_run_file_are_read(page: str, tmp_path: Path) -> None:
    for language, text in blocks(ROOT / page):
        if language == "toml":
            model = "" if "[model]" in text else '[model]\nconfig = "config.json"\n'
            (tmp_path / "run.toml").write_text(model + text)
            load_run_config(tmp_path / "run.toml", overrides=["train.steps=1"])


def test_blocks_on_long_sequences_and_on_muon_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {key: text for page, _, text in every_block() if RUN_BY.get(key := (page, first_line(text))) == "here"}
    long_context, muon = (
        next(t for (page, _), t in found.items() if word in page) for word in ("long_context", "drop_in")
    )
    first, *others = run_ranks(_run_both, long_context, muon, num_ranks=4)
    assert all(other == pytest.approx(first) for other in others) and first > 0


def _run_both(long_context: str, muon: str) -> float:
    import rotorch
    from rotorch.models.hf import causal_lm, load_config

    model = causal_lm(load_config(ROOT / "configs" / "tiny" / "llama.json"))
    ids = torch.arange(64).view(2, 32) + int(os.environ["RANK"]) // 2
    names = {"rotorch": rotorch, "model": model, "batch": {"input_ids": ids, "labels": ids}}
    exec(compile(long_context, "page", "exec"), names)
    exec(compile(muon, "page", "exec"), names)
    names["optimizer"].step()
    names["model"].close()
    return float(names["loss"])

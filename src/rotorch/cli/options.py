"""Options and arguments that several commands have, with their help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rotorch.cli.override_words import completions
from rotorch.core.errors import ConfigError
from rotorch.train.launch.joining import JobRank


def _fit_for_softmax(temperature: float) -> float:
    """Refuses what divides logits to infinities or nothing; bounds of `typer` let NaN pass. As `[sample]` does."""
    if temperature == 0.0 or 1e-3 <= temperature <= 1e3:
        return temperature
    raise ConfigError(
        f"generate --temperature {temperature:g}: write 0 for the likeliest token, or a number from 0.001 to 1000"
    )


def _share(top_p: float) -> float:
    if 0.01 <= top_p <= 1.0:
        return top_p
    raise ConfigError(f"generate --top-p {top_p:g}: write a number from 0.01 to 1")


Parallel = Annotated[str, typer.Option("--parallel", help="Layout, outermost first: ddp=2,rtp=4")]
OwnLayout = Annotated[str | None, typer.Option("--parallel", help="Layout in place of the file's: ddp=2,rtp=4")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Ranks to start; by default what the layout needs")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, e.g. train.steps=9 optimizer.name=muon", autocompletion=completions),
]
Compile = Annotated[bool, typer.Option("--compile", help="Run blocks by torch.compile; the first step takes long")]
Page = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", help="The page; by default report.html, in the directory of a single run"),
]
Prompt = Annotated[
    str | None, typer.Option(help="Beginning of the text; `-` reads it from standard input; by default the run's")
]
Temperature = Annotated[float, typer.Option(callback=_fit_for_softmax, help="0 takes the likeliest token; to 1000")]
TopP = Annotated[
    float, typer.Option(callback=_share, help="Draw from the likeliest tokens that add up to this, 0.01 to 1")
]
DrawSeed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides what is drawn")]
HeldOutData = Annotated[
    str | None, typer.Option(help="A text, JSONL or Parquet file, or a directory; by default the run's held-out text")
]
Tasks = Annotated[
    str, typer.Option(metavar="NAME,...", help="Measure on tasks of lm-eval in place of text (rotorch[lm-eval])")
]
TaskDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Further tasks, as YAML files")]
FewShot = Annotated[int | None, typer.Option(min=0, help="Examples before each question; the task's")]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions of each task; by default all")]
StartingModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hugging Face directory, a config.json, a GGUF file, or hf://owner/name"),
]
TextToLearn = Annotated[
    str,
    typer.Option(
        help="A text, JSONL or Parquet file, a directory of them, hf://datasets/owner/name, or stdlib: Python's own "
        "sources"
    ),
]
Bars = Annotated[
    list[str] | None,
    typer.Option(
        "--bar",
        "--at-least",
        help='A bar that must hold, e.g. "rtp=2 >= 1.05 * ddp=2" or "peak rtp=2 <= 0.75 * fsdp2"; else exit code 1',
    ),
]
VirtualTime = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Products take so long on a device's clock, messages what they take: overlap of more ranks than cores",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to FILE, too")]


def check_task_options(tasks: str, *, of_text: Sequence[object], of_tasks: Sequence[object]) -> None:
    """Raises ConfigError if tasks are named beside options of text, or options of tasks without any."""
    if tasks and any(option is not None for option in of_text):
        raise ConfigError("eval: --tasks beside --data or --windows, which are of text. Leave out one of the two")
    if not tasks and any(option is not None for option in of_tasks):
        raise ConfigError("eval: --task-dir, --few-shot and --limit are of --tasks. Write --tasks NAME,... too")


def check_checkpoint(name: str) -> None:
    """Raises ConfigError if no checkpoint is there, before seconds are spent on loading torch. Asks no store."""
    from rotorch.train.checkpoint.directories import find_checkpoint
    from rotorch.train.checkpoint.manifest import read_manifest

    if "://" not in name:
        read_manifest(find_checkpoint(name))


def file_of_run(model: str, *, out: Path | None, force: bool) -> Path:
    """The run file that `init` writes: `out`, or one in the working directory that is named after the model.

    Raises:
        ConfigError: it exists and is not to be replaced, or its directory does not.
    """
    file = out or Path(f"{_name_of(model)}.toml")
    if file.exists() and not force:
        raise ConfigError(f"init: {file} exists. Write --out with another name, or --force to replace it")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"init: no directory {file.absolute().parent}. Make it, or write another --out")
    return file


def _name_of(model: str) -> str:
    if model.startswith("hf://"):
        return model.partition("@")[0].rpartition("/")[2] or "run"
    path = Path(model).expanduser().absolute()
    named = path.parent if path.name == "config.json" else path
    return named.stem if named.suffix == ".gguf" else named.name or "run"


def standard_input(*, job: JobRank | None) -> bytes:
    """Text of a run file from standard input.

    Raises:
        ConfigError: nothing is there, or several ranks of a job would have to share it.
    """
    if job is not None and job.num_ranks > 1:
        raise ConfigError("train -: the ranks of a job cannot share standard input. Write a run file")
    content = b"" if sys.stdin is None or sys.stdin.closed else sys.stdin.buffer.read()
    if not content.strip():
        raise ConfigError("train -: standard input is empty. Write rotorch train - < RUN.toml")
    return content

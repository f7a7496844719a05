"""Options and arguments that several commands have, with their help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rotorch.cli.override_words import completions
from rotorch.core.errors import ConfigError
from rotorch.train.launch.joining import JobRank

Parallel = Annotated[str, typer.Option("--parallel", help="Layout, outermost first: ddp=2,rtp=4")]
OwnLayout = Annotated[str | None, typer.Option("--parallel", help="Layout in place of the file's: ddp=2,rtp=4")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Ranks to start; by default what the layout needs")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="section.key=value, e.g. train.steps=9 optimizer.name=muon", autocompletion=completions),
]
Compile = Annotated[bool, typer.Option("--compile", help="Run blocks by torch.compile; the first step takes long")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to FILE, too")]


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

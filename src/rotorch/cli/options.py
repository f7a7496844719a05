"""Options and arguments that several commands have, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Parallel = Annotated[str, typer.Option("--parallel", help="Layout, outermost first: ddp=2,rtp=4")]
OwnLayout = Annotated[str | None, typer.Option("--parallel", help="Layout in place of the file's: ddp=2,rtp=4")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Nproc = Annotated[int | None, typer.Option("--nproc", help="Ranks to start; by default what the layout needs")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, e.g. train.steps=9 optimizer.name=muon")
]
Compile = Annotated[bool, typer.Option("--compile", help="Run blocks by torch.compile; the first step takes long")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to FILE, too")]

"""`rotorch lr-find`: tries learning rates from small to large on a run's own model, text and layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rotorch.cli.output import check_json, print_now, write_json
from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase
from rotorch.run_config import load_run_config
from rotorch.strategies import parse_parallel


def lr_find_command(
    run_file: Path,
    *,
    overrides: Sequence[str],
    nproc: int | None,
    lowest: float,
    highest: float,
    steps: int,
    plot: Path | None,
    json_file: Path | None,
) -> bool:
    """Runs the sweep, prints and writes its result; returns whether it suggests a rate.

    Raises:
        ConfigError: something is wrong with the input; nothing was started.
    """
    check_json(json_file)
    if plot is not None and (plot.suffix != ".svg" or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {plot}: write a file that ends in .svg, in a directory that is there")
    config = load_run_config(run_file, overrides=overrides)
    if config.parallel.layout == "auto":
        raise ConfigError("lr-find: parallel.layout = 'auto' is for `rotorch train`. Write a layout: --parallel ...")
    parse_parallel(config.parallel.layout)
    tell_phase("loading torch")
    from rotorch.train.find_lr import Sweep, drawn, find_learning_rate

    found = find_learning_rate(config, sweep=Sweep(lowest, highest, steps), nproc=nproc)
    for line in found.lines():
        print_now(line)
    if plot is not None:
        plot.write_text(drawn(found), "utf-8")
    write_json(json_file, found.to_json())
    return found.suggested is not None

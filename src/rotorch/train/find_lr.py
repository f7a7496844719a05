"""A sweep over learning rates: one step for each, from small to large, and the rate at which the loss falls fastest.

[Note: the suggested rate]
    The idea is Smith's (Cyclical Learning Rates for Training Neural Networks, WACV 2017, section 3.3): with too small a
    rate the loss stays, with too large a one it rises. Losses of single steps are noise, so they are smoothed by an
    exponential mean whose start is corrected. The suggestion is the rate of the steepest fall of the smoothed loss over
    the logarithm of the rate, before its minimum: a value to begin with, for a run with warm-up and decay. Weights and
    optimizer state of the sweep are thrown away.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rotorch.core.errors import ConfigError, RankFailure, StoppedEarly
from rotorch.core.phase_line import tell_phase
from rotorch.mesh import device_type
from rotorch.parallelize import load_step_code
from rotorch.process.forking import check_semaphores, why_no_ranks
from rotorch.process.new_interpreter import call_fresh
from rotorch.run_config import RunConfig
from rotorch.strategies import format_parallel
from rotorch.train.checks.memory import PeakMeter
from rotorch.train.checks.preflight import CheckedRun, check_run
from rotorch.train.data.batches import open_windows, prepare_sources
from rotorch.train.launch.elastic import is_rank, launch
from rotorch.train.launch.status import RankPhase, StatusBoard
from rotorch.train.loop import read_batches
from rotorch.train.reference import prepare_reference
from rotorch.train.run import build
from rotorch.train.step import train_step

_SMOOTHING = 0.9
_RISEN = 1.5
"""The sweep ends where the smoothed loss is above its minimum by this factor."""
_FEWEST_STEPS = 10
_HIGHEST = 1e3


@dataclass(frozen=True)
class Sweep:
    """Rates of a sweep, evenly spaced on a logarithmic scale.

    Attributes:
        lowest: of the first step.
        highest: of the last.
        steps: number of steps.
    """

    lowest: float
    highest: float
    steps: int

    def check(self) -> None:
        """Raises ConfigError if these are no rates to sweep over."""
        if not 0 < self.lowest < self.highest <= _HIGHEST:
            raise ConfigError(
                f"lr-find: from {self.lowest:g} to {self.highest:g}: write a --lowest above 0 and below --highest, and "
                f"that at most {_HIGHEST:g}"
            )
        if self.steps < _FEWEST_STEPS:
            raise ConfigError(f"lr-find: --steps {self.steps}: write {_FEWEST_STEPS} or more")

    def rates(self) -> list[float]:
        """The learning rate of each step."""
        ratio = self.highest / self.lowest
        return [self.lowest * ratio ** (number / (self.steps - 1)) for number in range(self.steps)]


@dataclass(frozen=True)
class FoundRate:
    """Result of a sweep.

    Attributes:
        layout: the layout that it ran under.
        rates: learning rates that were tried.
        losses: loss before the update with each, in nats per token.
        smoothed: the same, smoothed.
        suggested: a learning rate to begin with; None if the loss fell nowhere.
        lowest_loss_at: the rate at which the smoothed loss is lowest.
        diverged_at: the rate at which the sweep broke off; None if it came to its end.
    """

    layout: str
    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggested: float | None
    lowest_loss_at: float
    diverged_at: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Lines for people."""
        yield f"layout     {self.layout}, {len(self.rates)} steps from {self.rates[0]:.2e} to {self.rates[-1]:.2e}"
        if self.diverged_at is not None:
            yield f"diverges   at {self.diverged_at:.2e}"
        if self.suggested is None:
            yield "suggested  none: the loss fell at no rate. Try another range (--lowest, --highest) or more --steps"
            return
        yield f"lowest     loss at {self.lowest_loss_at:.2e}"
        yield f"suggested  optimizer.lr={self.suggested:.2g}"


def find_learning_rate(config: RunConfig, *, sweep: Sweep, nproc: int | None = None) -> FoundRate:
    """Sweeps over learning rates on ranks of this machine. Writes nothing but the token cache.

    Args:
        config: the run; its schedule, evaluations, checkpoints and loggers are left out.
        sweep: the rates.
        nproc: number of ranks; by default as many as the layout has.

    Raises:
        ConfigError: something is wrong with the input; nothing was started.
        RankFailure: a rank failed; the message names it.
        StoppedEarly: after Ctrl-C or a signal.
    """
    sweep.check()
    if is_rank():
        raise ConfigError("lr-find starts its own ranks (--nproc). Call it without torchrun")
    torch.set_num_threads(1)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking in the usual way spoils CUDA for forked ranks
    on_gpu = device_type(config.train.device) == "cuda"
    if why := why_no_ranks(on_gpu=on_gpu):
        return call_fresh(find_learning_rate, config, why=why, sweep=sweep, nproc=nproc)
    with tempfile.TemporaryDirectory(prefix="rotorch-lr-find-") as directory:
        tell_phase("checking the model and the text")
        run = check_run(_only_steps(config, sweep=sweep, out=Path(directory, "run")), nproc=nproc)
        check_semaphores(run.num_ranks)
        tell_phase("reading the text")
        prepare_sources(run.source)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
        tell_phase("starting ranks")
        load_step_code(strategy.kind for strategy in run.strategies)
        result = Path(directory, "losses.json")
        number = launch(
            partial(_sweep_in_rank, run=run, rates=sweep.rates(), result=result),
            num_ranks=run.num_ranks,
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout_s=config.train.timeout_s,
        )
        tell_phase()
        if number:
            raise StoppedEarly("asked to stop", exit_code=128 + number)
        losses = json.loads(result.read_text("utf-8"))
    return judged(format_parallel(run.strategies), sweep.rates(), losses)


def _only_steps(config: RunConfig, *, sweep: Sweep, out: Path) -> RunConfig:
    """The run without all that lasts: checkpoints, evaluations, loggers, restarts."""
    plain: dict[str, Any] = {"checkpoint_dir": None, "checkpoint_every": 0, "elastic": None, "max_restarts": 0}
    plain |= {"loggers": (), "callbacks": (), "eval": (), "patience": 0, "spike_factor": 0.0, "on_nonfinite": "stop"}
    train = config.train.model_copy(update={**plain, "out": str(out), "steps": sweep.steps, "keep": 1})
    return config.model_copy(update={"train": train})


def _sweep_in_rank(board: StatusBoard, *, run: CheckedRun, rates: Sequence[float], result: Path) -> bool:
    """One rank's part; the first one writes the losses, one for each rate up to where they break off."""
    config = run.config
    board.doing(RankPhase.BUILDING)
    state = build(run)
    model, optimizer = state.model, state.optimizer
    assert optimizer is not None, "build makes one"
    board.name_units(model.write_status_to(board.position, blocks=not config.train.compile))
    if config.train.compile:
        board.will_compile()
    windows, _, _ = open_windows(run.source, seed=config.train.seed)
    if config.data.kind == "preferences":
        prepare_reference(model, run, train=windows, measured=(), take_first_values=lambda: None)
    peak = PeakMeter(model.device, uncounted_bytes=model.sharded.uncounted_bytes)
    losses: list[float] = []
    for step, lr in enumerate(rates, start=1):
        board.doing(RankPhase.READING, step=step)
        if state.rank == 0:
            tell_phase(f"step {step} of {len(rates)}, learning rate {lr:.1e}")
        found = train_step(
            model,
            optimizer,
            batches=read_batches(windows, model, step=step, sizes=run.sizes),
            lr=lr,
            clip_norm=config.optimizer.clip_norm,
            highest_loss=math.inf,
            peak=peak,
            board=board,
        )
        if found.stop:
            return False
        if not found.updated:
            break
        losses.append(found.loss)
        if has_risen(losses):  # the same on all ranks: the loss is
            break
    board.doing(RankPhase.REPORTING)
    if state.rank == 0:
        result.write_text(json.dumps(losses), "utf-8")
    model.close()
    return True


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential means of the losses up to each, corrected for their start."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        found.append(mean / (1 - _SMOOTHING**number))
    return found


def has_risen(losses: Sequence[float]) -> bool:
    """True if the smoothed loss is so far above its minimum that a sweep may end."""
    means = smoothed(losses)
    return len(means) >= _FEWEST_STEPS and means[-1] > _RISEN * min(means)


def judged(layout: str, rates: Sequence[float], losses: Sequence[float]) -> FoundRate:
    """Chooses the rate (see [Note: the suggested rate]).

    Args:
        layout: the layout that the sweep ran under.
        rates: all rates of the sweep.
        losses: one for each rate that came to an update, in their order.

    Raises:
        RankFailure: too few of them were finite.
    """
    if len(losses) < _FEWEST_STEPS:
        raise RankFailure(
            f"lr-find: the loss was finite in {len(losses)} steps only, up to a learning rate of "
            f"{rates[max(0, len(losses) - 1)]:.2e}. Write a smaller --lowest"
        )
    tried, means = list(rates[: len(losses)]), smoothed(losses)
    lowest = min(range(len(means)), key=means.__getitem__)
    slopes = {
        number: (means[number + 1] - means[number - 1]) / math.log(tried[number + 1] / tried[number - 1])
        for number in range(1, min(lowest, len(means) - 1))
    }
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    falls = steepest is not None and slopes[steepest] < 0
    has_ended = len(losses) == len(rates) and not has_risen(losses)
    return FoundRate(
        layout=layout,
        rates=tried,
        losses=list(losses),
        smoothed=means,
        suggested=tried[steepest] if steepest is not None and falls else None,
        lowest_loss_at=tried[lowest],
        diverged_at=None if has_ended else rates[min(len(losses), len(rates) - 1)],
    )


def drawn(found: FoundRate) -> str:
    """An SVG of losses over learning rates, single and smoothed, with the suggestion."""
    width, height, left, bottom, top = 720, 400, 64, 44, 34
    first, last = math.log10(found.rates[0]), math.log10(found.rates[-1])
    low, high = min(found.losses), max(found.losses)
    span = (high - low) or 1.0

    def x(rate: float) -> float:
        return left + (math.log10(rate) - first) / (last - first) * (width - left - 16)

    def y(loss: float) -> float:
        return top + (high - loss) / span * (height - top - bottom)

    def line(values: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(rate):.1f},{y(value):.1f}" for rate, value in zip(found.rates, values, strict=True))
        return f'<polyline points="{points}" fill="none" {style}/>'

    parts = [line(found.losses, 'stroke="#bbb"'), line(found.smoothed, 'stroke="#1764ab" stroke-width="2"')]
    for power in range(math.ceil(first), math.floor(last) + 1):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {top}V{height - bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - bottom + 16}" text-anchor="middle">1e{power}</text>')
    for loss in (low, low + span / 2, high):
        parts.append(f'<text x="{left - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.3g}</text>')
    if found.suggested is not None:
        at = x(found.suggested)
        parts.append(f'<path d="M{at:.1f} {top}V{height - bottom}" stroke="#c33" stroke-dasharray="4"/>')
        parts.append(f'<text x="{at + 5:.1f}" y="{top + 12}" fill="#c33">{found.suggested:.2g}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">learning rate ({found.layout})</text>')
    parts.append(f'<text x="{left}" y="18">loss, nats per token (grey: single steps)</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )

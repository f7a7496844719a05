"""Metrics of a run: `metrics.jsonl`, one object a step, and TensorBoard files. Rank 0 only.

A resumed run continues the same files: lines of steps behind the one that it resumes from are dropped first.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from rotorch.core.errors import ConfigError, FinalFailure, RankFailure
from rotorch.train.launch.run_lock import DirectoryInUse, lock_again, release

_LOG = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Rewards:
    """Rewards of preference pairs; a response's is `beta` times its log-probability over that of the reference.

    Attributes:
        margin: reward of the chosen response above that of the rejected one, mean over pairs.
        accuracy: share of pairs whose margin is above 0.
    """

    margin: float
    accuracy: float


@dataclass(frozen=True)
class HeldOut:
    """Quality of predictions on held-out text.

    Attributes:
        bits_per_byte: of the text, whatever its tokens are; None of preference pairs.
        loss: mean per target token, in nats; of preference pairs per pair.
        num_bytes: of text that was predicted.
        rewards: of preference pairs.
    """

    bits_per_byte: float | None
    loss: float
    num_bytes: int
    rewards: Rewards | None = None

    def __str__(self) -> str:
        """A few words for people."""
        if self.rewards is None:
            return f"{self.bits_per_byte:.4f} bits per byte"
        return f"loss {self.loss:.4f}, {_words(self.rewards)}"

    def numbers(self) -> dict[str, float]:
        """Its numbers by the names that metrics have for them."""
        if self.rewards is None:
            assert self.bits_per_byte is not None
            return {"bits_per_byte": self.bits_per_byte, "loss": self.loss}
        return {"loss": self.loss, **_of_rewards(self.rewards)}


@dataclass(frozen=True)
class StepRecord:
    """One step, as it is written and shown.

    Attributes:
        step: counted from 1: the number of optimizer steps done.
        loss: per target token over the global batch, in nats.
        tokens: target tokens trained on since the run began.
        tokens_per_s: of this step, over all ranks.
        grad_norm: global, before clipping.
        lr: learning rate of this step.
        peak_bytes: the most memory that any rank took so far.
        step_s: seconds of the step.
        held_out: result of the evaluation after this step, if there was one.
        skipped: True if the weights were left as they were.
        rewards: of the step's preference pairs, before the update; None of text.
        evals: results on the texts of `train.eval` after this step, by name.
        memory: bytes of every rank by category, by rank, after some of the steps; "peak" is each rank's highest memory.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    grad_norm: float
    lr: float
    peak_bytes: int
    step_s: float
    held_out: HeldOut | None = None
    skipped: bool = False
    evals: Mapping[str, HeldOut] = field(default_factory=dict)
    memory: Mapping[str, Sequence[int]] | None = None
    rewards: Rewards | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of `metrics.jsonl`; numbers that are not finite, which JSON does not have, are null."""
        fields = asdict(self)
        del fields["memory"], fields["rewards"]  # the memory is an event
        if self.rewards is not None:
            fields |= _of_rewards(self.rewards)
        if not self.skipped:
            del fields["skipped"]
        del fields["held_out"], fields["evals"]
        for name, found in self.evals.items():
            fields |= {f"eval_{name}_{key}": value for key, value in found.numbers().items()}
        if self.held_out is not None:
            fields |= {f"held_out_{key}": value for key, value in self.held_out.numbers().items()}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def _of_rewards(rewards: Rewards) -> dict[str, float]:
    return {f"reward_{key}": value for key, value in asdict(rewards).items()}


def _words(rewards: Rewards) -> str:
    return f"reward margin {rewards.margin:.4f}, {rewards.accuracy:.1%} of pairs right"


class Listener(Protocol):
    """Something that is told of every step, on rank 0."""

    def on_step(self, record: StepRecord) -> None:
        """Called after every step."""

    def on_rolled_back(self, step: int) -> None:
        """Called when the run has gone back to the end of `step`; later steps come again."""

    def on_note(self, text: str) -> None:
        """Called with a line for the user: a checkpoint was written, the run was asked to stop."""

    def close(self) -> None:
        """Called once, also after an exception."""


class MetricsFile:
    """`metrics.jsonl`: every line is on disk, whole, when `on_step` returns.

    Where somebody has removed it, or the whole directory, it is made again with all that it held, which the open file
    still has: the run is worth more than its directory's place.
    """

    def __init__(self, run_dir: Path, *, after_step: int, beside: Mapping[str, str] | None = None) -> None:
        """Opens the file and drops what was written after step `after_step`.

        Args:
            run_dir: directory of the run.
            after_step: the last step that stays.
            beside: other files that the run has written there, by name, to be made again with it.

        Raises:
            ConfigError: a line of it is none that a run has written.
        """
        self.path = run_dir / METRICS
        self._beside = dict(beside or {})
        self._locks: list[int] = []
        self._stream = self._without_steps_after(after_step)

    def _without_steps_after(self, step: int) -> TextIO:
        kept = [line for line, record in _records(self.path) if record["step"] <= step]
        temporary = self.path.with_suffix(".partial")
        temporary.write_text("".join(kept), "utf-8")
        os.replace(temporary, self.path)
        return self.path.open("a+", encoding="utf-8")

    def _put_back(self) -> None:
        """Restores a file that was removed or replaced: writes all of it again, or goes on in the other one.

        Raises:
            FinalFailure: the directory is another run's now.
        """
        try:
            is_other = not os.path.samestat(self.path.stat(), os.fstat(self._stream.fileno()))
        except FileNotFoundError:
            is_other = False
        else:
            if not is_other:
                return
        try:
            lock = lock_again(self.path.parent)
        except DirectoryInUse as error:
            raise FinalFailure(f"somebody has removed this run's directory while it ran. {error}") from None
        if lock is not None:
            self._locks.append(lock)
            if is_other:
                raise FinalFailure(
                    f"{self.path}: written by another run after somebody had removed this run's directory. Nothing was "
                    "written into it; this run's metrics and checkpoints are gone"
                )
        before, self._stream = self._stream, self.path.open("a+", encoding="utf-8")
        with before:
            before.seek(0)
            text = "" if is_other else before.read()
            self._stream.write(text)
        for name, content in self._beside.items():
            if not (self.path.parent / name).exists():
                (self.path.parent / name).write_text(content, "utf-8")
        _LOG.warning(
            "%s: somebody has %s it while the run was writing there; %s",
            self.path,
            "replaced" if is_other else "removed",
            "it goes on in the new file"
            if is_other
            else "it is written again, but checkpoints that were removed are gone until the next one",
        )

    def on_step(self, record: StepRecord) -> None:
        try:
            self._put_back()
            self._stream.write(json.dumps(record.to_json()) + "\n")
            self._stream.flush()
        except OSError as error:  # which does not say which file it is
            raise RankFailure(f"{self.path}: {error.strerror}. Earlier checkpoints are untouched") from error

    def on_rolled_back(self, step: int) -> None:
        self._stream.close()
        self._stream = self._without_steps_after(step)

    def on_note(self, text: str) -> None:
        return None

    def close(self) -> None:
        with suppress(OSError):  # what could not be written then cannot be now
            self._stream.close()
        for lock in self._locks:
            release(lock, directory=self.path.parent)


class TensorBoard:
    """TensorBoard files in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it takes a while, and a run may do without

        self._open = partial(SummaryWriter, str(run_dir / "tensorboard"))
        self._writer = self._open(purge_step=after_step + 1 if after_step else None)

    def on_step(self, record: StepRecord) -> None:
        fields = record.to_json()
        step = fields.pop("step")
        for name, value in fields.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def on_rolled_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)

    def on_note(self, text: str) -> None:
        return None

    def close(self) -> None:
        self._writer.close()


def set_aside(run_dir: Path) -> Path | None:
    """Gives the metrics of an earlier run another name in its directory, and returns it; None if there are none."""
    path = run_dir / METRICS
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    path.rename(kept)
    return kept


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads `metrics.jsonl` of a run; a last line that was cut off is left out.

    Raises:
        ConfigError: another line is none that a run has written.
    """
    return [record for _, record in _records(run_dir / METRICS)]


def _records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of the file, and what each says."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}. Move it away to go on without it") from None
    if lines and not lines[-1].endswith(b"}\n"):
        del lines[-1]  # cut off
    records = [_record(line, where=f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    return [(line.decode(), record) for line, record in zip(lines, records, strict=True)]


def _record(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ConfigError(f"{where}: no step of a run. Repair the line, or move the file away to go on without it")
    return record

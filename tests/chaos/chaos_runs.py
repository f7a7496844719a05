"""Runs a plan of chaos and looks at all that must hold whatever happened.

A run ends continued, with the losses of an undisturbed run, or stopped, with the right message and exit code; and one
that stopped goes on from its last checkpoint when it is told to. Nothing hangs, no checkpoint is damaged, no process
and no file is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from chaos_faults import TOLD, Fault
from chaos_plan import EVERY, STEPS, Harm, Plan, num_ranks
from commands import CONFIG, Command, wait_until, write_run

from rotorch.core.errors import ConfigError
from rotorch.train.checkpoint.directories import check, checkpoints_of, latest, leftovers
from rotorch.train.checks.preflight import holds_run
from rotorch.train.metrics import METRICS, read_metrics

_CLOSE = 1e-5
_DEADLINE_S = 240.0
_TIMEOUT_S = 60
_SOON_S = 8
"""`train.timeout_s` of a run in which a rank is stopped: the others must not be this slow by themselves."""
_DISK_BYTES = 3 << 20


@dataclass(frozen=True)
class Outcome:
    """End of a run.

    Attributes:
        seed: of its plan.
        struck: whether it happened: a run may be over before.
        ended: "continued" or "stopped", and how it then went on.
        said: the last line on the screen, if it stopped or went on by itself.
        wrong: what should not be; empty if all is well.
        seconds: how long it took.
    """

    seed: int
    struck: bool
    ended: str
    said: str
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _settings(plan: Plan) -> list[str]:
    settings = [f"--parallel={plan.layout}", f"train.steps={STEPS}", f"train.checkpoint_every={EVERY}"]
    settings += [f"train.timeout_s={_SOON_S if plan.harm is Harm.STOP else _TIMEOUT_S}"]
    if plan.layout.startswith(("pp", "zeropp")):
        settings += ["train.accumulation=2", "model.config.num_hidden_layers=4"]
    return settings


def write_chaos_run(directory: Path) -> Path:
    """A run of a tiny Llama in `directory`, whose results go to `directory/disk/run`."""
    directory.mkdir(parents=True)
    toml = write_run(directory)
    toml.write_text(CONFIG.replace('out = "run"', 'out = "disk/run"'))
    (directory / "disk").mkdir()
    return toml


def reference(plan: Plan, *, at: Path) -> list[dict[str, float]]:
    """Losses of an undisturbed run under the plan's layout; made once, and kept in `at`."""
    file = at / f"reference-{re.sub('[^a-z0-9]+', '-', plan.layout)}.json"
    if not file.exists():
        directory = at / file.stem
        shutil.rmtree(directory, ignore_errors=True)
        toml = write_chaos_run(directory)
        command = Command(directory / "log", "train", toml, *_settings(plan))
        if command.wait(deadline_s=_DEADLINE_S) != 0:
            raise AssertionError(f"an undisturbed run fails: {command.stderr}")
        file.write_text(json.dumps(_losses(directory / "disk" / "run")))
    return json.loads(file.read_text())


def run_plan(plan: Plan, *, at: Path, mounts: bool) -> Outcome:
    """Runs a plan in a new directory in `at`, and removes that if all is well.

    Args:
        plan: what happens.
        at: a directory for everything.
        mounts: give the run a disk of its own for its results, where that is allowed; else the limit of a process on
            the size of files stands for a full disk.
    """
    expected, start_s = reference(plan, at=at), time.monotonic()
    directory = at / f"seed-{plan.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    toml = write_chaos_run(directory)
    with (
        _disk(directory / "disk", wanted=mounts and plan.harm is Harm.DISK) as own_disk,
        _own_places() as places,
    ):
        attempt = Attempt(
            plan, toml, fault=Fault(plan, run=toml.parent / "disk" / "run", scratch=directory, own_disk=own_disk)
        )
        try:
            attempt.run()
        except AssertionError as error:
            attempt.wrong.append(f"HANGS: {str(error).splitlines()[0]}")
        attempt.check_losses(expected)
        left = [p for p in places.rglob("*") if p.parent != places]
        if plan.harm is Harm.LAUNCHER:  # a few bytes, with which its ranks found each other
            left = [p for p in left if places / "temporary" not in p.parents]
        attempt.wrong += [f"left behind: {p.relative_to(places.parent)}" for p in left]
    outcome = Outcome(
        plan.seed,
        attempt.fault.has_struck,
        attempt.ended,
        attempt.said,
        attempt.wrong,
        seconds=round(time.monotonic() - start_s, 1),
    )
    if not outcome.wrong:
        shutil.rmtree(directory)
    return outcome


class Attempt:
    """One run and, if it stopped, what goes on with it."""

    def __init__(self, plan: Plan, toml: Path, *, fault: Fault) -> None:
        self.plan, self.toml, self.fault = plan, toml, fault
        self.ended, self.said = "", ""
        self.wrong: list[str] = []

    def run(self) -> None:
        plan = self.plan
        settings = _settings(plan) + ([f"--max-restarts={plan.max_restarts}"] if plan.max_restarts else [])
        settings += ["train.async_save=true"] if plan.async_save else []
        settings += [f"--elastic=1:{num_ranks(plan.layout)}"] if plan.harm is Harm.FEWER else []
        with self.fault.armed():
            first = Command(self.toml.parent / "log", "train", self.toml, *settings)
        code = first.wait(deadline_s=_DEADLINE_S)
        self._check_left(first)
        self.judge(code, told=first.stderr.strip().splitlines())
        if code != 0:
            self._check_checkpoint()
            self._go_on(settings)

    def judge(self, code: int, *, told: Sequence[str]) -> None:
        """Says how the run ended that it happened to, and what of that should not be.

        Args:
            code: its exit code.
            told: its lines on stderr.
        """
        plan = self.plan
        if plan.harm is Harm.LAUNCHER and code != 0:  # nobody is left to say anything
            self.ended = "stopped"
            self.wrong += [] if code == -signal.SIGKILL else [f"exit code {code}"]
            self.wrong += [f"it says {told[-1]}"] if told else []
            return
        failures = [line for line in told if line.startswith("rotorch: ")]
        self.said = failures[-1] if failures else ""
        if any(line.startswith("Traceback") for line in told):
            self.wrong.append("a traceback on the screen")
        if failures and not any(_expected(plan, own_disk=self.fault.own_disk).search(line) for line in failures):
            self.wrong.append("another message than it should be")
        if code == 0:
            self.ended = "continued" if failures else "was not disturbed"
            if failures and not plan.max_restarts:
                self.wrong.append("it says that it failed and ends with 0")
            if self.fault.has_struck and not failures and not plan.unlinks and not plan.is_delayed:
                self.wrong.append("it happened, and nothing was said or done about it")
            if failures and plan.harm is Harm.FEWER and not _has_fewer(failures[-1], plan):
                self.wrong.append("it went on with as many ranks")
            return
        self.ended = "stopped"
        if code != 3:
            self.wrong.append(f"exit code {code}")
        if not failures:
            self.wrong.append("it stopped and says nothing")
        if plan.max_restarts and plan.harm is not Harm.DISK:
            self.wrong.append("it should have gone on by itself")

    def _go_on(self, settings: list[str]) -> None:
        """The user's next command."""
        self.fault.make_room()
        resume = ["--resume"] if holds_run(self.fault.run) else []
        second = Command(self.toml.parent / "log-resumed", "train", self.toml, *settings, *resume)
        code = second.wait(deadline_s=_DEADLINE_S)
        self._check_left(second)
        if code == 0:
            self.ended += ", went on when told to"
        else:
            self.wrong.append(f"it does not go on: exit code {code}: {second.stderr.strip().splitlines()[-1:]}")

    def _check_left(self, command: Command) -> None:
        try:
            wait_until(lambda: not command.left(), what="all processes gone", deadline_s=10.0)
        except AssertionError:
            self.wrong.append(f"left behind: processes {command.left()}")

    def _check_checkpoint(self) -> None:
        if self.plan.harm is not Harm.ROT:
            self._step_of_last()

    def _step_of_last(self) -> int | None:
        """The step of the last checkpoint; None if there is none, or it is damaged, which is noted."""
        newest = latest(self.fault.run)
        try:
            return None if newest is None else check(newest).step
        except Exception as error:  # whatever it is, it belongs into the table, and other runs are to come
            told = str(error) if isinstance(error, ConfigError) else repr(error)
            self.wrong.append(f"the last checkpoint is damaged: {told}")
            return None

    def check_losses(self, expected: list[dict[str, float]]) -> None:
        """The whole run, however often it was begun again, is that of nobody disturbed."""
        try:
            ours = _losses(self.fault.run)
        except Exception as error:  # as above
            told = str(error) if isinstance(error, ConfigError) else repr(error)
            self.wrong.append(f"{METRICS} cannot be read: {told}")
            ours = expected
        if [line["step"] for line in ours] != [line["step"] for line in expected]:
            self.wrong.append(f"its steps are {[line['step'] for line in ours]}")
        for line, right in zip(ours, expected, strict=False):
            for name, value in right.items():
                if not abs(line.get(name, float("nan")) - value) <= _CLOSE * abs(value):
                    self.wrong.append(f"step {right['step']}: {name} is {line.get(name)}, should be {value}")
                    return
        if self._step_of_last() != STEPS:
            self.wrong.append(f"its last checkpoint is {latest(self.fault.run)}")
        self.wrong += [f"left behind: {path.name}" for path in leftovers(checkpoints_of(self.fault.run))]


def _has_fewer(told: str, plan: Plan) -> bool:
    """True if a line says that the run goes on with fewer ranks than it was begun with."""
    found = re.search(r" with (\S+) \(restart ", told)
    return found is not None and num_ranks(found[1]) < num_ranks(plan.layout)


def _expected(plan: Plan, *, own_disk: bool) -> re.Pattern[str]:
    """Text that the line with the run's failure must contain."""
    victim = plan.victim
    match plan.harm:
        case Harm.KILL | Harm.KILL_IN_SAVE | Harm.ROT | Harm.FEWER:
            pattern = rf"rank {victim} was killed by SIGKILL"
        case Harm.STOP:
            pattern = rf"rank {victim} \(stopped by a signal\) has not got on for \d+ s"
        case Harm.DISK:
            pattern = "No space left on device|nothing was written" if own_disk else "File too large"
        case Harm.MEMORY:
            pattern = "was killed by SIGBUS"
        case Harm.SAVE:
            pattern = rf"rank {victim}: ValueError: {TOLD}"
        case _:
            pattern = rf"rank {victim} failed in step {plan.step}, .*ValueError: {TOLD}"
    return re.compile(pattern)


def _losses(run: Path) -> list[dict[str, float]]:
    names = ("step", "loss", "grad_norm", "held_out_loss")
    return [{name: line[name] for name in names if name in line} for line in read_metrics(run)]


@contextlib.contextmanager
def _own_places() -> Iterator[Path]:
    """Has commands that are forked in the block put shared memory and temporary files where nobody else does."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/dev/shm") as memory:
        places = Path(memory)
        for name in ("memory", "temporary"):
            (places / name).mkdir()
        with (
            mock.patch.dict(os.environ, ROTORCH_SHARED_MEMORY_DIR=str(places / "memory")),
            mock.patch.object(tempfile, "tempdir", str(places / "temporary")),
        ):
            yield places


@contextlib.contextmanager
def _disk(directory: Path, *, wanted: bool) -> Iterator[bool]:
    """Mounts a small file system in `directory` for the time of the block, if that is allowed; yields whether."""
    mounted = wanted and _mount(directory)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", directory], check=True)


def can_mount() -> bool:
    """True if this process may mount a file system."""
    with tempfile.TemporaryDirectory() as directory, _disk(Path(directory), wanted=True) as mounted:
        return mounted


def _mount(directory: Path) -> bool:
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "chaos", directory]
    return subprocess.run(command, capture_output=True).returncode == 0

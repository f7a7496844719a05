"""Does to a rank what a plan says, from inside of it: what a rank is doing is known there to the moment.

`armed` is put around the fork of a command: its ranks inherit it, and the one that is meant does it as often as the
plan says, however often ranks are started.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from chaos_plan import Harm, Plan
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rotorch.comm import shared_file
from rotorch.train.checkpoint import storage
from rotorch.train.checkpoint.directories import latest, one_before
from rotorch.train.launch import restart
from rotorch.train.launch.status import RankPhase, StatusBoard

TOLD = "a fault of this test"
"""What a rank says that raises."""
_PATIENCE_S = 30.0  # less than `train.timeout_s` of a run that nobody stops


class Fault:
    """Faults of a plan, made in one run.

    Args:
        plan: says what.
        run: the run's directory.
        scratch: for what ranks must know of each other.
        own_disk: whether `run` is on a file system of its own, which can be filled up.
    """

    def __init__(self, plan: Plan, *, run: Path, scratch: Path, own_disk: bool) -> None:
        self.plan = plan
        self.run = run
        self.own_disk = own_disk
        self._struck = scratch / "struck"
        self._ballast = run.parent / "ballast"

    @property
    def has_struck(self) -> bool:
        """True if it was done."""
        return self._struck.with_suffix(".0").exists()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """A command that is forked within the block has ranks to which it happens."""
        plan, doing, open_file, check_run = self.plan, StatusBoard.doing, shared_file._open, restart.check_run

        def doing_and_watched(board: StatusBoard, phase: RankPhase, *, step: int | None = None) -> None:
            doing(board, phase, step=step)
            is_it = phase.name == plan.phase and board.own_rank == plan.victim and not plan.unlinks
            if is_it and board.read(board.own_rank).step == plan.step and self._claim():
                self._strike()

        def open_what_is_gone(path: str, *args: Any, **kwargs: Any) -> Any:
            if int(os.environ.get("RANK", "0")) == plan.victim and self._claim():
                os.unlink(path)
            return open_file(path, *args, **kwargs)

        def check_run_with_room(*args: Any, **kwargs: Any) -> Any:
            self.make_room()
            return check_run(*args, **kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(StatusBoard, "doing", doing_and_watched))
            if plan.unlinks:
                stack.enter_context(mock.patch.object(shared_file, "_open", open_what_is_gone))
            if plan.freed:
                stack.enter_context(mock.patch.object(restart, "check_run", check_run_with_room))
            yield

    def make_room(self) -> None:
        """Takes away what fills the disk."""
        self._ballast.unlink(missing_ok=True)

    def _claim(self) -> bool:
        """True if it is due: it has not happened yet as often as it should."""
        for number in range(self.plan.times):
            with contextlib.suppress(FileExistsError):
                self._struck.with_suffix(f".{number}").touch(exist_ok=False)
                return True
        return False

    # ---------------------------------------------------------------- in the rank that is meant

    def _strike(self) -> None:
        plan = self.plan
        match plan.harm:
            case Harm.KILL | Harm.KILL_IN_SAVE | Harm.FEWER:
                self._later(lambda: os.kill(os.getpid(), signal.SIGKILL))
            case Harm.LAUNCHER:
                launcher = os.getppid()
                self._later(lambda: os.kill(launcher, signal.SIGKILL))
            case Harm.STOP:
                self._later(lambda: os.kill(os.getpid(), signal.SIGSTOP))
            case Harm.ROT:
                _flip(self.run, where=plan.where)
                self._later(lambda: os.kill(os.getpid(), signal.SIGKILL))
            case Harm.MEMORY:
                self._later(_cut_shared_memory)
            case Harm.DISK if plan.after % 2 == 0:
                self._fill_disk()
            case Harm.DISK:
                write = storage.write_safetensors

                def write_where_it_fills(*args: Any) -> Any:
                    self._fill_disk()
                    return write(*args)

                storage.write_safetensors = write_where_it_fills
            case Harm.SAVE:
                storage.write_safetensors = _raise
            case Harm.OPTIMIZER:
                (register_optimizer_step_post_hook if plan.after % 2 else register_optimizer_step_pre_hook)(_raise)
            case Harm.FORWARD:
                turns = itertools.count()
                register_module_forward_pre_hook(lambda *_: _raise() if next(turns) == plan.after else None)
            case Harm.BACKWARD:
                _raise_in_backward(plan.after)

    def _later(self, action: Callable[[], None]) -> None:
        if self.plan.is_delayed:
            timer = threading.Timer(self.plan.delay_s, action)
            timer.daemon = True
            timer.start()
        else:
            action()

    def _fill_disk(self) -> None:
        if not self.own_disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + int(self.plan.where * 60_000), resource.RLIM_INFINITY))
            return
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with contextlib.suppress(OSError):
            os.truncate(self._ballast, max(0, self._ballast.stat().st_size - int(self.plan.where * 200_000)))


def _raise(*_: Any, **__: Any) -> None:
    raise ValueError(TOLD)


def _raise_in_backward(after: int) -> None:
    turns = itertools.count()
    done: list[bool] = []

    def watch(_: Any, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.requires_grad and next(turns) >= after and not done:
            done.append(True)
            first.register_hook(_raise)

    register_module_forward_hook(watch)


def _cut_shared_memory() -> None:
    """Cuts the file that the ranks map, as its file system may: whoever touches it then gets SIGBUS."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(descriptor)
            if "rotorch-" in target and target.endswith(" (deleted)") and os.stat(descriptor).st_size:
                os.truncate(descriptor, 0)


def _await_one_before(run: Path) -> None:
    """Waits for a checkpoint to fall back on: one that is written behind the run may be late on a busy machine."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (newest := latest(run)) is None or one_before(newest) is None:
        if time.monotonic() > deadline_s:
            raise AssertionError("the plan waits for two checkpoints")
        time.sleep(0.05)


def _flip(run: Path, *, where: float) -> None:
    """Changes a byte of the last checkpoint."""
    _await_one_before(run)
    newest = latest(run)
    assert newest is not None
    files = sorted(newest.iterdir())
    file = files[int(where * len(files))]
    with file.open("r+b") as stream:
        size = file.stat().st_size
        position = int(where * len(files) % 1 * size)
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 0x10]))

"""Starts ranks on this machine through torch's elastic launcher and says what happened to them.

[Note: how a run ends]
    A rank dies, by a signal or an exception: `_Watch`, a thread of the launcher, sees it within 0.1 s, gives the others a second
        to note what they saw, and kills them. `RankFailure` names the rank that failed first and what it was doing.
    The launcher dies: the kernel kills the ranks (PR_SET_PDEATHSIG), whatever they are waiting for.
    Ctrl-C, or SIGTERM, to the launcher or to all: the launcher raises a flag on the status board, and the ranks, which ignore both
        signals, agree on the step after which they write a checkpoint and leave. A second Ctrl-C kills them at once.
    Under torchrun, Slurm and the like each rank raises the flag for itself, and what agrees is the ranks' reduction.

[Note: fork]
    Ranks are forked: torch and transformers are imported once, and a rank starts in a fraction of a second. So the launcher must not
    have run anything in threads: it keeps torch to one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotorch.core.errors import ConfigError, RankFailure, RotorchError
from rotorch.train.status import FailureKind, Phase, RankStatus, StatusBoard

Work = Callable[[StatusBoard], None]
"""What a rank does, given the board on which it notes what it is doing."""

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.1
_GRACE_S = 1.0
"""How long ranks that outlive a failed one may take to note what they saw."""


def is_rank() -> bool:
    """Whether torchrun, Slurm or an operator started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(work: Work, *, num_ranks: int, traceback_dir: Path | None = None) -> None:
    """Runs `work` in `num_ranks` ranks of this machine and returns when all are done.

    Args:
        work: runs in every rank, with torchrun's environment variables set.
        num_ranks: how many ranks.
        traceback_dir: where a rank that ends with an unexpected exception leaves its traceback, if the directory exists.

    Raises:
        RankFailure: if a rank failed; the message names it, the signal or exception, and what it was doing.
        ConfigError: if a rank found the input to be wrong.
        KeyboardInterrupt: after a second Ctrl-C.
    """
    board = StatusBoard(num_ranks)
    rank_main = _rank_main(work, board=board, launcher_pid=os.getpid(), traceback_dir=traceback_dir)
    with _quiet_elastic(), tempfile.TemporaryDirectory(prefix="rotorch-") as logs, _Watch(board) as watch, _forward_stop(watch):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"rotorch-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=2 * _WATCH_EVERY_S,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        try:
            elastic_launch(config, rank_main)()
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                watch.deaths.setdefault(rank, _exit_status(failure.exitcode))
            if watch.aborted:
                raise KeyboardInterrupt from None
            raise _explain(board.all(), deaths=watch.deaths) from None
        except SignalException as error:
            raise RankFailure(f"the launcher was ended by {error.sigval.name}") from None


def run_as_rank(work: Work, *, traceback_dir: Path | None = None) -> None:
    """Runs `work` in this process, which torchrun or the like started as a rank.

    Raises:
        RankFailure: if it raised; the message names this rank and what it was doing.
        ConfigError: if it found the input to be wrong.
    """
    rank = int(os.environ["RANK"])
    board = StatusBoard(1)
    board.enter(0, pid=os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun passes a Ctrl-C on to ranks that the terminal told already
        signal.signal(number, lambda *_: board.request_stop())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with(os.getppid())
    _use_threads()
    try:
        work(board)
    except ConfigError:
        raise
    except Exception as error:
        _leave_traceback(traceback_dir, rank=rank)
        raise RankFailure(f"rank {rank} failed {board.read(0)}: {_one_line(error)}") from None


# ---------------------------------------------------------------- inside a rank


def _rank_main(work: Work, *, board: StatusBoard, launcher_pid: int, traceback_dir: Path | None) -> Callable[[], None]:
    def rank_main() -> None:
        rank = int(os.environ["RANK"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _die_with(launcher_pid)
        board.enter(rank, pid=os.getpid())
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host name may not resolve
        _use_threads()
        try:
            work(board)
        except BaseException as error:
            kind = FailureKind.INPUT if isinstance(error, ConfigError) else FailureKind.OWN
            board.fail(_one_line(error), kind=kind)
            if not isinstance(error, RotorchError):
                _leave_traceback(traceback_dir, rank=rank)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # at once: to take down a process group whose other ranks are waiting can take minutes
        board.doing(Phase.DONE)
        sys.stdout.flush()

    return rank_main


def _die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def _use_threads() -> None:
    """One share of this machine's cores per rank, unless OMP_NUM_THREADS says otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdigit() and int(asked) > 0 else share)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RotorchError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _leave_traceback(directory: Path | None, *, rank: int) -> None:
    if directory is not None and directory.is_dir():
        with contextlib.suppress(OSError):
            (directory / f"traceback-rank{rank}.txt").write_text(traceback.format_exc())


# ---------------------------------------------------------------- inside the launcher


@dataclass(frozen=True)
class Death:
    """How a rank's process ended: by signal `signal_number`, or with `exit_code`."""

    exit_code: int = 0
    signal_number: int = 0

    def __str__(self) -> str:
        if not self.signal_number:
            return f"ended with exit code {self.exit_code}"
        try:
            name = signal.Signals(self.signal_number).name
        except ValueError:
            name = f"signal {self.signal_number}"
        why = " (the system does that when memory runs out)" if self.signal_number == signal.SIGKILL else ""
        return f"was killed by {name}{why}"


def _exit_status(exit_code: int) -> Death:
    return Death(signal_number=-exit_code) if exit_code < 0 else Death(exit_code=exit_code)


class _Watch:
    """A thread that notices dead ranks, and kills the others when one failed. See [Note: how a run ends].

    Attributes:
        deaths: how ranks ended before any of them was killed from here.
        aborted: whether a second Ctrl-C ended the run.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.board = board
        self.deaths: dict[int, Death] = {}
        self.aborted = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rotorch-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def abort(self) -> None:
        """Kills all ranks."""
        self.aborted = True
        self._kill()

    def _run(self) -> None:
        while not self._over.wait(_WATCH_EVERY_S):
            if self._look():
                end = time.monotonic() + _GRACE_S
                while time.monotonic() < end and len(self.deaths) < self.board.num_ranks:
                    time.sleep(_WATCH_EVERY_S / 4)
                    self._look()
                self._kill()
                return

    def _look(self) -> bool:
        """Notes which ranks ended; returns whether one of them failed."""
        for status in self.board.all():
            death = _death(status.pid) if status.pid and status.rank not in self.deaths else None
            if death is not None and (death != Death() or status.phase is not Phase.DONE):
                self.deaths[status.rank] = death
        return bool(self.deaths)

    def _kill(self) -> None:
        for status in self.board.all():
            if status.pid and status.rank not in self.deaths:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, signal.SIGKILL)


def _death(pid: int) -> Death | None:
    """How a child ended, None while it lives. Leaves it for the elastic launcher to reap."""
    if not hasattr(os, "waitid"):
        return None  # then the elastic launcher's own notice, which takes longer, has to do
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # reaped meanwhile; the elastic launcher tells
    if ended is None:
        return None
    return Death(exit_code=ended.si_status) if ended.si_code == os.CLD_EXITED else Death(signal_number=ended.si_status)


@contextlib.contextmanager
def _forward_stop(watch: _Watch) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into the stop flag, a second Ctrl-C into an end at once."""
    own_pid = os.getpid()

    def on_signal(number: int, _: FrameType | None) -> None:
        again = watch.board.stop_requested and number == signal.SIGINT
        watch.board.request_stop()
        if again and os.getpid() == own_pid:  # a rank runs this too, in the moment between its fork and its first line
            watch.abort()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keeps the elastic launcher's tables and tracebacks from the user: `_explain` says it in a line."""
    silenced = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.launcher")]
    nothing = logging.NullHandler()
    before = [logger.propagate for logger in silenced]
    for logger in silenced:
        logger.addHandler(nothing)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(silenced, before, strict=True):
            logger.removeHandler(nothing)
            logger.propagate = propagate


def _explain(statuses: list[RankStatus], *, deaths: dict[int, Death]) -> RotorchError:
    """Says which rank failed first. A rank that just vanished comes before those that then missed it, else the earliest exception."""
    vanished = [s for s in statuses if s.rank in deaths and s.failure is FailureKind.NONE]
    raised = sorted((s for s in statuses if s.failure is not FailureKind.NONE), key=lambda s: s.failed_at_s)
    wrong_input = next((s for s in raised if s.failure is FailureKind.INPUT), None)
    if wrong_input is not None and not vanished:
        return ConfigError(wrong_input.message)
    if vanished:
        first = vanished[0]
        what = f"rank {first.rank} {deaths[first.rank]} {first}"
    elif raised:
        first = raised[0]
        what = f"rank {first.rank} failed {first}: {first.message}"
    else:
        return RankFailure("a rank failed, and none of them says why")
    others = "; ".join(f"rank {s.rank} was {s}" for s in statuses if s.rank != first.rank)
    return RankFailure(what + (f" ({others})" if others else ""))

"""Starts ranks on this machine through torch's elastic launcher and says what happened to them.

[Note: how a run ends]
    - A rank dies, by a signal or an exception: `_Watch`, threads of the launcher, notices at once, gives the others a
      second to note what they saw, and kills them. `RankFailure` names the rank that failed first and what it did.
    - The launcher dies: the kernel kills the ranks (PR_SET_PDEATHSIG), whatever they are waiting for.
    - Ctrl-C, or SIGTERM, to the launcher or to all: the launcher raises a flag on the status board, and the ranks,
      which ignore both signals, agree on the step after which they save and leave. A second Ctrl-C kills them.
    - Under torchrun, Slurm and the like each rank raises the flag for itself, and the ranks agree all the same.

[Note: fork]
    Ranks are forked: torch and transformers are imported once, and a rank starts in a fraction of a second. A lock that
    another thread holds at that moment stays locked in the rank for ever, so the launcher keeps torch to one thread and
    serves no TCP store (its thread looks up host names): ranks find each other through a file.
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
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rotorch.comm.transports.shared_memory import shared_memory_directory
from rotorch.core.errors import ConfigError, RankFailure, RotorchError
from rotorch.train.status import FailureKind, Phase, RankStatus, StatusBoard

Work = Callable[[StatusBoard], None]
"""What a rank does, given the board on which it notes what it is doing."""

SHARED_MEMORY_VARIABLE = "ROTORCH_SHARED_MEMORY_DIR"

_PR_SET_PDEATHSIG = 1
_MONITOR_EVERY_S = 0.2
_LOOK_EVERY_S = 0.02
_GRACE_S = 1.0
"""How long ranks that outlive a failed one may take to note what they saw."""


def is_rank() -> bool:
    """Whether torchrun, Slurm or an operator started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    work: Work, *, num_ranks: int, backend: str = "gloo", timeout_s: float = 600.0, traceback_dir: Path | None = None
) -> None:
    """Runs `work` in `num_ranks` ranks of this machine and returns when all are done.

    Args:
        work: runs in every rank, with torchrun's environment variables set and the process group joined.
        num_ranks: how many ranks.
        backend: of the process group.
        timeout_s: a rank that waits longer for another one fails.
        traceback_dir: where a rank that ends with an unexpected exception leaves its traceback, if the directory
            exists.

    Raises:
        RankFailure: if a rank failed; the message names it, the signal or exception, and what it was doing.
        ConfigError: if a rank found the input to be wrong.
        KeyboardInterrupt: after a second Ctrl-C.
    """
    board = StatusBoard(num_ranks)
    torch.set_num_threads(1)
    with (
        _quiet_elastic(),
        tempfile.TemporaryDirectory(prefix="rotorch-") as directory,
        _own_shared_memory(),
        _Watch(board) as watch,
        _forward_stop(watch),
    ):
        group = _Group(file=f"{directory}/ranks", num_ranks=num_ranks, backend=backend, timeout_s=timeout_s)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"rotorch-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{directory}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=_MONITOR_EVERY_S,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see [Note: fork]
        try:
            elastic_launch(config, _rank_main)(work, board, group, os.getpid(), traceback_dir)
        except ChildFailedError as error:
            if watch.aborted:
                raise KeyboardInterrupt from None
            for rank, failure in error.failures.items():
                if watch.deaths.get(rank, Death()) == Death():
                    watch.deaths[rank] = _exit_status(failure.exitcode)
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
    # A second signal means no more than the first: torchrun passes on a Ctrl-C that the terminal sent to all.
    signal.signal(signal.SIGINT, lambda *_: board.request_stop())
    signal.signal(signal.SIGTERM, lambda *_: board.request_stop())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with(os.getppid())
    _use_threads()
    try:
        work(board)
        if dist.is_initialized():
            dist.destroy_process_group()
    except ConfigError:
        raise
    except Exception as error:
        _leave_traceback(traceback_dir, rank=rank)
        raise RankFailure(f"rank {rank} failed {board.read(0)}: {_one_line(error)}") from None


# ---------------------------------------------------------------- inside a rank


@dataclass(frozen=True)
class _Group:
    """How forked ranks find each other: through `file`."""

    file: str
    num_ranks: int
    backend: str
    timeout_s: float

    def join(self, rank: int) -> None:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host name may not resolve
        dist.init_process_group(
            self.backend,
            store=dist.FileStore(self.file, self.num_ranks),
            rank=rank,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=self.timeout_s),
        )


def _rank_main(work: Work, board: StatusBoard, group: _Group, launcher_pid: int, traceback_dir: Path | None) -> None:
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(launcher_pid)
    board.enter(rank, pid=os.getpid())
    _use_threads()
    try:
        board.doing(Phase.JOINING)
        group.join(rank)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until here it ends ranks that wait for one that never came
        work(board)
        dist.destroy_process_group()
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
        if self == Death():
            return "vanished"
        if not self.signal_number:
            return f"ended with exit code {self.exit_code}"
        try:
            name = signal.Signals(self.signal_number).name
        except ValueError:
            name = f"signal {self.signal_number}"
        why = " (the system does that when memory runs out)" if self.signal_number == signal.SIGKILL else ""
        return f"was killed by {name}{why}"


_SIGTERM = Death(signal_number=signal.SIGTERM)


def _exit_status(exit_code: int) -> Death:
    return Death(signal_number=-exit_code) if exit_code < 0 else Death(exit_code=exit_code)


class _Watch:
    """A thread per rank that notices how it ends; the first that sees a failure kills the other ranks.

    See [Note: how a run ends].

    Attributes:
        deaths: how ranks ended that failed before any was killed from here, in the order in which that was noticed.
        aborted: whether a second Ctrl-C ended the run.
    """

    def __init__(self, board: StatusBoard) -> None:
        self.board = board
        self.deaths: dict[int, Death] = {}
        self.aborted = False
        self._ended: set[int] = set()
        self._killed = False
        self._killing = threading.Lock()
        self._over = threading.Event()
        ranks = range(board.num_ranks)
        self._threads = [threading.Thread(target=self._follow, args=(rank,), daemon=True) for rank in ranks]

    def __enter__(self) -> _Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def kill(self) -> None:
        """Kills all ranks that are alive."""
        self._killed = True
        for status in self.board.all():
            if status.pid and status.rank not in self._ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, signal.SIGKILL)

    def _follow(self, rank: int) -> None:
        while not (pid := self.board.read(rank).pid):
            if self._over.wait(_LOOK_EVERY_S):
                return
        death = _wait(pid)
        self._ended.add(rank)
        if death == Death() and self.board.read(rank).phase is Phase.DONE:
            return
        if self._killing.acquire(blocking=False):  # the first failure; kept for good
            self.deaths[rank] = death
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end and len(self._ended) < self.board.num_ranks:
                time.sleep(_LOOK_EVERY_S)
            self.kill()
        elif not self._killed:
            self.deaths[rank] = death


def _wait(pid: int) -> Death:
    """Returns when a child ends, and how. Leaves it for the elastic launcher to reap."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # reaped already: the elastic launcher tells how it ended
        return Death()
    if ended is None:
        return Death()
    return Death(exit_code=ended.si_status) if ended.si_code == os.CLD_EXITED else Death(signal_number=ended.si_status)


@contextlib.contextmanager
def _forward_stop(watch: _Watch) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into the stop flag, a second Ctrl-C into an end at once."""
    own_pid = os.getpid()

    def on_signal(number: int, _: FrameType | None) -> None:
        again = watch.board.stop_requested and number == signal.SIGINT
        watch.board.request_stop()
        if again and os.getpid() == own_pid:  # a rank runs this too, in the moment between its fork and its first line
            watch.aborted = True
            watch.kill()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Gives the ranks a directory for shared memory that goes with the run.

    Ranks unlink their files as soon as all have opened them; one that is killed before that leaves its file.
    """
    parent = shared_memory_directory()
    if not os.access(parent, os.W_OK):
        yield  # then there is none to be had, and the ranks will say so
        return
    before = os.environ.get(SHARED_MEMORY_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="rotorch-", dir=parent) as directory:
        os.environ[SHARED_MEMORY_VARIABLE] = directory
        try:
            yield
        finally:
            os.environ.pop(SHARED_MEMORY_VARIABLE)
            if before is not None:
                os.environ[SHARED_MEMORY_VARIABLE] = before


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keeps the elastic launcher's tables and tracebacks from the user: `_explain` says it in a line."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    silenced = [logging.getLogger(name) for name in names]
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
    """Says which rank failed first: one that vanished, since others then missed it; else the earliest exception."""
    silent = [rank for rank in deaths if statuses[rank].failure is FailureKind.NONE]
    # While ranks join, the elastic launcher ends those that are left with SIGTERM.
    vanished = [statuses[rank] for rank in sorted(silent, key=lambda r: deaths[r] in (Death(), _SIGTERM))]
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

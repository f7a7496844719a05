"""Starts ranks on this machine through torch's elastic launcher, and reports their ends.

[Note: how a run ends]
    - A rank dies, by a signal or an exception: the launcher sees it within 0.1 s, gives the others a second to note
      their last state, and kills them. `RankFailure` names the rank that failed first and its activity.
    - No rank makes progress: the launcher, which sees the places of all ranks, reports which rank waits for which. The
      ranks' own timeouts come later, and mostly end ranks that wait for a rank busy with other work.
    - The launcher dies: the kernel kills the ranks (PR_SET_PDEATHSIG), whatever they are waiting for.
    - Ctrl-C, SIGTERM, or SIGHUP (its terminal is gone), to the launcher or to all: the launcher raises a flag on the
      status board, and the ranks, which ignore these signals, agree on the step after which they save and leave. The
      launcher's exit code is 128 and the signal's number, as that of a command that the signal ends: the run is not
      done. A second Ctrl-C kills them. A run started with SIGHUP ignored (nohup) continues without a terminal.
    - torchrun dies: the same, asked for by each rank as the first thing it does (`process/parent_death.py`).
    - Under torchrun, Slurm and the like each rank raises the flag for itself, and the ranks agree all the same.

[Note: few threads]
    Locks of other threads stay locked in ranks (see [Note: fork] in `process/forking.py`). So the launcher keeps torch
    to one thread and serves no TCP store (its thread looks up host names): ranks find each other through a file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from rotorch.comm.shared_file import own_prefix, shared_memory_directory, sweep
from rotorch.core.errors import ConfigError, FinalFailure, RankFailure, RotorchError
from rotorch.core.first_failure import Evidence, evidence_of
from rotorch.process.environment import environment
from rotorch.process.forking import forking
from rotorch.process.parent_death import die_with
from rotorch.train.launch.exit_status import RankMonitor, exit_of, explain
from rotorch.train.launch.failure_report import REPORT, answer_with_stack
from rotorch.train.launch.status import FailureKind, RankPhase, StatusBoard
from rotorch.train.launch.watchdog import BACKSTOP_S, RankWatchdog, keep_record

Work = Callable[[StatusBoard], bool]
"""What a rank does, given the board on which it notes what it is doing; whether it came to its end, or was stopped."""

_LOOK_EVERY_S = 0.1
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stopping_signals() -> list[signal.Signals]:
    """Signals that ask this process to save a checkpoint and leave; without SIGHUP where nohup ignores it."""
    return [s for s in _STOPPING_SIGNALS if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]


def is_rank() -> bool:
    """True if torchrun, Slurm or an operator started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    work: Work, *, num_ranks: int, backend: str = "gloo", timeout_s: float = 600.0, traceback_dir: Path | None = None
) -> int:
    """Runs `work` in `num_ranks` ranks of this machine and returns when all are done.

    Args:
        work: runs in every rank, with torchrun's environment variables set and the process group joined.
        num_ranks: number of ranks.
        backend: of the process group.
        timeout_s: when no rank gets on for so long, the job has failed. A rank that waits `BACKSTOP_S` longer for
            another one fails by itself.
        traceback_dir: where a rank that ends with an unexpected exception leaves its traceback, and what the others
            were doing is written down, if the directory exists.

    Returns:
        0, or the number of the signal after which ranks left before their work came to its end.

    Raises:
        RankFailure: if a rank failed; the message names it, the signal or exception, and what it was doing.
        FinalFailure: the same, if it would come again, or came after Ctrl-C or a signal to end.
        ConfigError: if a rank found the input to be wrong.
        KeyboardInterrupt: after a second Ctrl-C.
    """
    watch = RankMonitor(StatusBoard(num_ranks), timeout_s=timeout_s)
    torch.set_num_threads(1)
    with (
        _quiet_elastic(),
        tempfile.TemporaryDirectory(prefix="rotorch-") as directory,
        _own_shared_memory() as shared_memory,
        _forward_stop(watch),
    ):
        watch.stacks = Path(directory)
        watch.report = traceback_dir and traceback_dir / REPORT
        group = _Group(
            file=f"{directory}/ranks", num_ranks=num_ranks, backend=backend, timeout_s=timeout_s + BACKSTOP_S
        )
        arguments = (work, watch.board, group, os.getpid(), traceback_dir)
        try:
            result = _run_agent(watch, arguments, num_ranks=num_ranks, directory=directory, shared_memory=shared_memory)
        except SignalException as error:
            raise FinalFailure(f"the launcher was ended by {error.sigval.name}") from None
        except RankFailure as failure:
            raise _as_asked(failure, watch) from None
        if result.is_failed():
            exits = {rank: exit_of(failure.exitcode) for rank, failure in result.failures.items()}
            raise _as_asked(explain(watch.board.all(), exits=exits), watch)
        return watch.board.stop_signal if watch.board.stopped_early else 0


def _as_asked(failure: RotorchError, watch: RankMonitor) -> RotorchError:
    """A failure after the run was asked to stop does not end it, and starts no restart."""
    is_last = isinstance(failure, RankFailure) and watch.board.stop_requested
    return FinalFailure(str(failure)) if is_last else failure


class _Agent(LocalElasticAgent):
    """torch's elastic agent for one machine, which looks how its ranks end before it reaps them."""

    def __init__(self, *args: Any, watch: RankMonitor, shared_memory: Path | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch
        self._shared_memory = shared_memory

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with forking():
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._watch.look({worker.global_rank: worker.id for worker in worker_group.workers})
        if self._shared_memory is not None and all(status.step for status in self._watch.board.all()):
            with contextlib.suppress(OSError):
                self._shared_memory.rmdir()  # all ranks have built: nothing is in it now, nor if we are killed
            self._shared_memory = None
        return super()._monitor_workers(worker_group)


def _run_agent(
    watch: RankMonitor, arguments: tuple[Any, ...], *, num_ranks: int, directory: str, shared_memory: Path | None
) -> RunResult:
    """Starts the ranks and returns when they are done; raises what `watch` says when one failed."""
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{directory}/rendezvous",
            run_id=f"rotorch-{os.getpid()}",
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            store_type="file",
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=_rank_main,
        args=arguments,
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_LOOK_EVERY_S,
        local_addr="127.0.0.1",
    )
    logs = DefaultLogsSpecs(log_dir=directory)
    agent = _Agent(spec=spec, logs_specs=logs, start_method="fork", watch=watch, shared_memory=shared_memory)
    # The first: see [Note: few threads]. The second: the other signals are ours.
    with environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", TORCHELASTIC_SIGNALS_TO_HANDLE="SIGQUIT"):
        try:
            return agent.run()
        finally:
            rendezvous.shutdown()


def run_as_rank(work: Work, *, traceback_dir: Path | None = None, timeout_s: float = math.inf) -> bool:
    """Runs `work` in this process, which torchrun or the like started as a rank, and returns what it returns.

    A rank that does not get on for `timeout_s` says so on stderr and in the run's report, and ends with exit code 3.

    Raises:
        RankFailure: if it raised; the message names this rank and what it was doing.
        ConfigError: if it found the input to be wrong.
    """
    rank = int(os.environ["RANK"])
    board = StatusBoard(1)
    board.enter(0, pid=os.getpid())
    if (
        threading.current_thread() is threading.main_thread()
    ):  # Ray Train calls from another one, and has its own signals
        # A second signal means no more than the first: torchrun passes on a Ctrl-C that the terminal sent to all.
        for number in _stopping_signals():
            signal.signal(number, lambda received, _: board.request_stop(signal_number=received))
    _use_threads()
    try:
        with RankWatchdog(board, rank=rank, timeout_s=timeout_s, directory=traceback_dir):
            came_to_its_end = work(board)
        if dist.is_initialized():
            dist.destroy_process_group()
        return came_to_its_end
    except ConfigError:
        raise
    except Exception as error:
        where = _leave_traceback(traceback_dir, rank=rank)
        raise RankFailure(f"rank {rank} failed {board.read(0).when}: {_one_line(error)}{where}") from None


# ---------------------------------------------------------------- inside a rank


@dataclass(frozen=True)
class _Group:
    """Rendezvous of forked ranks: through `file`."""

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
    for number in _STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with(launcher_pid)
    board.enter(rank, pid=os.getpid())
    answer_with_stack(Path(group.file).parent, rank=rank)
    keep_record(board, directory=Path(group.file).parent)
    _use_threads()
    try:
        board.doing(RankPhase.JOINING)
        group.join(rank)
        if not work(board):
            board.note_stopped()
        dist.destroy_process_group()
    except BaseException as error:
        where = "" if isinstance(error, RotorchError) else _leave_traceback(traceback_dir, rank=rank)
        board.fail(_one_line(error) + where, kind=_kind_of(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: to take down a process group whose other ranks are waiting can take minutes
    board.doing(RankPhase.DONE)
    sys.stdout.flush()


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, ConfigError):
        return FailureKind.INPUT
    if isinstance(error, FinalFailure):
        return FailureKind.FINAL
    return FailureKind.HEARD if evidence_of(error) is Evidence.HEARD else FailureKind.OWN


def _use_threads() -> None:
    """One share of this machine's cores per rank, unless OMP_NUM_THREADS says otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(asked) if asked.isdigit() and int(asked) > 0 else share)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RotorchError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _leave_traceback(directory: Path | None, *, rank: int) -> str:
    """Writes the traceback into the run's directory; if that is not there, elsewhere, and the text returned says so."""
    name = f"traceback-rank{rank}.txt"
    with contextlib.suppress(OSError):
        if directory is not None and directory.is_dir():
            (directory / name).write_text(traceback.format_exc(), "utf-8")
            return ""
        path = Path(tempfile.mkdtemp(prefix="rotorch-traceback-")) / name
        path.write_text(traceback.format_exc(), "utf-8")
        return f". The traceback is in {path}"
    return ""


# ---------------------------------------------------------------- around the launcher


@contextlib.contextmanager
def _forward_stop(watch: RankMonitor) -> Iterator[None]:
    """Turns what asks a run to stop into the stop flag, a second Ctrl-C into an end at once."""
    own_pid = os.getpid()

    def on_signal(number: int, _: FrameType | None) -> None:
        again = watch.board.stop_requested and number == signal.SIGINT
        watch.board.request_stop(signal_number=number)
        if again and os.getpid() == own_pid:  # a rank runs this too, in the moment between its fork and its first line
            watch.kill()
            raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in _stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _own_shared_memory() -> Iterator[Path | None]:
    """Gives the ranks a directory for shared memory that goes with the run; yields it, None if there is none.

    Ranks unlink their files as soon as all have opened them; one that is killed before that leaves its file. A launcher
    that is killed then leaves all of it to the next one.
    """
    parent = shared_memory_directory()
    if not os.access(parent, os.W_OK):
        yield None  # the ranks will say so
        return
    sweep(parent)
    with (
        tempfile.TemporaryDirectory(prefix=own_prefix(), dir=parent, ignore_cleanup_errors=True) as directory,
        environment(ROTORCH_SHARED_MEMORY_DIR=directory, ROTORCH_SHARED_MEMORY_LATER=str(parent)),
    ):
        yield Path(directory)


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

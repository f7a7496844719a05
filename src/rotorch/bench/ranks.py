"""The ranks of one row as the bench sees them: started together, asked together, ended together.

Timed ranks are forked: modules that the bench has imported are loaded at once. Ranks whose process memory is measured
are started afresh, since the allocator's settings are read when a process starts; so are ranks of a process that cannot
fork them (`process/forking.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from rotorch.bench.hosts import Hosts
from rotorch.bench.process_memory import MALLOC_ENVIRONMENT
from rotorch.bench.rank import RankSetup, serve
from rotorch.bench.task import Task
from rotorch.bench.wire import HOST, OWN, WireBytes, network_of_its_own
from rotorch.core.errors import RankFailure
from rotorch.core.first_failure import Evidence, Failure, is_ending, is_hearsay
from rotorch.process.forking import forking, why_no_ranks_on_cpu
from rotorch.process.new_interpreter import start_fresh

_STOP_S = 10.0
_LOOK_EVERY_S = 0.02


class _Process(Protocol):
    """Interface shared by both ways of starting a rank."""

    @property
    def pid(self) -> int | None: ...

    def status(self, *, timeout_s: float) -> int | None: ...


class _Forked:
    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def status(self, *, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode


class _Started:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self, *, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


class RowRanks:
    """All ranks of one row, alive until `close`. Between questions they sleep.

    Args:
        task: the task that they train.
        row: "limit", or `--parallel` text.
        num_ranks: number of ranks.
        fresh: start new interpreters with `MALLOC_ENVIRONMENT` instead of forking.
        timeout_s: seconds that a question may take.
        hosts: hosts of the ranks, rank k on host `k * hosts.count // num_ranks`; None: this one.
        flops_per_s: see `RankSetup`.
    """

    def __init__(
        self,
        task: Task,
        *,
        row: str,
        num_ranks: int,
        fresh: bool = False,
        timeout_s: float = 600.0,
        hosts: Hosts | None = None,
        flops_per_s: float | None = None,
    ) -> None:
        self.row = row
        self.wire_counter = HOST
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="rotorch-bench-")
        self._processes: list[_Process] = []
        self._connections: list[Connection] = []
        store = os.path.join(self._directory.name, "store")
        setups = [
            RankSetup(row, rank, num_ranks, store, timeout_s, os.getpid(), flops_per_s) for rank in range(num_ranks)
        ]
        try:
            why = why_no_ranks_on_cpu()
            if hosts is not None and (fresh or why):
                raise RankFailure(f"{row}: ranks on hosts of their own are forked, which cannot be done here: {why}")
            if fresh or why:
                self._start(task, setups, environment=MALLOC_ENVIRONMENT if fresh else {})
            else:
                self._fork(task, setups, hosts=hosts)
            self._answers()
        except BaseException:
            self.close()
            raise

    def _fork(self, task: Task, setups: Sequence[RankSetup], *, hosts: Hosts | None) -> None:
        context = multiprocessing.get_context("fork")
        together = context.Barrier(len(setups))
        with forking(), network_of_its_own() if hosts is None else nullcontext(False) as own:
            self.wire_counter = OWN if own else HOST
            for setup in setups:
                ours, theirs = context.Pipe()
                process = context.Process(target=_forked_main, args=(ours, theirs, task, setup, together), daemon=True)
                with nullcontext() if hosts is None else hosts.on(setup.rank * hosts.count // setup.num_ranks):
                    process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(_Forked(process))

    def _start(self, task: Task, setups: Sequence[RankSetup], *, environment: Mapping[str, str]) -> None:
        for setup in setups:
            process, ours = start_fresh("rotorch.bench.ranks:started_main", environment=environment)
            ours.send((task, setup))
            self._connections.append(ours)
            self._processes.append(_Started(process))

    def ask(self, question: str, **arguments: Any) -> list[Any]:
        """Puts one question (a method of `rank._Rank`) to all ranks and returns their answers by rank.

        Raises:
            RankFailure: a rank raised, died or took too long; says which and why. The row can only be closed then.
        """
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((question, arguments))
            except OSError:
                raise RankFailure(f"{self.row}: rank {rank} {self._death(rank)}") from None
        return self._answers()

    def wire_of(self, question: str) -> tuple[list[Any], WireBytes | None]:
        """Puts a question; also returns what went over the wire meanwhile (see `wire.py`), if somebody counts that."""
        before = self.ask("loopback_bytes")[0]
        answers = self.ask(question)
        after = self.ask("loopback_bytes")[0]
        return answers, None if before is None or after is None else WireBytes(after - before, self.wire_counter)

    def _answers(self) -> list[Any]:
        answers: list[Any] = [None] * len(self._connections)
        failures: list[Failure] = []
        pending = dict(enumerate(self._connections))
        deadline = time.monotonic() + self._timeout_s
        # After a failure others are waited for until its cause is known: [Note: the cause] in `core/first_failure.py`.
        while pending and (is_hearsay(failures) or self._are_ending(pending)):
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(list(pending.values()), timeout=left_s if is_hearsay(failures) else _LOOK_EVERY_S)
            if not ready and left_s == 0.0 and not failures:
                raise RankFailure(f"{self.row}: ranks {sorted(pending)} gave no answer for {self._timeout_s:.0f} s")
            if not ready and left_s == 0.0:
                break
            for rank in [r for r, connection in pending.items() if connection in ready]:
                try:
                    ok, answers[rank] = pending.pop(rank).recv()
                except (EOFError, OSError):
                    failures.append(Failure(Evidence.DIED, 0.0, rank, self._death(rank)))
                    continue
                if not ok:
                    evidence, when, text = answers[rank]
                    failures.append(Failure(evidence, when, rank, f"raised:\n{text}"))
        if failures:
            cause = min(failures)
            raise RankFailure(f"{self.row}: rank {cause.rank} {cause.text}")
        return answers

    def _are_ending(self, ranks: Iterable[int]) -> bool:
        pids = [self._processes[rank].pid for rank in ranks]
        return any(is_ending(pid) for pid in pids if pid is not None)

    def _death(self, rank: int) -> str:
        status = self._processes[rank].status(timeout_s=_STOP_S)
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit code {status}"

    def stop(self) -> None:
        """Lets the ranks free what they share, then ends them."""
        try:
            self.ask("stop")
        finally:
            self.close()

    def close(self) -> None:
        """Ends all ranks at once."""
        for process in self._processes:
            if process.pid is not None and process.status(timeout_s=0.0) is None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.status(timeout_s=_STOP_S)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._directory.cleanup()


def _forked_main(ours: Connection, theirs: Connection, task: Task, setup: RankSetup, together: Any) -> None:
    ours.close()
    serve(theirs, task=task, setup=setup, wait_for_all=together.wait)


def started_main(descriptor: int) -> None:
    """Entry of a rank that was started afresh: the connection is an open descriptor, the work comes through it."""
    connection = Connection(descriptor)
    task, setup = connection.recv()
    serve(connection, task=task, setup=setup)

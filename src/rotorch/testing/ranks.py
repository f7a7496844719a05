"""Runs a function on several ranks of this machine: forked gloo processes, 0.3 s for four of them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rotorch.core.errors import RankFailure
from rotorch.core.first_failure import Evidence, Failure, evidence_of, is_ending, is_hearsay
from rotorch.process.forking import forking, why_no_ranks_on_cpu
from rotorch.process.new_interpreter import call_fresh

_TICK_S = 0.5
_LOOK_EVERY_S = 0.02


def run_ranks(function: Callable[..., Any], *args: Any, num_ranks: int, timeout_s: float = 300.0) -> list[Any]:
    """Calls `function(*args)` on forked ranks with a gloo group over all of them; returns their results by rank.

    Forking keeps what the parent has imported and made, so ranks start at once; the parent must not have used CUDA.
    Arguments are inherited, results travel by pickle. Each rank computes with one thread. From a process that is in a
    process group, or has computed gradients with a GPU in sight, function and arguments travel by pickle, too, to a new
    one that forks the ranks: seconds later.

    Args:
        function: function of each rank; `torch.distributed` and torchrun's environment variables tell it its rank.
        args: its arguments.
        num_ranks: number of processes.
        timeout_s: after so long without a word from any rank all are killed. Counted in waits, not by the clock: in
            the time that a virtual machine is paused or a laptop sleeps no rank can finish.

    Raises:
        ConfigError: ranks cannot be forked here, and `function` or an argument cannot be pickled.
        RankFailure: with the traceback of the rank that raised first, or the signal that ended one, or who is late and
            where; all others are killed.
    """
    if why := why_no_ranks_on_cpu():
        return call_fresh(run_ranks, function, *args, why=why, num_ranks=num_ranks, timeout_s=timeout_s)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rotorch-ranks-") as directory:
        folder = Path(directory)
        pipes: list[Connection] = []
        processes: list[Any] = []
        try:
            with forking():
                for rank in range(num_ranks):
                    receiver, sender = context.Pipe(duplex=False)
                    arguments = function, args, rank, num_ranks, folder, sender, timeout_s
                    process = context.Process(target=_rank_main, args=arguments, daemon=True)
                    process.start()
                    sender.close()
                    pipes.append(receiver)
                    processes.append(process)
            return _collect(pipes, processes, folder=folder, timeout_s=timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank_main(
    function: Callable[..., Any],
    args: Any,
    rank: int,
    num_ranks: int,
    folder: Path,
    sender: Connection,
    timeout_s: float,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    parent = os.getppid()
    faulthandler.register(signal.SIGUSR1, file=_stack_file(folder, rank).open("w"), all_threads=False)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*args)
        sender.send((True, result))
        sys.stdout.flush()
        _wait_for_all(parent)
    except BaseException as error:
        sender.send((False, (evidence_of(error), time.monotonic(), traceback.format_exc())))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no interpreter teardown: it may wait for threads of a broken process group


def _wait_for_all(parent: int) -> None:
    """Stays until the parent ends this rank.

    If it left, others would see connections close under their last messages.
    """
    while os.getppid() == parent:
        time.sleep(0.02)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack.{rank}"


def _where(ranks: Iterable[int], processes: list[Any], *, folder: Path, patience_s: float = 0.5) -> str:
    """Asks ranks that still run where they are, and returns the innermost lines of each."""
    for rank in ranks:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(patience_s)
    lines = {rank: _stack_file(folder, rank).read_text("utf-8").splitlines()[1:9] for rank in ranks}
    return "\n".join(f"rank {rank} is at\n" + "\n".join(found) for rank, found in lines.items())


def _read(pending: dict[int, Connection], processes: list[Any], results: list[Any]) -> list[Failure]:
    """Takes what ranks have sent, which are not pending any more: results, and failures."""
    failures: list[Failure] = []
    for rank in [r for r, pipe in pending.items() if pipe.poll()]:
        try:
            ok, value = pending.pop(rank).recv()
        except EOFError:
            processes[rank].join()
            failures.append(Failure(Evidence.DIED, 0.0, rank, f"died: exit code {processes[rank].exitcode}"))
            continue
        if ok:
            results[rank] = value
        else:
            evidence, at_s, text = value
            failures.append(Failure(evidence, at_s, rank, f"raised:\n{text}"))
    return failures


def _collect(pipes: list[Connection], processes: list[Any], *, folder: Path, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    pending = dict(enumerate(pipes))
    failures: list[Failure] = []
    # After a failure others are waited for until its cause is known: [Note: the cause] in `core/first_failure.py`.
    while pending and is_hearsay(failures):
        ready, waited_s = [], 0.0
        while not ready and waited_s < timeout_s:
            ready = wait(list(pending.values()), timeout=_TICK_S)
            waited_s += _TICK_S
        if not ready and failures:
            break
        if not ready:
            where = _where(sorted(pending), processes, folder=folder)
            raise RankFailure(
                f"ranks {sorted(pending)} of {len(pipes)} have not finished after {timeout_s:.0f} s\n{where}"
            )
        failures += _read(pending, processes, results)
    while failures and any(is_ending(processes[rank].pid) for rank in pending):
        wait(list(pending.values()), timeout=_LOOK_EVERY_S)
        failures += _read(pending, processes, results)
    if failures:
        cause = min(failures)
        raise RankFailure(f"rank {cause.rank} {cause.text}")
    return results

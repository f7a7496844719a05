"""Runs a function on several ranks of this machine: forked gloo processes, 0.3 s for four of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rotorch.core.errors import RankFailure


def run_ranks(function: Callable[..., Any], *args: Any, num_ranks: int, timeout_s: float = 120.0) -> list[Any]:
    """Calls `function(*args)` on `num_ranks` forked ranks with a gloo group over all of them; returns their results by rank.

    Forking keeps what the parent has imported, so ranks start at once; the parent must not have used CUDA. Results travel
    by pickle. Each rank computes with one thread.

    Raises:
        RankFailure: with the traceback of the first rank that raised, or the signal that ended it, or a timeout; all others are killed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="rotorch-ranks-") as directory:
        store = str(Path(directory) / "store")
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(function, args, rank, num_ranks, store, sender, timeout_s), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout_s=timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank_main(
    function: Callable[..., Any], args: Any, rank: int, num_ranks: int, store: str, sender: Connection, timeout_s: float
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=torch.distributed.constants.default_pg_timeout if timeout_s > 1800 else _seconds(timeout_s),
        )
        result = function(*args)
        dist.barrier()
        sender.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        os._exit(0)  # no interpreter teardown: it may wait for threads of a broken process group


def _seconds(timeout_s: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=timeout_s)


def _collect(pipes: list[Connection], processes: list[Any], *, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    pending = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {sorted(pending)} of {len(pipes)} have not finished after {timeout_s:.0f} s")
        for rank in [r for r, pipe in pending.items() if pipe in ready]:
            try:
                ok, value = pending[rank].recv()
            except EOFError:
                processes[rank].join()
                raise RankFailure(f"rank {rank} died: exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RankFailure(f"rank {rank} raised:\n{value}")
            results[rank] = value
            del pending[rank]
    return results

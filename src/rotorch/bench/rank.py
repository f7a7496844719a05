"""Process of one rank of one row: it builds its contender, then answers the bench's questions one at a time.

Between questions a rank sleeps on its connection, so rows that are not at work burn nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rotorch.bench.contender import LIMIT, REFERENCE, Contender, UnderLayout, build, make_contender
from rotorch.bench.device_clock import DeviceClock
from rotorch.bench.peers import PEERS
from rotorch.bench.process_memory import ProcessMemory, read_process_memory, reset_peak
from rotorch.bench.process_settings import ProcessSetter, ProcessSettings
from rotorch.bench.profile import profile_steps
from rotorch.bench.task import Task
from rotorch.bench.tensor_memory import TensorMemory, measure_tensors
from rotorch.bench.trace import RankTrace, trace_steps
from rotorch.bench.wire import loopback_bytes
from rotorch.comm.meter import Meter
from rotorch.comm.transports.messages import Exchange
from rotorch.core.first_failure import evidence_of
from rotorch.hold.pipeline import PipelinedModel
from rotorch.parallelize import load_step_code
from rotorch.pipelining.actions import COMPUTE, Action
from rotorch.process.host_memory import give_back_freed_memory
from rotorch.shard.materialize import on_meta
from rotorch.strategies import STRATEGIES

_PR_SET_PDEATHSIG = 1
_WARM_FEATURES = 512


@dataclass(frozen=True)
class RankSetup:
    """Position of a rank in its row, and the settings that it starts with.

    Attributes:
        row: "limit", `--parallel` text, or a peer's name.
        rank: 0-based.
        num_ranks: of the row.
        store: file through which the row's ranks find each other.
        timeout_s: seconds that a rank waits for another one.
        parent_pid: the bench's process; ranks end with it.
        flops_per_s: of a device that is only thought of (see `device_clock.py`); None: products take what they take.
    """

    row: str
    rank: int
    num_ranks: int
    store: str
    timeout_s: float
    parent_pid: int
    flops_per_s: float | None = None


@dataclass(frozen=True)
class Built:
    """First answer of a rank, once its contender is built.

    Attributes:
        threads: threads of the rank.
        transport: transport of slices, if there is a choice.
        transport_within: of the ranks inside of a ring that share a batch.
        settings: of its process.
    """

    threads: int
    transport: str | None
    transport_within: str | None
    settings: ProcessSettings


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, on the clock that all processes of a machine share, in seconds.

    Attributes:
        start_s: all ranks of the row are there.
        gradients_s: this rank's are complete.
        end_s: the optimizer has done its step.
        loss: per target token.
        forward_s: the first micro-batch has gone forward; known of a device that is only thought of.
    """

    start_s: float
    gradients_s: float
    end_s: float
    loss: float
    forward_s: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages that one rank sent in one step."""

    sent_bytes: dict[str, int]
    num_messages: dict[str, int]


def serve(
    connection: Connection, *, task: Task, setup: RankSetup, wait_for_all: Callable[[], Any] | None = None
) -> None:
    """Builds the contender and answers until told to stop; ends the process. Never raises: errors travel to the parent.

    Args:
        connection: carries `(question, arguments)` in and `(ok, answer)` out, of a failure how much it says of the
            cause, when and what it was; the first answer says that it is ready.
        task: the task to train.
        setup: rank and row of this process.
        wait_for_all: returns when all ranks of the row have called it; None where nobody times anything.
    """
    code = 0
    try:
        _settle(setup)
        rank = _Rank(task, setup=setup, wait_for_all=wait_for_all)
        connection.send((True, None))
        while True:
            question, arguments = connection.recv()
            answer = getattr(rank, question)(**arguments)
            connection.send((True, answer))
            if question == "stop":
                break
    except (EOFError, BrokenPipeError):
        code = 1  # the bench is gone
    except BaseException as error:
        code = 1
        connection.send((False, (evidence_of(error), time.monotonic(), traceback.format_exc())))
    finally:
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no interpreter teardown: it may wait for threads of a broken process group


class _Rank:
    """A contender and the questions about it."""

    def __init__(self, task: Task, *, setup: RankSetup, wait_for_all: Callable[[], Any] | None) -> None:
        self._wait_for_all = wait_for_all or (lambda: None)
        self._step = 0
        _join(setup)
        self._before = _baseline(task, row=setup.row)
        self._task, self._setup = task, setup
        self._contender: Contender | None = None

    def build(self) -> Built:
        """Builds the contender."""
        as_is = self._setup.row in PEERS and PEERS[self._setup.row].as_torch_leaves_it
        self._process = ProcessSetter(self._task.device, as_torch_leaves_it=as_is)
        self._contender = make_contender(self._task, row=self._setup.row, rank=self._setup.rank)
        give_back_freed_memory()
        made = self._contender
        return Built(torch.get_num_threads(), made.transport, made.transport_within, self._process.settings())

    def steps(self, count: int) -> list[StepTime]:
        """Runs `count` steps, all ranks starting each together."""
        gc.collect()
        self._process.settings()  # some libraries open groups in their first step
        steps = [self._timed_step() for _ in range(count)]
        give_back_freed_memory()
        return steps

    def held_elements(self) -> int:
        """Number of weight elements that this rank holds at rest."""
        return sum(weight.numel() for weight in self._made().weights())

    def tensors(self) -> TensorMemory:
        """Runs one step and measures its tensors."""
        contender, step = self._made(), self._next()
        return measure_tensors(contender, step=step)

    def product_flops(self) -> int:
        """Runs one step and counts its products."""
        contender, step = self._made(), self._next()
        with DeviceClock(None) as clock:
            contender.forward_backward(step)
            contender.update()
        return clock.flops

    def action_flops(self) -> list[tuple[Action, int]]:
        """Runs one step of a pipeline; returns its computations in their order, each with the FLOPs of its products."""
        contender, step = self._made(), self._next()
        assert isinstance(contender, UnderLayout)
        pipeline = contender.model.sharded
        assert isinstance(pipeline, PipelinedModel)
        found: list[tuple[Action, int]] = []

        @contextmanager
        def watch(action: Action) -> Iterator[None]:
            before = clock.flops
            yield
            if action.kind in COMPUTE:
                found.append((action, clock.flops - before))

        with DeviceClock(None) as clock, pipeline.watched(watch):
            contender.forward_backward(step)
        contender.update()
        return found

    def exchanges(self, num_bytes: int, count: int) -> list[float]:
        """Seconds of each exchange of so many bytes: to the next rank, from the one before, at the same time."""
        rank, size = self._setup.rank, self._setup.num_ranks
        send, receive = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
        taken = []
        for _ in range(count):
            self._wait_for_all()
            start_s = time.perf_counter()
            Exchange(send=send, to=(rank + 1) % size, receive=receive, source=(rank - 1) % size, group=None).wait()
            taken.append(time.perf_counter() - start_s)
        return taken

    def traffic(self) -> Traffic:
        """Runs one step and counts the bytes sent."""
        contender, step = self._made(), self._next()
        with Meter() as meter:
            contender.forward_backward(step)
            contender.update()
        return Traffic(
            {str(k): v for k, v in meter.sent_bytes.items()}, {str(k): v for k, v in meter.num_messages.items()}
        )

    def loopback_bytes(self) -> int | None:
        """Bytes sent by the ranks so far, by the interface's counter; between questions no rank sends."""
        return loopback_bytes()

    def process_memory(self) -> tuple[ProcessMemory, ProcessMemory]:
        """The process before the model was built, and now; between questions all ranks are at rest."""
        gc.collect()
        return self._before, read_process_memory()

    def reset_peak(self) -> None:
        """Forgets the highest mark of memory so far."""
        reset_peak()

    def profile(self, count: int, file: str) -> None:
        """Runs `count` steps under torch's profiler; rank 0 writes its table."""
        contender = self._made()
        steps = [self._next() for _ in range(count)]
        profile_steps(contender, steps=steps, file=file if self._setup.rank == 0 else None)

    def trace(self, count: int) -> RankTrace:
        """Runs `count` steps, all ranks starting each together, and returns what this rank did."""
        contender = self._made()
        return trace_steps(contender, steps=[self._next() for _ in range(count)], meet=self._wait_for_all)

    def stop(self) -> None:
        """Frees memory shared with other ranks."""
        if self._contender is not None:
            self._contender.close()

    def _timed_step(self) -> StepTime:
        contender, step = self._made(), self._next()
        rate = self._setup.flops_per_s
        clock = None if rate is None else DeviceClock(rate)
        self._wait_for_all()
        start_s = time.perf_counter()
        with clock or nullcontext():
            loss = contender.forward_backward(step)
        _finish()
        gradients_s = time.perf_counter()
        contender.update()
        _finish()
        return StepTime(start_s, gradients_s, time.perf_counter(), loss, clock and clock.forward_done_s)

    def _next(self) -> int:
        self._step += 1
        return self._step - 1

    def _made(self) -> Contender:
        if self._contender is None:
            raise AssertionError("asked for steps before `build`")
        return self._contender


def _settle(setup: RankSetup) -> None:
    """Ties the process to the bench and gives it its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host name may not resolve
    if os.getppid() != setup.parent_pid:
        os._exit(1)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, len(os.sched_getaffinity(0)) // setup.num_ranks) if hasattr(os, "sched_getaffinity") else 1
    torch.set_num_threads(int(asked) if asked.isdigit() and int(asked) > 0 else share)


def _join(setup: RankSetup) -> None:
    """Joins the row's process group. Ranks that work alone have none."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(LOCAL_RANK=str(setup.rank), LOCAL_WORLD_SIZE=str(setup.num_ranks))
    if setup.row in (LIMIT, REFERENCE):
        return
    os.environ.update(RANK=str(setup.rank), WORLD_SIZE=str(setup.num_ranks))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=dist.FileStore(setup.store, setup.num_ranks),
        rank=setup.rank,
        world_size=setup.num_ranks,
        timeout=timedelta(seconds=setup.timeout_s),
    )


def load_code(task: Task) -> None:
    """Loads modules of a step that torch or transformers load on first use: seconds, which forked ranks then save."""
    with on_meta():
        build(task)
    load_step_code(STRATEGIES)


def _baseline(task: Task, *, row: str) -> ProcessMemory:
    """Memory of the process when all code is loaded and warm, and nothing is built."""
    load_code(task)
    one = nn.Linear(1, 1)
    one(torch.ones(1, 1)).sum().backward()
    torch.optim.AdamW(one.parameters(), fused=True).step()
    if row in PEERS:
        PEERS[row].load_library(on_cpu=not torch.cuda.is_available())
    gc.freeze()  # what is loaded stays: to go through it again and again costs more than a small model's step
    warm = torch.ones(_WARM_FEATURES, _WARM_FEATURES)
    warm @ warm
    del warm
    gc.collect()
    return read_process_memory()


def _finish() -> None:
    """Waits for what was started on an accelerator."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

"""Forking ranks from a process that may have computed before.

[Note: fork]
    Ranks are forked: torch and transformers are imported once, and a rank starts in a fraction of a second. A rank has
    all of the memory of the process that forked it, and of its threads only the one that did. So
    - garbage is not collected: a process group in it would wait for its threads, which a rank does not have, to end;
    - meshes are forgotten, whose groups ranks do not have: DTensor would take the ranks' own meshes for the same;
    - OpenMP's threads are ended before, and start again when they are needed: a rank would give them work, and wait;
    - no rank is forked from a process that is in a process group, or has used a GPU that ranks are to use, or has
      computed gradients with a GPU in sight: torch refuses to do that in a forked process. Such a process has a new one
      start its ranks (`process/new_interpreter.py`);
    - a lock that another thread holds at that moment stays locked. So there should be few threads
      (`train/launch/elastic.py`).

[Note: autograd's threads]
    The first backward pass of a process starts one thread per device other than the CPU, and no process forked after
    that may compute gradients. Builds for CUDA do so without a GPU, too, once a `FakeTensorMode` was entered (by
    torch.compile, or by DTensor's propagation of shapes): it replaces the driver by a fake one with eight devices. A
    backward pass before all others finds no device, and starts no threads: for good, in this process and its forks.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from rotorch._torch_private import AUTOGRAD_THREADS, forget_meshes, lost_gpu_by_fork
from rotorch.core.errors import ConfigError, RankFailure, RotorchError
from rotorch.core.quantities import format_bytes
from rotorch.process.host_memory import SHARED_MEMORY, room_in

Result = TypeVar("Result")

_OMP_PAUSE_HARD = 2
_LOCKS, _LOCKS_PER_RANK = 8, 2  # of torch's elastic launcher, which takes 5 and 2
_COMPUTED = "it has computed gradients with a GPU in sight"
_USED_GPU = "it has used a GPU, or asked torch for one"

_forking: int | None = None
"""The process that is in a `forking` block: this one, or the one that forked it there."""
_has_lost_threads = False
"""True if this process was forked elsewhere, so that OpenMP may wait for threads that do not exist."""


@contextmanager
def forking() -> Iterator[None]:
    """Makes processes forked inside the block compute and collect garbage as if this one had done nothing before."""
    global _forking
    before, _forking = _forking, os.getpid()
    _end_openmp_threads()
    forget_meshes()
    if before not in (None, _forking):
        gc.collect()  # in a process that was forked itself, frozen objects stay frozen
    gc.freeze()
    try:
        yield
    finally:
        if _forking == os.getpid():
            _forking = before
            if before is None:
                gc.unfreeze()


def call_forked(function: Callable[[], Result]) -> Result:
    """Calls a function in a forked process: whatever it computes, ranks can be forked from this one as before.

    Args:
        function: its result, and an error for the user that it raises, can be pickled.

    Raises:
        RotorchError: the function raised it.
        RankFailure: it ended in another way.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    with forking():
        pid = os.fork()
        if pid == 0:
            try:
                sending.send((True, function()))
            except RotorchError as error:
                sending.send((False, error))
            except BaseException as error:  # of a child that must not go on with its parent's work
                sending.send((False, RankFailure(f"{type(error).__name__}: {error}")))
            finally:
                os._exit(0)
    sending.close()
    with receiving:
        try:
            ok, value = receiving.recv()
        except EOFError:
            ok, value = False, RankFailure("a forked process of the launcher was ended")
        finally:
            os.waitpid(pid, 0)
    if ok:
        result: Result = value
        return result
    raise value


def gpu_in_sight() -> bool:
    """True if there is a GPU that CUDA_VISIBLE_DEVICES does not hide. Processes forked after this call can use it."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask in the usual way would spoil CUDA for ranks
    return torch.cuda.is_available()


def start_autograd() -> None:
    """Keeps autograd from ever starting threads where no GPU is in sight (see [Note: autograd's threads])."""
    if not (gpu_in_sight() or torch.accelerator.is_available()):
        torch.ones(1, requires_grad=True).sum().backward()


def check_semaphores(num_ranks: int) -> None:
    """Raises ConfigError if there is no room for the locks by which the launcher and its ranks talk.

    Each is a page of `/dev/shm`, wherever else shared memory may lie, and all that the system says is "No space left on
    device".
    """
    if not SHARED_MEMORY.is_dir():
        return
    needed = mmap.PAGESIZE * (_LOCKS + _LOCKS_PER_RANK * num_ranks)
    if needed > shutil.disk_usage(SHARED_MEMORY).free:
        raise ConfigError(
            f"shared memory: to start {num_ranks} ranks takes {format_bytes(needed)} in {room_in(SHARED_MEMORY)}"
        )


def why_no_ranks(*, on_gpu: bool) -> str:
    """Reason why no rank forked from this process could work; empty if there is none."""
    if why := why_no_ranks_on_cpu():
        return why
    try:
        return call_forked(partial(_why_not_in_this_fork, on_gpu=on_gpu))
    except RankFailure:
        return _USED_GPU


def why_no_ranks_on_cpu() -> str:
    """The same, in a millisecond, from this process's own state; not what it inherited by a fork."""
    if dist.is_initialized():
        return f"it is rank {dist.get_rank()} of {dist.get_world_size()} of a process group already"
    return _COMPUTED if any(name.startswith(AUTOGRAD_THREADS) for name in _threads()) else ""


def _threads() -> list[str]:
    """Names of this process's threads (Linux; elsewhere torch has no devices besides CPUs that ranks could use)."""
    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]


def _why_not_in_this_fork(*, on_gpu: bool) -> str:
    """Reason why this forked process cannot compute; empty if it can. It tries: torch has no other way to tell."""
    if on_gpu and lost_gpu_by_fork():
        return _USED_GPU
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return _COMPUTED
    return ""


def _end_openmp_threads() -> None:
    """Ends the threads that help this one; they start again when it computes with several."""
    if _has_lost_threads or psutil.Process().num_threads() == 1:  # there are none, and who ends them waits for them
        return
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


def _note_fork() -> None:
    global _has_lost_threads
    _has_lost_threads = _has_lost_threads or _forking != os.getppid()


os.register_at_fork(after_in_child=_note_fork)

"""Forking ranks from a process that may have computed before.

[Note: fork]
    Ranks are forked: torch and transformers are imported once, and a rank starts in a fraction of a second. A rank has
    all of the memory of the process that forked it, and of its threads only the one that did. So
    - garbage is left alone: a process group in it would wait for its threads to end, which are not there;
    - OpenMP's threads are ended before, and start again when they are needed: a rank would hand them work, and wait;
    - no rank is started from a process that is in a process group, or has used a GPU that ranks are to use, or has
      computed gradients with a GPU in sight: torch refuses to do that in a forked process;
    - a lock that another thread holds at that moment stays locked. So there should be few threads (`train/launch.py`).

[Note: autograd's threads]
    The first backward pass of a process starts one thread per device other than the CPU, and no process forked after
    that may compute gradients. Builds for CUDA do so without a GPU, too, once a `FakeTensorMode` was entered (by
    torch.compile, or by what DTensor asks of shapes): it puts a stand-in with eight devices in place of the driver. A
    backward pass before all others finds no device, and starts no threads: for good, in this process and its forks.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist

from rotorch._torch_private import lost_gpu_by_fork
from rotorch.core.errors import ConfigError

_OMP_PAUSE_HARD = 2
_COMMAND = "start the run by the command `rotorch train` or by torchrun"
_ALL_IS_WELL, _NO_GPU, _NO_GRADIENTS = 0, 1, 2

_forking: int | None = None
"""The process that is in a `forking` block: this one, or the one that forked it there."""
_has_lost_threads = False
"""Whether this process was forked elsewhere, so that OpenMP may count on threads that are not there."""


@contextmanager
def forking() -> Iterator[None]:
    """Processes forked within it compute and collect garbage as if this one had done nothing before."""
    global _forking
    before, _forking = _forking, os.getpid()
    _end_openmp_threads()
    if before not in (None, _forking):
        gc.collect()  # in a process that was forked itself, what is frozen stays so
    gc.freeze()
    try:
        yield
    finally:
        if _forking == os.getpid():
            _forking = before
            if before is None:
                gc.unfreeze()


def start_autograd() -> None:
    """Keeps autograd from ever starting threads where no GPU is in sight (see [Note: autograd's threads])."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask in the usual way would spoil CUDA for ranks
    if not torch.accelerator.is_available():
        torch.ones(1, requires_grad=True).sum().backward()


def check_ranks_can_be_forked(*, on_gpu: bool) -> None:
    """Raises ConfigError if this process has what no rank that is forked from it could use."""
    if dist.is_initialized():
        raise ConfigError(
            f"ranks cannot be forked from this process: it is rank {dist.get_rank()} of {dist.get_world_size()} of a "
            f"process group already. Call torch.distributed.destroy_process_group() before, or {_COMMAND}"
        )
    found = _try_in_a_fork(on_gpu=on_gpu)
    if found == _NO_GRADIENTS:
        raise ConfigError(
            "ranks cannot be forked from this process: it has computed gradients with a GPU in sight, and no process "
            f"forked from it can do so after that. Do it later, or {_COMMAND}"
        )
    if found != _ALL_IS_WELL:
        raise ConfigError(
            "ranks cannot be forked from this process: it has used a GPU, or asked torch for one, which no process "
            f"forked from it can do after that. Do it later, or {_COMMAND}"
        )


def _try_in_a_fork(*, on_gpu: bool) -> int:
    """What a forked process can do, as its exit code. Torch tells nobody else."""
    with forking():
        pid = os.fork()
        if pid == 0:
            code = _NO_GPU
            try:
                if not (on_gpu and lost_gpu_by_fork()):
                    code = _NO_GRADIENTS
                    torch.ones(1, requires_grad=True).sum().backward()
                    code = _ALL_IS_WELL
            finally:
                os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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

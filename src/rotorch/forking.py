"""Forking ranks from a process that may have computed before.

[Note: fork]
    Ranks are forked: torch and transformers are imported once, and a rank starts in a fraction of a second. A rank has
    all of the memory of the process that forked it, and of its threads only the one that did. So
    - garbage stays what it is: a process group in it would wait for its threads to end, which are not there;
    - OpenMP's threads end before, and start again when they are needed: a rank would hand them work and wait;
    - a GPU that was asked for can be used in that process only, and so can its process groups: ranks are not started;
    - a lock that another thread holds at that moment stays locked. So there should be few threads (`train/launch.py`).
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rotorch._torch_private import lost_gpu_by_fork
from rotorch.core.errors import ConfigError

_OMP_PAUSE_HARD = 2
_COMMAND = "start the run by the command `rotorch train` or by torchrun"

_frozen_by: int | None = None
"""The process whose garbage is left alone: this one, or one that forked it."""


@contextmanager
def forking() -> Iterator[None]:
    """Processes forked within it compute and collect garbage as if this one had done nothing before."""
    global _frozen_by
    _end_openmp_threads()
    is_outermost = _frozen_by is None
    if is_outermost:
        _frozen_by = os.getpid()
    gc.freeze()
    try:
        yield
    finally:
        if is_outermost and _frozen_by == os.getpid():
            gc.unfreeze()
            _frozen_by = None


def check_ranks_can_be_forked(*, on_gpu: bool) -> None:
    """Raises ConfigError if this process has what no rank that is forked from it could use."""
    if dist.is_initialized():
        raise ConfigError(
            f"ranks cannot be forked from this process: it is rank {dist.get_rank()} of {dist.get_world_size()} of a "
            f"process group already. Call torch.distributed.destroy_process_group() before, or {_COMMAND}"
        )
    if on_gpu and _has_kept_gpus_for_itself():
        raise ConfigError(
            "ranks cannot be forked from this process: it has used a GPU, or asked torch for one, which no process "
            f"forked from it can do after that. Do it later, or {_COMMAND}"
        )


def _has_kept_gpus_for_itself() -> bool:
    """Torch tells a forked process only, so one is asked."""
    with forking():
        pid = os.fork()
        if pid == 0:
            lost = True
            try:
                lost = lost_gpu_by_fork()
            finally:
                os._exit(int(lost))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _end_openmp_threads() -> None:
    """Ends those of this thread; no other thread has any that a forked process would believe in."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(_OMP_PAUSE_HARD)

"""Saves a run while it trains: training waits for a copy into host memory, and a thread writes the copy.

[Note: a save behind the run]
    The thread writes the same files as `checkpoint.save`, by the same steps: whole or not at all. The memory of the
    copies stays for the next save. The threads of all ranks agree over a process group of their own, so that their
    messages never mix with the collectives of training. One save runs at a time: the next save, a return to an earlier
    checkpoint, and the end of the run wait for it.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import own_group
from rotorch.core.errors import RotorchError
from rotorch.shard.sharded_weight import ChunkedTensor
from rotorch.train.checkpoint.saving import Snapshot, take, write
from rotorch.train.checkpoint.store import AnyPath
from rotorch.train.state import TrainState

_PATIENCE_S = 60.0


class Saver:
    """Saves a run's state: at once, or behind the run. All ranks make one, and call it alike.

    Args:
        run_dir: directory or store of the run's checkpoints.
        keep: number of checkpoints to keep.
        behind: True if `save` returns when the state is copied, not when it is on the disk.
        mesh: of all ranks.
    """

    def __init__(self, run_dir: AnyPath, *, keep: int, behind: bool, mesh: DeviceMesh) -> None:
        self._run_dir, self._keep, self._behind = run_dir, keep, behind
        self._group: ProcessGroup | None = own_group(mesh=mesh) if behind else None
        if behind and mesh.size() == 1:  # a thread must not set filters for a while, as a save at once does
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Waits for files being written; where all ranks leave with an error, no longer than `_PATIENCE_S`."""
        if error is None:
            self.wait()
        elif isinstance(error, RotorchError):
            with suppress(RotorchError):
                self.wait(_PATIENCE_S)

    def save(self, state: TrainState) -> AnyPath:
        """Saves the state; returns the checkpoint's directory, which may come to be later.

        Raises:
            RankFailure: if this save failed, or one before that is behind the run.
        """
        self.wait()
        snapshot = take(self._run_dir, state, keep=self._keep)
        if not self._behind:
            return write(snapshot)
        snapshot = replace(snapshot, tensors={name: self._copied(name, t) for name, t in snapshot.tensors.items()})
        if state.model.device.type == "cuda":
            torch.cuda.synchronize(state.model.device)
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="rotorch-save", daemon=True)
        self._thread.start()
        return snapshot.path

    def check(self) -> None:
        """Raises the error of a save behind the run, once. Waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when nothing is being written any more, or after so long. Raises what that has failed with, once."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, snapshot: Snapshot) -> None:
        _step_back()
        try:
            write(snapshot, group=self._group)
        except BaseException as error:
            self._error = error

    def _copied(self, name: str, tensor: ChunkedTensor | Tensor) -> ChunkedTensor | Tensor:
        """The tensor's values in host memory, in the memory of the last save where they fit."""
        if isinstance(tensor, ChunkedTensor):
            return ChunkedTensor(self._copy(name, tensor.local), shape=tuple(tensor.shape), chunks=tensor.chunks)
        return self._copy(name, tensor)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        source, copy = tensor.detach(), self._copies.get(name)
        if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
            copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
            self._copies[name] = copy
        return copy.copy_(source, non_blocking=True)


def _step_back() -> None:
    """Lets this thread write with what training leaves of the cores, where the system knows priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)

"""Buffers that a model writes in forward (running statistics of batch norms), kept alike on all ranks.

[Note: running statistics]
    Every rank normalises by the statistics of its own micro-batch, as under torch's DDP, and moves its buffers
    accordingly. Buffers that are saved with the model and that any rank has written during a step become the mean over
    all ranks at its end. For running means that equals one process with all the data; running variances
    are the mean of variances within micro-batches. Integers (counters) stay each rank's own, since every rank makes the
    same number of passes; so do buffers that are not saved, which belong to the rank alone.

    In a loop of the user's own the mean is taken before the backward. Torch's batch norms write their statistics
    without raising the version of the tensor, since their backward does not read them; the mean of such a buffer is
    written in the same way. Any other buffer has its version raised, so that torch refuses a backward that would read
    the mean in place of the rank's own values.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_sum

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class WrittenBuffers:
    """Detects the floating-point buffers of a module that a step has written, and averages them over ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (holder, name)
            for holder in module.modules()
            for name, buffer in holder._buffers.items()
            if buffer is not None and buffer.is_floating_point() and name not in holder._non_persistent_buffers_set
        ]
        self._before: list[Tensor] = []
        self._versions: list[int] = []

    def start(self) -> None:
        """Keeps the buffers' values before a step's first forward."""
        # Copies, since torch's own batch norm writes without raising a tensor's version.
        self._before = [buffer.clone() for buffer in self._now()]
        self._versions = [_version(buffer) for buffer in self._now()]

    def written(self) -> Tensor:
        """Returns, after a step's last backward, 1 per buffer that this rank has written, else 0: float64 [buffers]."""
        return torch.tensor([float(written) for written in self._written()], dtype=torch.float64)

    def any_written(self) -> bool:
        """True if this rank has written a buffer since `start`; waits for no GPU if there are none to look at."""
        return any(self._written())

    def _written(self) -> Iterator[bool]:
        return (not torch.equal(now, before) for now, before in zip(self._now(), self._before, strict=True))

    @torch.no_grad()
    def even_out(self, num_writers: Tensor, *, mesh: DeviceMesh) -> None:
        """Averages every buffer over the ranks that have written it, for all ranks of `mesh`. All ranks.

        A rank whose stage of a pipeline does not have the buffer's module has not written it, and does not count.

        Args:
            num_writers: the sum of `written` over all ranks. If it is zero nothing is sent.
            mesh: of all ranks.
        """
        # `.data` has a version of its own: see [Note: running statistics].
        quiet = [b.data if _version(b) == before else b for b, before in zip(self._now(), self._versions, strict=True)]
        written = zip(quiet, self.written().tolist(), num_writers.tolist(), strict=True)
        buffers = [(buffer, mine, writers) for buffer, mine, writers in written if writers > 0]
        for dtype in sorted({buffer.dtype for buffer, *_ in buffers}, key=str):
            same = [found for found in buffers if found[0].dtype is dtype]
            flat = torch.cat([buffer.reshape(-1) * mine for buffer, mine, _ in same])
            all_reduce_sum(flat, mesh=mesh)
            sums = flat.split([buffer.numel() for buffer, *_ in same])
            for (buffer, _, writers), total in zip(same, sums, strict=True):
                buffer.copy_((total / writers).view_as(buffer))

    def _now(self) -> Sequence[Tensor]:
        return [holder._buffers[name] for holder, name in self._found]  # type: ignore[misc]


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


@contextmanager
def buffers_untouched(module: nn.Module) -> Iterator[None]:
    """Undoes writes to a module's buffers at the end of the block: for a forward that runs a second time."""
    found = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    for holder, name, buffer in found:
        holder._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for holder, name, buffer in found:
            holder._buffers[name] = buffer

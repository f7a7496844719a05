"""Memory of one rank: tensors counted exactly, and the process as the kernel sees it.

[Note: shared pages]
    Forked ranks share pages with each other (libraries, and weights in shared memory), and resident memory counts them
    in each. The peak here is the highest resident memory less the excess at the time of reading: resident
    minus proportional.

[Note: since when]
    The kernel's mark is that of the process's life, so it is set back before a model is built, where that is allowed;
    torch's is set back when the training loop begins, so what loading took does not count.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch.comm.collectives import all_reduce_sum
from rotorch.parallel_model import ParallelModel

_LOOK_EVERY_S = 10.0
_MARKS = 100
_RESETS_PEAK = "5"
_ROLLUP = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of the tensors that a rank holds between steps, exactly."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def tensor_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer) -> TensorBytes:
    """Counts what this rank holds after a step: gradients, and copies of weights in the dtype of passes, included."""
    gradients = [held.local_grad for held in model.weights.values()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return TensorBytes(
        weights=sum(t.nbytes for t in (*(h.local for h in model.weights.values()), *model.sharded.copies())),
        gradients=sum(grad.nbytes for grad in gradients if grad is not None),
        optimizer=sum((s.to_local() if isinstance(s, DTensor) else s).nbytes for s in states),
    )


def is_noted(step: int, *, first: int, steps: int) -> bool:
    """True for steps after which ranks tell each other their memory: the first one, and a hundred marks of a run."""
    return step == first or step * _MARKS // steps != (step - 1) * _MARKS // steps


def memory_of_ranks(model: ParallelModel, mine: Mapping[str, int]) -> dict[str, list[int]]:
    """Bytes of every rank by category, by rank; ranks sum 8 bytes of each category and rank. All ranks."""
    num_ranks = model.mesh.size()
    table = torch.zeros(len(mine), num_ranks, dtype=torch.float64)
    table[:, model.mesh.get_rank() if num_ranks > 1 else 0] = torch.tensor([*mine.values()], dtype=torch.float64)
    found = all_reduce_sum(table, mesh=model.mesh).tolist()
    return {category: [int(n) for n in row] for category, row in zip(mine, found, strict=True)}


class PeakMeter:
    """The most memory that this rank took so far: of the GPU if it computes on one, else of the process.

    Args:
        device: of this rank.
        uncounted_bytes: of a GPU that torch's allocator does not count (`ShardedModel.uncounted_bytes`).
    """

    def __init__(self, device: torch.device, *, uncounted_bytes: int = 0) -> None:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._device, self._uncounted_bytes = device, uncounted_bytes
        self._excess_kib = 0
        self._looked_s = -math.inf

    def peak_bytes(self) -> int:
        """Returns the peak until now; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) + self._uncounted_bytes
        if sys.platform != "linux":
            return 0
        if time.monotonic() - self._looked_s > _LOOK_EVERY_S:  # the kernel walks all pages for it
            rollup = _kib_fields(_ROLLUP)
            self._excess_kib = rollup.get("Rss", 0) - rollup.get("Pss", 0)
            self._looked_s = time.monotonic()
        return (_kib_fields(Path("/proc/self/status")).get("VmHWM", 0) - self._excess_kib) * 1024


def forget_peak() -> int:
    """Sets the process's mark of memory back to what it has now, and returns that; 0 where the system does not."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESETS_PEAK)
        return _kib_fields(_ROLLUP).get("Pss", 0) * 1024
    return 0


def _kib_fields(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # some containers hide it
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}

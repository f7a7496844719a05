"""Memory of one rank: tensors counted exactly, and the process as the kernel sees it.

[Note: shared pages]
    Forked ranks share pages with each other (libraries, and weights in shared memory), and resident memory counts them
    in each. The peak here is the highest resident memory less the excess at the time of reading: resident
    minus proportional.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch.parallel_model import ParallelModel

_LOOK_EVERY_S = 10.0


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
    """Counts what this rank holds after a step, gradients included."""
    gradients = [held.local_grad for held in model.weights.values()]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return TensorBytes(
        weights=sum(held.local.nbytes for held in model.weights.values()),
        gradients=sum(grad.nbytes for grad in gradients if grad is not None),
        optimizer=sum((s.to_local() if isinstance(s, DTensor) else s).nbytes for s in states),
    )


class PeakMeter:
    """The most memory that this rank took so far: of the GPU if it computes on one, else of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._excess_kib = 0
        self._looked_s = -math.inf

    def peak_bytes(self) -> int:
        """Returns the peak until now; 0 where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if sys.platform != "linux":
            return 0
        if time.monotonic() - self._looked_s > _LOOK_EVERY_S:  # the kernel walks all pages for it
            rollup = _kib_fields(Path("/proc/self/smaps_rollup"))
            self._excess_kib = rollup.get("Rss", 0) - rollup.get("Pss", 0)
            self._looked_s = time.monotonic()
        return (_kib_fields(Path("/proc/self/status")).get("VmHWM", 0) - self._excess_kib) * 1024


def _kib_fields(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # some containers hide it
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}

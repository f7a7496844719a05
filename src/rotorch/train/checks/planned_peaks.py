"""Planned peaks of a run's ranks beside those that its ranks had: the last thing that a run says of its memory.

[Note: what is measured]
    A GPU's allocator tells the most that tensors took since training began, which is what plans predict; windows of
    symmetric memory are not its own. Of a CPU rank the kernel knows the process: what it took beyond what it had before
    there was a model, with gaps of the allocator, buffers of messages, and what loading, evaluating and saving took. So
    a process takes more than its tensors, by a share that falls with their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rotorch.core.quantities import format_bytes
from rotorch.mesh import device_type
from rotorch.parallel_model import ParallelModel
from rotorch.planner.memory import Memory
from rotorch.train.checks.counted_memory import counted_ranks
from rotorch.train.checks.memory import memory_of_ranks
from rotorch.train.checks.preflight import CheckedRun

LEAST_S = 20.0
"""Passes of a loop that took less need not be counted at its end, since that takes a second or more."""


@dataclass(frozen=True)
class PlannedPeaks:
    """Planned and measured peaks of memory.

    Attributes:
        planned_bytes: of tensors, by rank; none if passes cannot be counted.
        measured_bytes: by rank (see [Note: what is measured]); none where the system does not tell.
        on_gpus: ranks compute on GPUs.
        why_not: the reason if nothing is planned.
    """

    planned_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    on_gpus: bool
    why_not: str = ""

    def __str__(self) -> str:
        if not self.planned_bytes:
            return f"not counted: {self.why_not}"
        planned = max(self.planned_bytes)
        text = f"{format_bytes(planned)} of tensors at the highest moment of a step"
        if not self.measured_bytes:
            return text
        measured = self.measured_bytes[self.planned_bytes.index(planned)]
        if not self.on_gpus:
            return f"{text}; the process took {format_bytes(measured)} more than before there was a model"
        return f"{text}; measured {format_bytes(measured)} ({measured / planned - 1:+.1%})"


def planned_peaks(
    run: CheckedRun, model: ParallelModel, *, peaks: Sequence[int], before: int | None
) -> PlannedPeaks | None:
    """Counts the passes of a run that has come to its end. All ranks; returns the result on rank 0, else None.

    That may take some seconds.

    Args:
        run: the run.
        model: of this rank.
        peaks: the most memory each rank took, by rank; 0 where the system does not tell.
        before: bytes that this rank's process had when there was no model, 0 where the system does not tell; None on a
            GPU.
    """
    rank = model.mesh.get_rank() if run.num_ranks > 1 else 0
    found: Sequence[Memory | None]
    found, why_not = (), ""
    try:
        if rank == 0:
            found, why_not = counted_ranks(run)
    except Exception as error:  # a run that has ended well does not fail here
        why_not = f"{type(error).__name__}: {error}"
    told = peaks[rank] > 0 and before != 0
    # Behind it: the others wait here, where nobody takes that for a hang.
    measured = memory_of_ranks(model, {"peak": max(1, peaks[rank] - (before or 0)) if told else 0})["peak"]
    if rank != 0:
        return None
    planned = tuple(round(memory.total_bytes) for memory in found if memory is not None)
    return PlannedPeaks(
        planned, tuple(measured) if all(measured) else (), device_type(run.config.train.device) == "cuda", why_not
    )

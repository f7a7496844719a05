"""One optimizer step on all ranks: gradients, their norm, the update, and the one small reduction that goes with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import RankFailure
from rotorch.parallel_model import Batch, ParallelModel
from rotorch.train.memory import PeakMeter
from rotorch.train.optim import clip_gradients, set_learning_rate, squared_norm_share
from rotorch.train.status import Phase, StatusBoard


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    Attributes:
        loss: per target token over the global batch, in nats, before the update.
        grad_norm: global, before clipping.
        peak_bytes: of each rank so far, by rank.
        stop: whether the run was asked to stop; all ranks see it after the same step.
    """

    loss: float
    grad_norm: float
    peak_bytes: tuple[int, ...]
    stop: bool


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    *,
    batches: Sequence[Batch],
    lr: float,
    clip_norm: float,
    peak: PeakMeter,
    board: StatusBoard,
) -> StepResult:
    """Does one step. All ranks; gradients are still there when it returns.

    Args:
        model: the model.
        optimizer: over its parameters.
        batches: this rank's micro-batches.
        lr: learning rate of this step.
        clip_norm: see `clip_gradients`.
        peak: of this rank.
        board: where this rank notes what it is doing, and learns that it is asked to stop.

    Raises:
        RankFailure: if the loss or the gradients are not finite; nothing is updated then.
    """
    optimizer.zero_grad(set_to_none=True)
    board.doing(Phase.FORWARD_BACKWARD)
    loss = float(model.forward_backward(batches))
    board.doing(Phase.CLIPPING)
    squared_norm, stop, peaks = _agree(
        model, squared_norm=squared_norm_share(model), stop=board.stop_requested, peak_bytes=peak.peak_bytes()
    )
    norm = math.sqrt(squared_norm) if math.isfinite(squared_norm) else squared_norm
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise RankFailure(
            f"the loss is {loss:.6g} and the gradient norm {norm:.6g}: training has diverged. Lower optimizer.lr "
            f"(it is {lr:.3g} here), or lengthen optimizer.warmup_steps"
        )
    clip_gradients(model, norm=norm, clip_norm=clip_norm)
    board.doing(Phase.OPTIMIZER)
    set_learning_rate(optimizer, lr=lr)
    optimizer.step()
    return StepResult(loss=loss, grad_norm=norm, peak_bytes=peaks, stop=stop)


def _agree(
    model: ParallelModel, *, squared_norm: float, stop: bool, peak_bytes: int
) -> tuple[float, bool, tuple[int, ...]]:
    """Sums the norm's shares, and with them tells all ranks who was asked to stop and how much memory each took."""
    num_ranks = model.mesh.size()
    rank = model.mesh.get_rank() if num_ranks > 1 else 0
    numbers = torch.zeros(2 + num_ranks, dtype=torch.float64)
    numbers[0], numbers[1], numbers[2 + rank] = squared_norm, float(stop), float(peak_bytes)
    all_reduce_sum(numbers, mesh=model.mesh)
    total, stops, *peaks = numbers.tolist()
    return total, stops > 0, tuple(int(peak) for peak in peaks)

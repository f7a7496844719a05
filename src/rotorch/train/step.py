"""One optimizer step on all ranks: gradients, their norm, the update, and the one small reduction that goes with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotorch.comm.collectives import all_reduce_sum
from rotorch.parallel_model import Batch, ParallelModel
from rotorch.train.checks.memory import PeakMeter
from rotorch.train.launch.status import RankPhase, StatusBoard
from rotorch.train.metrics import Rewards
from rotorch.train.optim import clip_gradients, set_learning_rate, squared_norm_share


@dataclass(frozen=True)
class StepResult:
    """Result of a step, known to all ranks.

    Attributes:
        loss: per target token over the global batch, in nats, before the update.
        grad_norm: global, before clipping.
        peak_bytes: of each rank so far, by rank.
        stop: True if the run was asked to stop; all ranks see it after the same step.
        updated: True if the weights were updated: not where loss or norm are not finite, or the loss is a spike.
        rewards: of preference pairs, before the update; None of text.
    """

    loss: float
    grad_norm: float
    peak_bytes: tuple[int, ...]
    stop: bool
    updated: bool
    rewards: Rewards | None = None


def train_step(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    *,
    batches: Sequence[Batch],
    lr: float,
    clip_norm: float,
    highest_loss: float,
    peak: PeakMeter,
    board: StatusBoard,
    examine: Callable[[], None] = lambda: None,
) -> StepResult:
    """Does one step, or leaves the weights as they are if its numbers went wrong: all ranks the same.

    All ranks; gradients are still there when it returns.

    Args:
        model: the model.
        optimizer: over its parameters.
        batches: this rank's micro-batches.
        lr: learning rate of this step.
        clip_norm: see `clip_gradients`.
        highest_loss: a higher loss is not learnt from.
        peak: of this rank.
        board: board on which this rank notes its activity, and reads the request to stop.
        examine: called once there are gradients, before anything follows from them.
    """
    optimizer.zero_grad(set_to_none=True)
    board.doing(RankPhase.FORWARD_BACKWARD)
    found = model.forward_backward(batches)
    mean, beside = found if isinstance(found, tuple) else (found, ())
    loss, rewards = float(mean), rewards_of(model, beside)
    examine()
    board.doing(RankPhase.CLIPPING)
    squared_norm, stop, is_wrong, peaks = _agree(
        model,
        squared_norm=squared_norm_share(model),
        stop=board.stop_requested,
        is_wrong=not math.isfinite(loss) or loss > highest_loss,
        peak_bytes=peak.peak_bytes(),
    )
    norm = math.sqrt(squared_norm) if math.isfinite(squared_norm) else squared_norm
    if is_wrong or not math.isfinite(norm):
        return StepResult(loss, norm, peaks, stop=stop, updated=False, rewards=rewards)
    clip_gradients(model, norm=norm, clip_norm=clip_norm)
    board.doing(RankPhase.OPTIMIZER)
    set_learning_rate(optimizer, lr=lr)
    optimizer.step()
    return StepResult(loss, norm, peaks, stop=stop, updated=True, rewards=rewards)


def rewards_of(model: ParallelModel, beside: Sequence[Mapping[str, Tensor]]) -> Rewards | None:
    """Means of the rewards that a loss over preference pairs gave beside itself; None of another loss. All ranks.

    Sends three numbers.
    """
    if not beside:
        return None
    sums = torch.stack([of_batch["rewards"].cpu() for of_batch in beside]).sum(0)
    margin, right, num_pairs = all_reduce_sum(sums, mesh=model.mesh).tolist()  # ranks of a batch: all alike
    return Rewards(margin / max(num_pairs, 1), right / max(num_pairs, 1))


def _agree(
    model: ParallelModel, *, squared_norm: float, stop: bool, is_wrong: bool, peak_bytes: int
) -> tuple[float, bool, bool, tuple[int, ...]]:
    """Sums the norm's shares, and in the same message stop requests and each rank's peak of memory."""
    num_ranks = model.mesh.size()
    rank = model.mesh.get_rank() if num_ranks > 1 else 0
    numbers = torch.zeros(3 + num_ranks, dtype=torch.float64)
    numbers[0], numbers[1], numbers[2], numbers[3 + rank] = (
        squared_norm,
        float(stop),
        float(is_wrong),
        float(peak_bytes),
    )
    all_reduce_sum(numbers, mesh=model.mesh)
    total, stops, wrongs, *peaks = numbers.tolist()
    return total, stops > 0, wrongs > 0, tuple(int(peak) for peak in peaks)

"""rotorch's own module in a training loop as people write it: the cost of the door beside `forward_backward`."""

from __future__ import annotations

from contextlib import nullcontext

from rotorch.bench.contender import UnderLayout
from rotorch.bench.task import Task
from rotorch.models.losses import causal_lm_loss, count_targets


class OwnLoop(UnderLayout):
    """A model under `parallelize` that is called, and whose loss is taken backward, by the loop itself.

    Args:
        task: what to train.
        rank: of this process; a layout's ranks know their shares.
        parallel: its layout; `{n}`: the task's ranks.
    """

    def __init__(self, task: Task, *, rank: int, parallel: str = "rtp={n}") -> None:
        super().__init__(task, parallel=parallel.replace("{n}", str(task.num_ranks)))

    def forward_backward(self, step: int) -> float:
        """As `Contender` says, but returns the loss per target token of this rank's share, as other loops do."""
        batches = self.batches(step)
        num_targets, total = sum(map(count_targets, batches)), 0.0
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self.module.no_sync():
                loss = causal_lm_loss(self.model, batch, num_targets)
                loss.backward()
            total += float(loss.detach())
        return total

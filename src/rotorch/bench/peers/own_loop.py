"""rotorch's own module in a training loop as people write it: the cost of the door beside `forward_backward`."""

from __future__ import annotations

from rotorch.bench.contender import UnderLayout
from rotorch.bench.task import Task
from rotorch.models.losses import causal_lm_loss, count_targets


class OwnLoop(UnderLayout):
    """A model under `parallelize` that is called, and whose loss is taken backward, by the loop itself.

    Args:
        task: what to train.
        rank: of this process; a layout's ranks know their shares.
        transport: of rtp.
    """

    def __init__(self, task: Task, *, rank: int, transport: str = "auto") -> None:
        super().__init__(task, parallel=f"rtp={task.num_ranks}[transport={transport}]")

    def forward_backward(self, step: int) -> float:
        """As `Contender` says, but returns the loss per target token of this rank's share, as other loops do."""
        batches = self.batches(step)
        num_targets, total = sum(map(count_targets, batches)), 0.0
        for batch in batches:
            loss = causal_lm_loss(self.model, batch, num_targets)
            loss.backward()
            total += float(loss.detach())
        return total

"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290, equation 7), over batches of pairs of responses.

[Note: rows of a pair]
    A batch of `B` pairs has `2 B` rows: the chosen responses behind their prompts, then the rejected ones in the same
    order. Log-probabilities are summed over a row's targets. A pair without a target fills up a batch and counts for
    nothing. `reference_log_probs` of a batch are the same sums under the frozen model that training started from; a
    batch without them has zeros, which is of use to whoever asks for the sums alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotorch.models.losses import Batch

IGNORED = -100
REFERENCE = "reference_log_probs"
"""Entry of a batch: float64 [2 B], by row."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss `-log sigmoid(margin)` of each pair, as `parallelize(loss=...)` takes it; its targets are pairs.

    Attributes:
        beta: strength of the tie to the reference.
    """

    beta: float

    def count_targets(self, batch: Batch) -> int:
        """Number of pairs of one micro-batch."""
        return int(_is_pair(batch["shift_labels"]).sum())

    def __call__(self, module: nn.Module, batch: Batch, num_targets: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the losses over `num_targets`, and what else is known of the batch.

        Returns:
            The loss, and `log_probs`, float64 [2 B]: of each row under the model; with `rewards`, float64 [3]: the sum
            of reward margins, the number of pairs whose margin is above 0, and that of all pairs. A response's reward
            is `beta` times its log-probability over that of the reference.
        """
        labels = batch["shift_labels"]
        log_probs = row_log_probs(module, batch["input_ids"], labels)
        chosen, rejected = (log_probs - batch.get(REFERENCE, torch.zeros_like(log_probs))).chunk(2)
        margins, counts = self.beta * (chosen - rejected), _is_pair(labels)
        loss = -(F.logsigmoid(margins) * counts).sum() / num_targets
        sums = [(margins * counts).sum(), ((margins > 0) & counts).sum(), counts.sum()]
        rewards = torch.stack([found.to(margins.dtype) for found in sums])
        return loss, {"log_probs": log_probs, "rewards": rewards}


def row_log_probs(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of rows, summed over their targets in float64, shape [rows].

    Args:
        module: a causal language model, called once; logits that a layout defers stay deferred.
        input_ids: int64 [rows, sequence], filled up at their ends.
        labels: the ids that follow each, int64 [rows, sequence]; -100 for what is no target.
    """
    logits = module(input_ids=input_ids, use_cache=False).logits
    if logits.dtype != torch.float64:
        logits = logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(labels.shape).sum(-1, dtype=torch.float64)


def _is_pair(labels: Tensor) -> Tensor:
    """True for each pair of a batch that has targets, bool [B]."""
    return (labels != IGNORED).any(-1).chunk(2)[0]

"""A language-model head whose vocabulary is cut over ranks that share a batch: each makes the logits of its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.profiler import record_function

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Range
from rotorch.ops.conjugates import gather_from_region
from rotorch.ops.cut_features import cut_cross_entropy
from rotorch.ops.deferred_logits import LOGITS_BLOCK, Elementwise, Head, replay


@dataclass(frozen=True)
class CutHead(Head):
    """A head whose logits' columns are cut over the ranks of an axis group.

    Attributes:
        axis_group: the ranks.
        columns: each rank's columns of the vocabulary, by position.
        product: makes this rank's logits of hidden states.
    """

    axis_group: AxisGroup
    columns: tuple[Range, ...]
    product: Callable[[Tensor], Tensor]

    @property
    def vocab_size(self) -> int:
        return sum(r.length for r in self.columns)

    def logits(self, hidden: Tensor) -> Tensor:
        lengths = [r.length for r in self.columns]
        # For code that asks for logits themselves; the loss below takes only this rank's columns.
        return gather_from_region(self.product(hidden), dim=-1, lengths=lengths, axis_group=self.axis_group)

    def loss(self, hidden_BD: Tensor, target_B: Tensor, *, chain: tuple[Elementwise, ...], ignore_index: int) -> Tensor:
        with record_function(LOGITS_BLOCK):
            logits_BV = replay(self.product(hidden_BD), chain)
        mine = self.columns[self.axis_group.position]
        return cut_cross_entropy(self.axis_group, logits_BV, target_B, columns=mine, ignore_index=ignore_index)

"""The use of a weight in blocks on a grid of ranks: products of blocks, on this rank's features."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Range, Weight
from rotorch.ops.conjugates import reduce_from_region, scatter_to_region
from rotorch.ops.cut_features import look_up_on_grid
from rotorch.ops.cut_head import CutHead
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.summa import Grid, summa_linear, summa_table_linear
from rotorch.ops.weight_proxy import WeightUse


@dataclass(frozen=True)
class GridUse(WeightUse):
    """One matrix on a grid.

    Attributes:
        weight: the whole weight's description, with its cut.
        block: this rank's part of it.
        grid: this rank's position.
        strategy: kind of the strategy, for errors.
        head: True if products with it are logits.
        biased: True if its layer has a bias.
    """

    weight: Weight
    block: Tensor
    grid: Grid
    strategy: str
    head: bool
    biased: bool = False

    @property
    def is_table(self) -> bool:
        """True if rows of the weight lie in rows of the grid."""
        return self.weight.grid is not None and self.weight.grid.is_table

    def ranges(self, cut: Cut | None) -> tuple[Range, ...]:
        """Each position's one range along a cut, over an axis group."""
        if cut is None:
            raise AssertionError(f"{self.weight.name} is not cut")
        size, n = self.weight.shape[cut.dim], self.grid.across.size
        return tuple(cut.ranges(size, num_slices=n, index=k)[0] for k in range(n))

    @property
    def vocabulary(self) -> tuple[Range, ...]:
        """Rows of a table by row of the grid, or rows of a head by column of the grid."""
        if self.weight.grid is None:
            raise AssertionError(f"{self.weight.name} has no cut on a grid")
        return self.ranges(self.weight.grid.rows if self.is_table else self.weight.grid.columns)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product of blocks; of a classifier, summed over the row of the grid."""
        across = self.grid.across
        if self.weight.grid is not None and self.weight.grid.whole_output:
            if bias is None and self.biased and across.size > 1:
                raise ConfigError(
                    f"{self.strategy}: {self.weight.name!r} is used without its layer's bias: if that is added "
                    f"separately, its gradient would be counted {across.size} times. Call the layer itself, or write "
                    "rtp or fsdp"
                )
            # The bias is whole on every rank and its gradients are summed over them: so one of each row adds it.
            mine = F.linear(x, self.block, bias if across.position == 0 else None)
            return reduce_from_region(mine, axis_group=across)
        if across.size > 1 and not self.is_table and x.shape[-1] == self.weight.shape[1]:
            # An input from outside of the model is whole (patches of an image): each rank takes its features of it.
            lengths = [r.length for r in self.ranges(self.weight.grid.rows if self.weight.grid else None)]
            x = scatter_to_region(x, dim=-1, lengths=lengths, axis_group=across)

        def product(x: Tensor) -> Tensor:
            if not self.is_table:
                return summa_linear(self.grid, x, self.block, bias)
            y = summa_table_linear(self.grid, x, self.block, num_rows=[r.length for r in self.vocabulary])
            return y if bias is None else y + bias

        # The product waits for the loss: whole logits of a row would be gathered, which the cut loss never needs.
        return DeferredLogits(x, CutHead(across, self.vocabulary, product)) if self.head else product(x)

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """This rank's features of the rows, looked up among the ranks of its column of the grid."""
        if not self.is_table:
            return None
        rows = self.vocabulary[self.grid.down.position]
        return look_up_on_grid(self.grid, ids, self.block, rows=rows, padding_idx=padding_idx)

    def refusal(self) -> str:
        """Refuses always: no rank has a whole activation to use a whole weight on."""
        return "cannot take a weight that lies in blocks on a grid of ranks. Write rtp or fsdp"

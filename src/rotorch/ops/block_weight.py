"""A weight that lies in blocks on a grid of ranks, in the place where a module looks for it.

A `BlockWeight` has the weight's whole shape; it answers linear layers and look-ups with products of blocks. So a
layer's own forward runs as it is, on this rank's part of the features.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Range, Weight
from rotorch.ops.conjugates import reduce_from_region, scatter_to_region
from rotorch.ops.cut_features import look_up_on_grid
from rotorch.ops.cut_head import CutHead
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.ids_in_slice import check_ids
from rotorch.ops.stand_in import StandInWeight
from rotorch.ops.summa import Grid, summa_linear, summa_table_linear


class BlockWeight(StandInWeight):
    """Stands for one matrix on a grid.

    Attributes:
        weight: which, with its cut.
        block: this rank's part of it.
        grid: this rank's place.
        head: whether products with it are logits.
        biased: whether its layer has a bias.
    """

    weight: Weight
    block: Tensor
    grid: Grid
    head: bool
    biased: bool

    @staticmethod
    def __new__(cls, weight: Weight, block: Tensor, *, grid: Grid, head: bool, biased: bool = False) -> BlockWeight:
        """Makes the stand-in for `weight`, with the dtype and device of its `block`."""
        self = wrapper_tensor(cls, weight.shape, like=block)
        self.weight, self.block, self.grid, self.head, self.biased = weight, block, grid, head, biased
        return self

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Multiplies blocks, or looks up in them."""
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        held = next((a for a in (*args, *kwargs.values()) if isinstance(a, BlockWeight)), None)
        raise ConfigError(
            f"{held.weight.name if held else 'a weight'!r} is used by {getattr(func, '__name__', func)!r}, which "
            "cannot take a weight that lies in blocks on a grid of ranks. Write rtp or fsdp"
        )

    @property
    def is_table(self) -> bool:
        """Whether rows of the weight lie in rows of the grid."""
        return self.weight.grid is not None and self.weight.grid.is_table

    def ranges(self, cut: Cut | None) -> tuple[Range, ...]:
        """Where each position of a line lies along a cut in one range each."""
        if cut is None:
            raise AssertionError(f"{self.weight.name} is not cut")
        size, n = self.weight.shape[cut.dim], self.grid.across.size
        return tuple(cut.ranges(size, num_slices=n, index=k)[0] for k in range(n))

    @property
    def vocabulary(self) -> tuple[Range, ...]:
        """The rows that each row, or column, of the grid has of a table, or a head."""
        if self.weight.grid is None:
            raise AssertionError(f"{self.weight.name} has no place on a grid")
        return self.ranges(self.weight.grid.rows if self.is_table else self.weight.grid.columns)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, BlockWeight):
        raise ConfigError("a bias lies in blocks on a grid of ranks, but its weight does not. Write rtp or fsdp")
    grid, block = weight.grid, weight.block
    if weight.weight.grid is not None and weight.weight.grid.whole_output:
        if bias is None and weight.biased and grid.across.size > 1:
            raise ConfigError(
                f"{weight.weight.name!r} is used without its layer's bias, whose gradient would be counted "
                f"{grid.across.size} times where that is added apart. Call the layer itself, or write rtp or fsdp"
            )
        # The bias is whole on every rank and its gradients are summed over them: so one of each row adds it.
        mine = F.linear(input, block, bias if grid.across.position == 0 else None)
        return reduce_from_region(mine, line=grid.across)
    if grid.across.size > 1 and not weight.is_table and input.shape[-1] == weight.shape[1]:
        # What comes from outside is whole (patches of an image): of that each rank takes its features.
        lengths = [r.length for r in weight.ranges(weight.weight.grid.rows if weight.weight.grid else None)]
        input = scatter_to_region(input, dim=-1, lengths=lengths, line=grid.across)

    def product(x: Tensor) -> Tensor:
        if not weight.is_table:
            return summa_linear(grid, x, block, bias)
        y = summa_table_linear(grid, x, block, num_rows=[r.length for r in weight.vocabulary])
        return y if bias is None else y + bias

    return DeferredLogits(input, CutHead(grid.across, weight.vocabulary, product)) if weight.head else product(input)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(weight, BlockWeight) or not weight.is_table or max_norm is not None or sparse:
        raise ConfigError("an embedding with max_norm or sparse gradients cannot lie in blocks on a grid of ranks")
    num_rows = weight.weight.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_rows
    check_ids(input, num_rows=num_rows, of=f"{weight.weight.name!r}: token")
    rows = weight.vocabulary[weight.grid.down.position]
    return look_up_on_grid(weight.grid, input, weight.block, rows=rows, padding_idx=padding_idx)

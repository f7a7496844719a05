"""A weight that is cut along its output over ranks that share a batch, used with this rank's shard (megatron).

The shard itself may rotate (rtp around megatron): then it is a proxy, and its own use answers the layer's function.

A linear layer or a convolution computes some of its outputs, which are then gathered; a look-up answers the tokens in
its rows, and the answers are summed; a head's logits are deferred, and the loss takes each rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Range, Weight
from rotorch.ops.conjugates import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    sum_of_parts,
)
from rotorch.ops.conv import PLAIN
from rotorch.ops.cut_head import CutHead
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.ids_in_slice import look_up
from rotorch.ops.loss import SharedVocabulary
from rotorch.ops.ring_use import RingUse
from rotorch.ops.weight_proxy import WeightProxy, WeightUse, use_of


@dataclass(frozen=True)
class ShardUse(WeightUse):
    """One weight of a WEIGHT unit, of which this rank holds one range of a dim.

    Attributes:
        weight: the whole weight's description.
        shard: this rank's part: a plain parameter, or the proxy of one whose slices visit.
        axis_group: the ranks over which it is cut.
        strategy: kind of the strategy, for errors.
        head: True if products with it are logits.
        by_plan: True if the user's own plan says that it is cut; then no function gets it whole.
        equal: True if activations are the same on all ranks, as are their gradients; else each rank's gradients are
            parts of sums (`ops/conjugates.py`, PartlySyncedRegion).
    """

    weight: Weight
    shard: Tensor
    axis_group: AxisGroup
    strategy: str
    head: bool = False
    by_plan: bool = False
    equal: bool = True

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """Every rank's range along the dim that is cut."""
        cut, n = self.weight.cut, self.axis_group.size
        if cut is None or cut.blocks > 1:
            raise AssertionError(f"{self.weight.name} is not cut in one block")
        return tuple(cut.ranges(self.weight.shape[cut.dim], num_slices=n, index=k)[0] for k in range(n))

    @property
    def _dim(self) -> int:
        if self.weight.cut is None:
            raise AssertionError(f"{self.weight.name} is not cut")
        return self.weight.cut.dim

    @property
    def _lengths(self) -> list[int]:
        return [r.length for r in self.ranges]

    def _enter(self, x: Tensor) -> Tensor:
        # Gradients of unequal activations are parts of sums throughout: nothing is summed at the input.
        return copy_to_region(x, axis_group=self.axis_group) if self.equal else x

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """This rank's outputs, gathered over ranks; a head's logits are deferred."""
        if self._dim != 0:
            return None
        own_bias = self._own_bias(bias)
        if self.head:
            if bias is not None and own_bias is None:
                # A bias that is whole on every rank: the head's columns are cut, so each rank adds its own part.
                own_bias = scatter_to_region(bias, dim=0, lengths=self._lengths, axis_group=self.axis_group)
            inner = use_of(self.shard)
            if isinstance(inner, RingUse):
                shared = SharedVocabulary(self.axis_group, self.ranges)
                # None for a bias that does not travel: then this rank's logits are real.
                if (rotating := inner.rotating_head(own_bias, shared=shared)) is not None:
                    return DeferredLogits(x, rotating)

            def product(hidden: Tensor) -> Tensor:
                return F.linear(self._enter(hidden), self.shard, own_bias)

            return DeferredLogits(x, CutHead(self.axis_group, self.ranges, product))
        return self._gathered(F.linear(self._enter(x), self.shard, own_bias), bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The same for a matrix that is cut along its columns, which are the outputs."""
        if self._dim != 1 or self.head:
            return None
        return self._gathered(F.linear(self._enter(x), self.shard.t(), self._own_bias(bias)), bias)

    def _gathered(self, output: Tensor, bias: Tensor | None) -> Tensor:
        output = gather_from_region(output, dim=-1, lengths=self._lengths, axis_group=self.axis_group)
        # A whole bias only now: added before the gather it would meet this rank's columns alone.
        return output if bias is None or self._own_bias(bias) is not None else output + bias

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """Rows of this rank's shard, summed over ranks."""
        if self._dim != 0:
            return None
        found = look_up(ids, self.shard, rows=self.ranges[self.axis_group.position], padding_idx=padding_idx)
        # Where activations differ the gradient is a part as well, and must be summed too.
        total = reduce_from_region if self.equal else sum_of_parts
        return total(found, axis_group=self.axis_group)

    def convolution(
        self, func: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """This rank's output channels, gathered over ranks; not of grouped and transposed convolutions."""
        names = ("stride", "padding", "dilation", "groups")
        groups = {**dict(zip(names, args, strict=False)), **kwargs}.get("groups", 1)
        # A range of output channels is not a range of groups, and a convolution with no channels is an error in torch.
        if self._dim != 0 or groups != 1 or 0 in self._lengths or func not in PLAIN:
            return None
        own_bias = self._own_bias(bias)
        output = func(copy_to_region(x, axis_group=self.axis_group), self.shard, own_bias, *args, **kwargs)
        # Counted from the end: an input may come without a batch dim.
        channels = output.dim() - 1 - PLAIN[func]
        output = gather_from_region(output, dim=channels, lengths=self._lengths, axis_group=self.axis_group)
        if bias is None or own_bias is not None:
            return output
        return output + bias.view(-1, *[1] * PLAIN[func])

    @staticmethod
    def _own_bias(bias: Tensor | None) -> Tensor | None:
        use = use_of(bias)
        return use.shard if isinstance(use, ShardUse) else None

    def refusal(self) -> str | None:
        """Refuses weights of a user's own plan, which is taken literally, and where activations are not equal."""
        if self.by_plan:
            return "cannot take a weight that is cut. Give it no role in the plan, or use fsdp"
        if not self.equal:
            return "takes no slices, and ranks' activations differ under sync_fraction. Leave sync_fraction out"
        return None

    def copies_whole(self) -> bool:
        """False on one rank."""
        return self.axis_group.size > 1

    @classmethod
    def gather(cls, uses: Sequence[ShardUse]) -> list[Tensor]:
        """Gathers each weight; its gradient is equal on all ranks, and each rank takes its own shard's part."""
        rotating = [use for u in uses if isinstance(use := use_of(u.shard), RingUse)]
        come = iter(RingUse.gather(rotating))  # all in one call: a matrix and its bias travel together
        shards = [next(come) if isinstance(u.shard, WeightProxy) else u.shard for u in uses]
        return [
            gather_from_region(shard, dim=u._dim, lengths=u._lengths, axis_group=u.axis_group)
            for u, shard in zip(uses, shards, strict=True)
        ]

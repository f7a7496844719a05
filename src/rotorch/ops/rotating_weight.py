"""A weight that goes round, in the place where a module looks for it.

A `RotatingWeight` stands in a module for a weight that no rank holds whole. It has the weight's shape and dtype, and
answers the functions that use a weight as a whole (`linear`, `embedding`) by rotating, or as they are where all
slices lie side by side. So a layer's own forward runs as it is.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Weight
from rotorch.ops.linear import rotate_embedding, rotate_linear
from rotorch.ops.loss import DeferredLogits
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.side_by_side import embedding_side_by_side, linear_side_by_side
from rotorch.ops.stand_in import StandIn


class RotatingWeight(StandIn):
    """Stands for one weight of a WEIGHT unit.

    Attributes:
        weight: which.
        unit: the unit that it belongs to.
        head: whether products with it are logits, which the loss takes slice by slice.
        keep_logits: whether the loss keeps them for backward.
    """

    weight: Weight
    unit: RotatingUnit
    head: bool
    keep_logits: bool

    @staticmethod
    def __new__(
        cls, like: Tensor, *, weight: Weight, unit: RotatingUnit, head: bool, keep_logits: bool
    ) -> RotatingWeight:
        """Makes the stand-in for `weight`, with the dtype and device of `like`."""
        self = wrapper_tensor(cls, weight.shape, like=like)
        self.weight, self.unit, self.head, self.keep_logits = weight, unit, head, keep_logits
        return self

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Rotates where the weight is used as a whole; refuses whatever else is done with it."""
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        held = next((a for a in [*args, *kwargs.values()] if isinstance(a, RotatingWeight)), None)
        raise ConfigError(
            f"rtp: {held.weight.name if held is not None else 'a weight'!r} is used by "
            f"{getattr(func, '__name__', func)!r}, "
            "which cannot take a weight that goes round. Give it no role in the plan, or use fsdp"
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, RotatingWeight):
        raise ConfigError("rtp: a bias goes round but its weight does not. Give both the same role in the plan")
    cut_bias = bias.unit if isinstance(bias, RotatingWeight) else None
    together = cut_bias is weight.unit
    if weight.head and (bias is None or together):
        return DeferredLogits(input, weight.unit, keep=weight.keep_logits)
    if weight.unit.whole is not None:
        return linear_side_by_side(weight.unit, input, bias=bias if cut_bias is None else cut_bias)
    output = rotate_linear(weight.unit, input)
    return output if bias is None or together else output + bias


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(weight, RotatingWeight) or max_norm is not None or scale_grad_by_freq or sparse:
        raise ConfigError("rtp: an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot go round")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.weight.shape[0]
    embedding = rotate_embedding if weight.unit.whole is None else embedding_side_by_side
    return embedding(weight.unit, input, padding_idx=padding_idx)

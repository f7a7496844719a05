"""A weight that goes round, in the place where a module looks for it.

A `RotatingWeight` stands in a module for a weight that no rank holds whole. It has the weight's shape and dtype, and
answers the functions that use a weight as a whole (`linear`, `embedding`, convolutions) by rotating, or as they are
where all slices lie side by side. So a layer's own forward runs as it is.

Where a user's plan gave the weight its role, any other use is refused. Where nobody said so, the weight is made whole
for that use (`ops/gather_weight.py`), and the log says so once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import tree_flatten, tree_unflatten, wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Weight
from rotorch.ops.conv import CONVOLUTIONS, rotate_conv
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.gather_weight import gather_weights
from rotorch.ops.linear import rotate_embedding, rotate_linear
from rotorch.ops.loss import RotatingHead
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.side_by_side import embedding_side_by_side, linear_side_by_side
from rotorch.ops.stand_in import StandInWeight, writes

_log = logging.getLogger(__name__)


class RotatingWeight(StandInWeight):
    """Stands for one weight of a WEIGHT unit.

    Attributes:
        weight: which.
        unit: the unit that it belongs to.
        head: whether products with it are logits, which the loss takes slice by slice.
        keep_logits: whether the loss keeps them for backward.
        by_plan: whether the user's own plan says that it goes round; then other uses are refused.
        was_whole: whether it has been made whole for a use; the log tells once.
    """

    weight: Weight
    unit: RotatingUnit
    head: bool
    keep_logits: bool
    by_plan: bool
    was_whole: bool

    @staticmethod
    def __new__(
        cls, like: Tensor, *, weight: Weight, unit: RotatingUnit, head: bool, keep_logits: bool, by_plan: bool = True
    ) -> RotatingWeight:
        """Makes the stand-in for `weight`, with the dtype and device of `like`."""
        self = wrapper_tensor(cls, weight.shape, like=like)
        self.weight, self.unit, self.head, self.keep_logits = weight, unit, head, keep_logits
        self.by_plan, self.was_whole = by_plan, False
        return self

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Rotates where the weight is used by a layer; makes it whole for other uses, or refuses them."""
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding and not _is_special(kwargs):
            return _embedding(*args, **kwargs)
        if func in CONVOLUTIONS:
            return _convolution(func, *args, **kwargs)
        return _whole_for(func, args, kwargs)


def _whole_for(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` with whole weights in place of the stand-ins among its arguments."""
    leaves, tree = tree_flatten((args, kwargs))
    held = [leaf for leaf in leaves if isinstance(leaf, RotatingWeight)]
    name = getattr(func, "__name__", str(func))
    if not held or any(one.by_plan for one in held):
        raise ConfigError(
            f"rtp: {held[0].weight.name if held else 'a weight'!r} is used by {name!r}, "
            "which cannot take a weight that goes round. Give it no role in the plan, or use fsdp"
        )
    if isinstance(leaves[0], RotatingWeight) and writes(func):
        raise ConfigError(
            f"rtp: {leaves[0].weight.name!r} is changed by {name!r} in forward: no rank holds all of it, and what one "
            "changes others do not see. Change weights between steps, in `model.weights[..].local`"
        )
    whole: dict[int, list[Tensor]] = {}
    for one in held:
        if id(one.unit) not in whole:
            whole[id(one.unit)] = gather_weights(one.unit)
        if not one.was_whole and one.unit.whole is None:  # else it lies there whole, in shared memory
            one.was_whole = True
            _log.warning(
                "rtp: %r is used by %r, which takes no slices: its %d bytes are whole on every rank for that time",
                one.weight.name, name, one.weight.num_bytes,
            )  # fmt: skip
    given = [
        whole[id(leaf.unit)][leaf.unit.unit.weights.index(leaf.weight)] if isinstance(leaf, RotatingWeight) else leaf
        for leaf in leaves
    ]
    args, kwargs = tree_unflatten(given, tree)
    return func(*args, **kwargs)


def _convolution(
    func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    if not isinstance(weight, RotatingWeight):  # only the bias goes round
        return _whole_for(func, (input, weight, bias, *args), kwargs)
    if weight.unit.whole is not None:
        (whole,) = gather_weights(weight.unit)
        if isinstance(bias, RotatingWeight):
            (bias,) = gather_weights(bias.unit)
        return func(input, whole, bias, *args, **kwargs)
    together = isinstance(bias, RotatingWeight) and bias.unit is weight.unit
    if not together and len(weight.unit.unit.weights) > 1:  # slices travel with a bias that is not asked for here
        return _whole_for(func, (input, weight, bias, *args), kwargs)
    output = rotate_conv(func, weight.unit, input, *args, **kwargs)
    if bias is None or together:
        return output
    return output + bias.view(-1, *[1] * (weight.dim() - 2))


def _is_special(kwargs: dict[str, Any]) -> bool:
    """Whether a look-up does more than look up."""
    return bool(kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, RotatingWeight):  # only the bias goes round
        return _whole_for(F.linear, (input, weight, bias), {})
    cut_bias = bias.unit if isinstance(bias, RotatingWeight) else None
    together = cut_bias is weight.unit
    if not together and weight.unit.whole is None and len(weight.unit.unit.weights) > 1:
        # Slices of a layer travel with their bias, which rotate_linear adds: this use is of the matrix alone.
        return _whole_for(F.linear, (input, weight, bias), {})
    if weight.head and (together or (bias is None and len(weight.unit.unit.weights) == 1)):
        return DeferredLogits(input, RotatingHead(weight.unit, weight.keep_logits))
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

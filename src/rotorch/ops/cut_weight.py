"""A weight that is cut over ranks which share a batch, in the place where a module looks for it.

A `CutWeight` has the whole weight's shape and dtype, and answers the functions that use a weight with this rank's slice
of it: a linear layer or a convolution computes some of its outputs, which are then placed side by side; a look-up
answers the tokens in its rows, and the answers sum; a head's logits are deferred, and the loss takes them cut. So a
layer's own forward runs as it is. Any other use sees the weight whole: gathered for that time, or refused where the
user's own plan says that it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import tree_flatten, tree_unflatten, wrapper_tensor
from rotorch.comm.line import Line
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range, Unit, Weight
from rotorch.ops.conjugates import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    sum_of_parts,
)
from rotorch.ops.cut_head import CutHead
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.ids_in_slice import check_ids, look_up
from rotorch.ops.stand_in import StandInWeight, writes

_log = logging.getLogger(__name__)

_CONVOLUTIONS: dict[Callable[..., Tensor], int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


@dataclass
class CutUse:
    """What the cut weights of one unit have in common on this rank.

    Attributes:
        unit: the unit.
        line: the ranks over which it is cut.
        strategy: kind of the strategy, for errors.
        by_plan: whether the user's own plan says that it is cut; then unforeseen uses are refused.
        equal: whether activations are the same on all ranks, as are their gradients; else each rank's gradients are
            parts of sums (`ops/conjugates.py`, PartlySynced).
        gathered: names of weights that have been made whole for a use; the log tells once.
    """

    unit: Unit
    line: Line
    strategy: str
    by_plan: bool
    equal: bool = True
    gathered: set[str] = field(default_factory=set)

    def enter(self, x: Tensor) -> Tensor:
        """An activation, as what is cut sees it."""
        return copy_to_region(x, line=self.line) if self.equal else x

    def leave(self, x: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        return reduce_from_region(x, line=self.line) if self.equal else sum_of_parts(x, line=self.line)


class CutWeight(StandInWeight):
    """Stands for one weight of a WEIGHT unit.

    Attributes:
        weight: which.
        local: this rank's slice, a plain parameter.
        use: what it shares with the other weights of its unit.
    """

    weight: Weight
    local: Tensor
    use: CutUse

    @staticmethod
    def __new__(cls, local: Tensor, *, weight: Weight, use: CutUse) -> CutWeight:
        """Makes the stand-in for `weight`, of which this rank holds `local`."""
        self: CutWeight = wrapper_tensor(cls, weight.shape, like=local)
        self.weight, self.local, self.use = weight, local, use
        return self

    @property
    def lengths(self) -> list[int]:
        """Lengths of all ranks' slices along the dim that is cut."""
        return [sum(r.length for r in self._ranges(k)) for k in range(self.use.line.size)]

    @property
    def rows(self) -> Range:
        """Where this rank's slice lies along the dim that is cut."""
        (own,) = self._ranges(self.use.line.position)
        return own

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        if self.weight.cut is None:
            raise AssertionError(f"{self.weight.name} is not cut")
        return self.weight.cut.dim

    def _ranges(self, index: int) -> tuple[Range, ...]:
        if self.weight.cut is None or self.weight.cut.blocks > 1:
            raise AssertionError(f"{self.weight.name} is not cut in one block")
        size = self.weight.shape[self.dim]
        return self.weight.cut.ranges(size, num_slices=self.use.line.size, index=index)

    @classmethod
    def answer(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes this rank's part where the weight is used by a layer; gathers it for other uses, or refuses."""
        if func is F.linear and (output := _linear(*args, **kwargs)) is not None:
            return output
        if func is F.embedding and (output := _embedding(*args, **kwargs)) is not None:
            return output
        if func in _CONVOLUTIONS and (output := _convolution(func, *args, **kwargs)) is not None:
            return output
        return _whole_for(func, args, kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not isinstance(weight, CutWeight) or weight.dim != 0:
        return None
    line, lengths = weight.use.line, weight.lengths
    own_bias = bias.local if isinstance(bias, CutWeight) else None
    if weight.use.unit.logits:
        if bias is not None and own_bias is None:
            own_bias = scatter_to_region(bias, dim=0, lengths=lengths, line=line)

        def product(hidden: Tensor) -> Tensor:
            return F.linear(weight.use.enter(hidden), weight.local, own_bias)

        columns = tuple(weight._ranges(k)[0] for k in range(line.size))
        return DeferredLogits(input, CutHead(line, columns, product))
    output = F.linear(weight.use.enter(input), weight.local, own_bias)
    output = gather_from_region(output, dim=-1, lengths=lengths, line=line)
    return output if bias is None or own_bias is not None else output + bias


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    special = max_norm is not None or scale_grad_by_freq or sparse
    if not isinstance(weight, CutWeight) or weight.dim != 0 or special:
        return None
    num_rows = weight.weight.shape[0]
    check_ids(input, num_rows=num_rows, of=f"{weight.weight.name!r}: token")
    padding = None if padding_idx is None else padding_idx % num_rows
    return weight.use.leave(look_up(input, weight.local, rows=weight.rows, padding_idx=padding))


def _convolution(
    func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    names = ("stride", "padding", "dilation", "groups")
    groups = {**dict(zip(names, args, strict=False)), **kwargs}.get("groups", 1)
    if not isinstance(weight, CutWeight) or weight.dim != 0 or groups != 1 or 0 in weight.lengths:
        return None
    line, lengths = weight.use.line, weight.lengths
    own_bias = bias.local if isinstance(bias, CutWeight) else None
    output = func(copy_to_region(input, line=line), weight.local, own_bias, *args, **kwargs)
    channels = output.dim() - 1 - _CONVOLUTIONS[func]
    output = gather_from_region(output, dim=channels, lengths=lengths, line=line)
    if bias is None or own_bias is not None:
        return output
    return output + bias.view(-1, *[1] * _CONVOLUTIONS[func])


def _whole_for(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` with whole weights in place of the stand-ins among its arguments."""
    leaves, tree = tree_flatten((args, kwargs))
    held = [leaf for leaf in leaves if isinstance(leaf, CutWeight)]
    name = getattr(func, "__name__", str(func))
    refused = next((one for one in held if one.use.by_plan), None)
    if refused is not None:
        raise ConfigError(
            f"{refused.use.strategy}: {refused.weight.name!r} is used by {name!r}, which cannot take a weight that is "
            "cut. Give it no role in the plan, or use fsdp"
        )
    if any(not one.use.equal for one in held):
        raise ConfigError(
            f"{held[0].use.strategy}: {held[0].weight.name!r} is used by {name!r}, which takes no slices, and ranks' "
            "activations differ under sync_fraction. Leave sync_fraction out"
        )
    if isinstance(leaves[0], CutWeight) and writes(func):
        raise ConfigError(
            f"{leaves[0].use.strategy}: {leaves[0].weight.name!r} is changed by {name!r} in forward: no rank holds all "
            "of it. Change weights between steps, in `model.weights[..].local`"
        )
    given = [_gathered(leaf, name) if isinstance(leaf, CutWeight) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(given, tree)
    return func(*args, **kwargs)


def _gathered(one: CutWeight, name: str) -> Tensor:
    """The whole weight, for one use. Its gradient is equal on all ranks, and each takes its own slice of it."""
    use = one.use
    if one.weight.name not in use.gathered and use.line.size > 1:
        use.gathered.add(one.weight.name)
        _log.warning(
            "%s: %r is used by %r, which takes no slices: its %d bytes are whole on every rank for that time",
            use.strategy, one.weight.name, name, one.weight.num_bytes,
        )  # fmt: skip
    return gather_from_region(one.local, dim=one.dim, lengths=one.lengths, line=use.line)

"""Sums of parts that come one after another: tensors, or products that add to the sum as they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from rotorch.core.errors import ConfigError

_WIDENS = ("cuda",)
"""Devices on which torch has products of bfloat16 and float16 with sums in float32 (`out_dtype`)."""


class RunningSum:
    """Sum of tensors of one shape: the first is only referred to (a graph may own it), later ones add in place.

    Attributes:
        value: the sum; None before the first part.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._owned = False

    def add(self, part: Tensor) -> None:
        """Adds a tensor."""
        part = part.detach()
        if self.value is None:
            self.value = part
        elif self._owned:
            self.value.add_(part)
        else:
            self.value, self._owned = self.value + part, True

    def owned(self) -> Tensor | None:
        """The sum in memory of its own, also if there was one part; None before the first part."""
        if self.value is not None and not self._owned:
            self.value, self._owned = self.value.clone(), True
        return self.value

    def add_product(self, a: Tensor, b_KN: Tensor) -> None:
        """Adds `a [.., K] @ b [K, N]`: no product exists on its own, and the sum is rounded once per part."""
        if self.value is None:
            self.value, self._owned = torch.matmul(a, b_KN), True
        elif self._owned and self.value.is_contiguous():
            # A view: the sum itself has the shape that autograd adds to in place.
            self.value.view(-1, b_KN.shape[1]).addmm_(a.reshape(-1, a.shape[-1]), b_KN)
        else:
            self.value, self._owned = self.plus_product(a, b_KN), True

    def plus_product(self, a: Tensor, b_KN: Tensor) -> Tensor:
        """Returns the sum with `a [.., K] @ b [K, N]` added, as a new tensor."""
        if self.value is None:
            return torch.matmul(a, b_KN)
        # Not a view of a product: autograd lets nobody write into a view that a function returns.
        out = torch.empty_like(self.value, memory_format=torch.contiguous_format)
        width = b_KN.shape[1]
        torch.addmm(self.value.reshape(-1, width), a.reshape(-1, a.shape[-1]), b_KN, out=out.view(-1, width))
        return out


class OutputSum(RunningSum):
    """Sum of the outputs of a module's slices in one pass.

    If the output of the first slice is that of a linear layer, the layer's product adds to the sum in the slices after
    it. What a slice returns is looked at each time: where something comes behind the layer after all, the slice has to
    run again, and the layer no longer adds. So the second slice adds to a copy of the sum; those after it, which ran as
    well as it did, add in place, as no library of products adds to a sum of its own without copying it first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adds: int | None = None
        self._last: tuple[int, Tensor, int] | None = None
        self._has_added = False
        self._is_proven = False
        """True once a slice has added, and returned just that."""

    def product(self, number: int, x: Tensor, weight_OI: Tensor) -> Tensor | None:
        """The sum and layer `number`'s product, if this layer adds to it; else None."""
        if number != self._adds or self.value is None or not self.value.dtype == x.dtype == weight_OI.dtype:
            return None
        self._has_added = True
        if not self._is_proven or not self.value.is_contiguous():
            return self.plus_product(x, weight_OI.t())
        # An alias that counts versions of its own: what the slices before it returned is nobody's any more.
        total = self.value.data
        total.view(-1, weight_OI.shape[0]).addmm_(x.reshape(-1, x.shape[-1]), weight_OI.t())
        return total

    def note(self, number: int, output: Tensor) -> None:
        """Notes the output of layer `number`."""
        if not output.is_inference():  # it counts no versions
            self._last = number, output, output._version

    def take(self, output: Tensor) -> bool:
        """Adds a slice's output; returns False if it returned another tensor than the sum, and has to run again."""
        last, self._last, has_added, self._has_added = self._last, None, self._has_added, False
        unchanged = last is not None and last[1] is output and last[2] == output._version
        if has_added:
            if not unchanged and self._is_proven:
                raise ConfigError(
                    "rtp: a module returns the product of its last layer for some slices of its weights, and something "
                    "else for others: its forward goes by values. Give its weights no role in the plan"
                )
            if not unchanged:
                self._adds = None
                return False
            self.value, self._is_proven = output.detach(), True
            return True
        if self.value is None and last is not None and unchanged:
            self._adds = last[0]
        self.add(output)
        return True


def add_product(target_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, fresh: bool) -> bool:
    """Adds `a @ b` to a matrix, or overwrites it if it is `fresh`; returns False if one product cannot do that.

    Factors in bfloat16 or float16 add to float32 unrounded, where torch has a product for it.
    """
    if target_MN.dtype == a_MK.dtype:
        target_MN.addmm_(a_MK, b_KN, beta=0 if fresh else 1)
    elif widens(target_MN, a_MK):
        if fresh:
            torch.mm(a_MK, b_KN, out_dtype=target_MN.dtype, out=target_MN)
        else:
            torch.addmm(target_MN, a_MK, b_KN, out_dtype=target_MN.dtype, out=target_MN)
    else:
        return False
    return True


def widens(target: Tensor, factor: Tensor) -> bool:
    """True if torch has a product of factors like `factor` whose sum is like `target`, of more precision."""
    half = factor.dtype in (torch.bfloat16, torch.float16)
    return half and target.dtype == torch.float32 and target.device.type in _WIDENS

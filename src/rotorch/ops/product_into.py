"""Products that add to a tensor as they are computed, also to one of more precision than their factors."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDENS = ("cuda",)
"""Devices on which torch has products of bfloat16 and float16 with sums in float32 (`out_dtype`)."""


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

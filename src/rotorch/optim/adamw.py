"""AdamW whose update sees tensors as they lie in memory.

[Note: order in memory]
    Slices of weights that are cut along their last dim may lie transposed (`shard/flat.py`). Torch's fused update then
    makes a contiguous copy of each gradient first (2.13: 2.6 times the time). It knows no shapes, so it is given all
    tensors of such a weight as they lie in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """Torch's, whose update sees tensors in the order in which they lie (see [Note: order in memory])."""

    def _init_group(self, group: dict[str, Any], params: list[Tensor], *others: list[Tensor]) -> bool:
        """Fills the lists of tensors updated together: parameters, gradients, both moments, numbers of steps.

        Reason for overriding a private method: it is where torch puts these lists together, and no public one is.
        """
        has_complex: bool = super()._init_group(group, params, *others)
        for number, parameter in enumerate(params):
            if parameter.dim() == 2 and not parameter.is_contiguous():
                for tensors in (params, *others):
                    if tensors and tensors[number].dim() == 2:
                        tensors[number] = tensors[number].t()
        return has_complex

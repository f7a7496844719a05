"""The setting of autocast in a forward pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AutocastState:
    """The autocast setting of a forward pass, to run it again alike; `dtype` is None where autocast was off."""

    device_type: str
    dtype: torch.dtype | None

    @staticmethod
    def now(device_type: str) -> AutocastState:
        enabled = torch.is_autocast_enabled(device_type)
        return AutocastState(device_type, torch.get_autocast_dtype(device_type) if enabled else None)

    def dtype_for(self, x: torch.Tensor) -> torch.dtype:
        """Returns the dtype of products with `x`: float64 stays, as under torch's own autocast."""
        return x.dtype if self.dtype is None or x.dtype == torch.float64 else self.dtype

    def again(self) -> Any:
        """Returns the same autocast without its cache, which would hold every visited slice until the pass ends."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to(dtype)`; where that would do nothing, without the call, of which a layer makes several."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)

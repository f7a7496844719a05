"""Outputs of attention, kept from a forward to the next one over the same inputs (selective recomputation).

Of a slice's operations, attention takes the most time for the size of its output, which is as wide as its queries, plus
a number per query. torch's own selective checkpointing does not work here: it needs both forwards to make the same
operations otherwise, but without gradients a linear layer is one operation and with them several.

Only fused attention is kept. A model that composes it of products and a softmax runs all of it again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rotorch._torch_private import FUSED_ATTENTION, TorchDispatchMode


class KeepAttention(TorchDispatchMode):
    """Keeps outputs of attention inside its block; `use` is for the second forward."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[Any] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._kept.append(given)
        return given

    def use(self) -> TorchDispatchMode:
        """Returns a block in which attention gives the kept outputs, and computes nothing."""
        return _UseAttention(self._kept)


class _UseAttention(TorchDispatchMode):
    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In order: both forwards make the same calls of attention.
        return self._kept.popleft() if _is_kept(func, args, kwargs) else func(*args, **kwargs)


def _is_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """True for attention without dropout: skipping its random numbers would change the ones drawn after it."""
    if func not in FUSED_ATTENTION:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p")

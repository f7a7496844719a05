"""Exact arithmetic: float64 all the way through models that ask for float32 in places.

Norms, rotary embeddings, soft-maxes and losses of many Hugging Face models compute in float32 whatever the model's
dtype. A float64 comparison would then stop at 1e-8, where a small bug and rounding look alike. Under
`exact_arithmetic` they compute in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rotorch._torch_private import LightDispatchMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Widen(LightDispatchMode):
    """Turns every request for float32 into one for float64.

    A dispatch mode, because those are also on in the backward of custom autograd functions; function modes are not.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Ten thousands of operations come here, and few name a dtype: no other is touched, nor made anew.
        for value in args:
            if value.__class__ is torch.dtype:
                args = tuple(_WIDER.get(a, a) if a.__class__ is torch.dtype else a for a in args)
                break
        if not kwargs:
            return func(*args)
        return func(*args, **{k: _WIDER.get(v, v) if v.__class__ is torch.dtype else v for k, v in kwargs.items()})


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Makes torch compute in float64 where code asks for float32: by dtype, by `.float()` or by default.

    Tensors that are float32 already stay so: convert models with `widen`. For this thread; the default dtype is put
    back on leaving.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(default)


def widen(module: nn.Module) -> nn.Module:
    """Converts parameters (on `meta` too, keeping their recipes) and floating-point buffers to float64, in place."""
    return module.double()

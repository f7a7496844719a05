"""Tensors without values: shape, dtype and device are real, functions are answered by the subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rotorch.core.errors import ConfigError

_ABOUT = {
    "dim",
    "ndimension",
    "size",
    "numel",
    "nelement",
    "is_floating_point",
    "is_complex",
    "element_size",
    "__len__",
}
"""Methods that ask about a tensor and not for its values."""

_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__"}


def writes(func: Any) -> bool:
    """True if a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class TensorProxy(Tensor):
    """Base of proxies for weights and logits that no rank has whole. Subclasses implement `answer`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `__get__` reads a property, such as shape or dtype, which the wrapper has.
        if getattr(func, "__name__", "") in _ABOUT or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        return cls.answer(func, args, kwargs or {})

    @classmethod
    def answer(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Result of `func` where some of its arguments are proxies."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below `__torch_function__`: C++ code, or `.data`, has unpacked the proxy, so no rule applies any more.
        raise ConfigError(
            f"{func} reached a {cls.__name__}, which has no values: a forward uses a cut weight in a way that cannot "
            "be traced (`.data`, a view). Give the weight no role in a plan of your own, or use fsdp"
        )

"""Tensors that stand for something else: shape, dtype and device are real, functions are answered in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rotorch._torch_private import tree_flatten, tree_unflatten, wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.models.products import as_linear, is_transpose

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
    """Whether a function changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class StandIn(Tensor):
    """Base of weights and logits that are not all there. Subclasses implement `answer`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ABOUT or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        return cls.answer(func, args, kwargs or {})

    @classmethod
    def answer(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What `func` gives when some of its arguments are stand-ins."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ConfigError(
            f"{func} reached a {cls.__name__}, which has no values: a forward takes hold of what is cut in a way that "
            "cannot be followed (`.data`, a view). Give the weight no role in a plan of your own, or use fsdp"
        )


class StandInWeight(StandIn):
    """Base of weights that are not all there. The transpose of a matrix is followed to the product that takes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], StandInWeight) and is_transpose(func, args, kwargs or {}):
            return Transposed(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class Transposed(StandIn):
    """Stands for the transpose of a matrix that is not all there: `x @ weight.T` is the linear layer `weight`.

    Attributes:
        of: the matrix.
    """

    of: StandInWeight

    @staticmethod
    def __new__(cls, of: StandInWeight) -> Transposed:
        """Makes the transpose of `of`."""
        self: Transposed = wrapper_tensor(cls, tuple(reversed(of.shape)), like=of)
        self.of = of
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Transposed) and is_transpose(func, args, kwargs or {}):
            return args[0].of
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def answer(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Multiplies as a linear layer does; other functions get what its weight answers to `t`, or refuses."""
        found = as_linear(func, args, kwargs, is_transposed=lambda x: isinstance(x, Transposed))
        if found is not None and not isinstance(found[0], StandIn):
            input, matrix, bias = found
            return F.linear(input, matrix.of, bias)
        leaves, tree = tree_flatten((args, kwargs))
        given = [type(x.of).answer(Tensor.t, (x.of,), {}) if isinstance(x, Transposed) else x for x in leaves]
        args, kwargs = tree_unflatten(given, tree)
        return func(*args, **kwargs)

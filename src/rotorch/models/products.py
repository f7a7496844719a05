"""Products with a matrix on the right: `x @ weight.T` is the linear layer of `weight`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}
_SUMS = {torch.addmm, Tensor.addmm}
_OF_MATRICES = {torch.mm, Tensor.mm, *_SUMS}


def is_transpose(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a function returns the transpose of its first argument, a matrix."""
    dims = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if getattr(func, "__name__", "") == "__get__":
        found = getattr(getattr(func, "__self__", None), "__name__", "") in ("T", "mT", "H", "mH")
    elif func in (torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes):
        found = sorted(dim % 2 for dim in dims) == [0, 1]
    elif func in (torch.permute, Tensor.permute):
        found = [dim % 2 for dim in dims] == [1, 0]
    else:
        found = func in (torch.t, Tensor.t)
    return found and not kwargs and len(args[0].shape) == 2


def as_linear(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_matrix: Callable[[Any], bool]
) -> tuple[Any, Any, Any] | None:
    """Input, matrix `[inputs, outputs]` and bias of a product with that matrix; None if a function is none.

    Args:
        func: any function.
        args: of it.
        kwargs: of it.
        is_matrix: True if an argument is one of the matrices in question.
    """
    if kwargs or len(args) < 2 or not is_matrix(args[-1]) or is_matrix(args[-2]):
        return None
    if func in _OF_MATRICES and len(args[-2].shape) != 2:
        return None  # torch refuses it
    if func in _PRODUCTS and len(args) == 2:
        return args[0], args[1], None
    if func in _SUMS and len(args) == 3 and len(args[0].shape) == 1:
        return args[1], args[2], args[0]
    return None

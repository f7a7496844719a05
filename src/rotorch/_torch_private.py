"""Every underscore name of torch that rotorch uses, each with its reason. `tests/test_torch_private.py` holds each one."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

# TorchDispatchMode: the documented way to observe operations below autograd, but only exported from an underscore module.
# tree_flatten, tree_unflatten: arguments and outputs of unmodified modules are nested tuples, dicts and dataclasses registered with
#     torch's own pytree; optree would not know Hugging Face's output classes.
__all__ = ["TorchDispatchMode", "storage_key", "tree_flatten", "tree_unflatten"]


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage, shared by all its views.

    Reason: meta tensors all have `data_ptr() == 0`, so no public name tells one meta storage from another.
    """
    return tensor.untyped_storage()._cdata

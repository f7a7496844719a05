"""Small graphs inside of an autograd function, hidden from saved-tensor hooks around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rotorch._torch_private import saved_tensor_hooks


def no_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Hides the saved tensors of operations inside the block from hooks around it.

    torch's activation checkpointing would drop them, and run the unit again to make them, in the middle of the unit's
    own backward and of its visits. They live as long as their function: nothing else keeps them.
    """
    # The innermost pair of hooks counts; one that does nothing hides the pairs around it.
    return torch.autograd.graph.saved_tensors_hooks(to_save, _as_is) if saved_tensor_hooks() else nullcontext()


def to_save(tensor: Tensor) -> Tensor:
    """A tensor as a hook may save it: an output of an operation would keep the graph alive that keeps the tensor."""
    return tensor.detach()


def _as_is(tensor: Tensor) -> Tensor:
    return tensor

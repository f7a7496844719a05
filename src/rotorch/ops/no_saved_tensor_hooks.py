"""Small graphs inside of an autograd function, kept from hooks that someone has put around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rotorch._torch_private import saved_tensors_are_hooked


def no_saved_tensor_hooks() -> AbstractContextManager[Any]:
    """Around operations whose saved tensors no hook from outside is to see.

    Under torch's activation checkpointing they would be made by running the unit again, in the middle of its own
    backward and of its visits. They live as long as their function: nothing else keeps them.
    """
    return torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is) if saved_tensors_are_hooked() else nullcontext()


def _as_is(tensor: Tensor) -> Tensor:
    return tensor

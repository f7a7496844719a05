"""What a module returns, as those get it who do not know how it is held."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.models.losses import Batch
from rotorch.ops.deferred_logits import with_real_logits


def real_outputs(callee: nn.Module, batch: Batch) -> Any:
    """What the module returns; logits that were deferred to their use would be made by who uses them, alone, later."""
    leaves, tree = tree_flatten(callee(**batch))
    return tree_unflatten([with_real_logits(leaf) for leaf in leaves], tree)


def last_logits(callee: nn.Module, batch: Batch) -> Tensor:
    """The logits of the token after the batch's last."""
    logits: Tensor = callee(**batch, use_cache=False).logits[:, -1, :].clone()
    return logits


def detached(value: Any) -> Any:
    """`value` with its tensors real, and without their graphs."""
    leaves, tree = tree_flatten(value)
    return tree_unflatten([with_real_logits(x).detach() if isinstance(x, Tensor) else x for x in leaves], tree)

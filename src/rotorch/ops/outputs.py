"""A module's outputs for callers that know nothing of its strategy: logits are real tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.models.losses import Batch
from rotorch.ops.deferred_logits import with_real_logits


def real_outputs(callee: nn.Module, batch: Batch) -> Any:
    """Calls the module and makes deferred logits real at once, while all ranks are here; a caller alone could not."""
    leaves, tree = tree_flatten(callee(**batch))
    return tree_unflatten([with_real_logits(leaf) for leaf in leaves], tree)


def last_logits(callee: nn.Module, batch: Batch) -> Tensor:
    """The logits of the token after the batch's last."""
    # A copy: a view would keep the logits of all tokens in memory.
    logits: Tensor = callee(**batch, use_cache=False).logits[:, -1, :].clone()
    return logits


def detached(value: Any) -> Any:
    """Returns `value` with real tensors, detached from their graphs."""
    leaves, tree = tree_flatten(value)
    return tree_unflatten([with_real_logits(x).detach() if isinstance(x, Tensor) else x for x in leaves], tree)

"""Differences between two runs of one model: each rank compares its part with the reference's, nothing is sent.

[Note: errors]
    Errors are norm-wise, per weight: the largest difference between the two gradients over the largest element of the
    reference's. Elements near zero would have no relative error of their own. For the same reason a weight whose
    gradient is zero but for rounding (the bias of keys, to which a soft-max is blind) is measured against a thousandth
    of the model's largest gradient. A real mistake is as large as the gradient that it spoils, far above any bar.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotorch.shard.sharded_weight import ShardedWeight

_GRADIENT_FLOOR = 1e-3
"""Gradients are measured against at least this part of the model's largest one (see [Note: errors])."""


def relative_error(ours: Tensor, theirs: Tensor, *, floor: float = 0.0) -> float:
    """Largest difference over the largest magnitude of `theirs` (at least `floor`): 0 if equal, infinite for a NaN."""
    if ours.numel() == 0:
        return 0.0
    difference = float((ours - theirs).abs().max())
    scale = max(float(theirs.abs().max()), floor)
    error = 0.0 if difference == 0 else difference / scale if scale > 0 else float("inf")
    return error if error == error else float("inf")


def value_errors(
    weights: Mapping[str, ShardedWeight],
    theirs: Mapping[str, Tensor],
    *,
    floor: float = 0.0,
    set_aside: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Relative error of this rank's chunks of every weight against whole tensors.

    Args:
        weights: this rank's.
        theirs: whole.
        floor: the least that an error is measured against.
        set_aside: elements that do not count, as whole masks; None: all count.
    """
    aside = set_aside or {}
    return {
        name: _shard_error(held, held.local, theirs[name], floor=floor, set_aside=aside.get(name))
        for name, held in weights.items()
    }


def gradient_errors(weights: Mapping[str, ShardedWeight], theirs: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Relative error of this rank's chunks of every gradient against whole ones (see [Note: errors]); None is zero."""
    largest = max((float(g.abs().max()) for g in theirs.values() if g is not None), default=0.0)
    return {
        name: _shard_error(held, ours, whole, floor=_GRADIENT_FLOOR * largest)
        for name, held in weights.items()
        for ours, whole in [_gradients(held, theirs.get(name))]
    }


def gradients_along(
    weights: Mapping[str, ShardedWeight], theirs: Mapping[str, Tensor | None]
) -> dict[str, tuple[float, float]]:
    """Sums per weight, over this rank's chunks, of ours * theirs and of theirs * theirs."""
    along = {}
    for name, held in weights.items():
        ours, whole = _gradients(held, theirs.get(name))
        pairs = [(p.of_local(ours), p.of_whole(whole)) for p in held.chunks]
        along[name] = (sum(float((a * b).sum()) for a, b in pairs), sum(float((b * b).sum()) for _, b in pairs))
    return along


def _gradients(held: ShardedWeight, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    ours = torch.zeros_like(held.local) if held.local_grad is None else held.local_grad
    return ours, ours.new_zeros(held.weight.shape) if whole is None else whole


def _shard_error(
    held: ShardedWeight, ours: Tensor, theirs: Tensor, *, floor: float = 0.0, set_aside: Tensor | None = None
) -> float:
    """Error of this rank's chunks, relative to the whole weight's largest element, so that all ranks measure alike."""
    scale = max(float(theirs.abs().max()), floor, torch.finfo(theirs.dtype).tiny)
    errors = [0.0]
    for chunk in held.chunks:
        own, whole = chunk.of_local(ours), chunk.of_whole(theirs)
        if set_aside is not None:
            own = torch.where(chunk.of_whole(set_aside), whole, own)
        errors.append(relative_error(own / scale, whole / scale, floor=1.0))
    return max(errors)

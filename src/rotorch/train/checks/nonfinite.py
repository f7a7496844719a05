"""Origin of the first number that is not finite: a weight, the output of a module, or a gradient.

[Note: the order of looking]
    Weights that are not finite spoil everything behind them, so they are checked first. Then the batch runs forward
    once more, without gradients and dropout, and hooks check the outputs of modules: the first module to complete with
    a number that is not finite made it, since its inputs were finite. Inside a unit that runs on slices this output is
    one layer's part of a sum. If all outputs are finite, a gradient is not: backward runs from the last weight to the
    first, so the origin is the last weight with such a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten
from rotorch.comm.collectives import all_reduce_min
from rotorch.ops.partial_module import SEES_SLICES
from rotorch.parallel_model import Batch, ParallelModel

_NOWHERE = float(1 << 52)


def first_nonfinite(model: ParallelModel, batches: Sequence[Batch]) -> str:
    """Says where the first number that is not finite came from (see [Note: the order of looking]). All ranks.

    Changes nothing of the model: neither weights nor gradients, buffers or random states.

    Args:
        model: after a `forward_backward`, whose gradients are still there.
        batches: this rank's micro-batches in that pass.

    Returns:
        The same on all ranks, to complete "first not finite is ...".
    """
    names = [name for name, _ in model.module.named_parameters() if name in model.weights]
    weights = [model.weights[name] for name in names]
    bad = [number for number, held in enumerate(weights) if not _is_finite(held.local)]
    if (found := _first_of_all(model, min(bad, default=None))) is not None:
        return f"the weight {names[found[0]]!r} itself, on rank {found[1]}"
    modules = [name for name, _ in model.module.named_modules()]
    with _first_output(model.module) as outputs:
        model.evaluate(batches)
    # Of several ranks the one whose module comes first in the model: later stages of a pipeline get what it gave.
    if (found := _first_of_all(model, modules.index(outputs[0]) if outputs else None)) is not None:
        name = modules[found[0]]
        made = f"{name!r} ({type(model.module.get_submodule(name)).__name__})" if name else "the model"
        return f"the output of {made} on rank {found[1]}"
    bad = [number for number, held in enumerate(weights) if not _is_finite(held.local_grad)]
    if (found := _first_of_all(model, len(names) - 1 - max(bad) if bad else None)) is not None:
        return f"the gradient of {names[len(names) - 1 - found[0]]!r}, while all outputs of a second pass are finite"
    return "not found: in a second pass over the batch, without dropout, weights, outputs and gradients are finite"


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or not tensor.numel() or bool(torch.isfinite(tensor).all())


def _first_of_all(model: ParallelModel, mine: int | None) -> tuple[int, int] | None:
    """The smallest number of all ranks, and the first rank that has it; None if none has one."""
    rank = model.mesh.get_rank() if model.mesh.size() > 1 else 0
    smallest = all_reduce_min(_NOWHERE if mine is None else float(mine), mesh=model.mesh)
    first = all_reduce_min(float(rank) if mine == smallest else _NOWHERE, mesh=model.mesh)
    return None if smallest == _NOWHERE else (int(smallest), int(first))


@contextmanager
def _first_output(module: nn.Module) -> Iterator[list[str]]:
    """Notes the name of the module that first gives a number that is not finite; of none, the list stays empty."""
    first: list[str] = []

    def look(name: str, output: Any) -> None:
        if first:
            return
        # Plain tensors only: a subclass may stand for values that are never all there.
        leaves = [leaf for leaf in tree_flatten(output)[0] if type(leaf) is Tensor and leaf.is_floating_point()]
        if not all(map(_is_finite, leaves)):
            first.append(name)

    def looking(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            look(name, output)

        setattr(hook, SEES_SLICES, True)  # a slice that is not finite is as good a find as the whole
        return hook

    handles = [child.register_forward_hook(looking(name)) for name, child in module.named_modules()]
    try:
        yield first
    finally:
        for handle in handles:
            handle.remove()

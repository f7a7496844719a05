"""Outputs of modules in two runs of one model, compared row by row to find where the runs part.

[Note: what compares]
    A module compares when it ran as often as in the reference and its outputs have the reference's shape for this
    rank's rows. Inside a unit that runs on slices neither holds (a projection runs once per slice, on fewer columns),
    so there the unit's own module is the first that compares: only the output of a unit must agree. If ranks compute
    different features or tokens, the reference's are cut alike. Modules are
    recorded while the outermost module's forward runs, so that recomputation in backward does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rotorch._torch_private import tree_flatten
from rotorch.core.spec import Cut
from rotorch.core.zigzag import zigzag
from rotorch.ops.partial_module import SEES_SLICES
from rotorch.testing.compare import relative_error

Calls = dict[str, list[list[Tensor]]]
"""Per module, per call: its floating-point outputs of at least one dim."""

_OUTPUT_FLOOR = 1e-8
"""Outputs smaller than this everywhere are compared absolutely: an output that is zero has no relative error."""


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Calls]]:
    """Records module outputs of every forward pass of `module` within the block: one entry of the list per pass."""
    passes: list[Calls] = []
    running = False

    def begin(*_: Any) -> None:
        nonlocal running
        if not running:
            passes.append(defaultdict(list))
        running = True

    def end(*_: Any) -> None:
        nonlocal running
        running = False

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if running:
                passes[-1][name].append([t.detach().clone() for t in _tensors(output)])

        setattr(hook, SEES_SLICES, True)
        return hook

    handles: list[RemovableHandle] = [module.register_forward_pre_hook(begin)]
    for name, child in module.named_modules():
        handles.append(child.register_forward_hook(keep(name)))
    handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> list[Tensor]:
    # Only plain tensors: a subclass may stand for values that are never all there (logits that exist a slice at a
    # time).
    leaves = [leaf for leaf in tree_flatten(output)[0] if type(leaf) is Tensor]
    return [t for t in leaves if t.is_floating_point() and t.dim()]


def output_errors(
    ours: list[Calls],
    theirs: Calls,
    *,
    first_rows: list[int],
    num_rows: int,
    total_rows: int,
    features: tuple[int, int] = (0, 1),
    tokens: tuple[int, int] = (0, 1),
    context: tuple[int, int] = (0, 1),
) -> dict[str, float]:
    """Compares this rank's passes with the matching rows of one pass over all rows (see [Note: what compares]).

    Args:
        ours: one entry per forward: per micro-batch, and of a pipeline per stage of this rank.
        theirs: the reference's pass over the global batch.
        first_rows: first row of each micro-batch in the global batch.
        num_rows: rows of a micro-batch.
        total_rows: rows of the global batch.
        features: number of this rank's part of the features (the last dim), and the number of parts.
        tokens: the same of the tokens (the second dim).
        context: number of this rank among those that share sequences, and the number of them.

    Returns:
        The largest relative error of every module that compares, in the order in which the reference's forward
        completed them.
    """
    errors: dict[str, float] = {}
    for name, calls in theirs.items():
        ran = [one[name] for one in ours if one.get(name)]
        if len(ran) != len(first_rows):
            continue
        found = [
            _call_error(mine, whole, (first, num_rows, total_rows), features=features, tokens=tokens, context=context)
            for made, first in zip(ran, first_rows, strict=True)
            if len(made) == len(calls)
            for mine, whole in zip(made, calls, strict=True)
        ]
        if len(found) == len(ran) * len(calls) and None not in found:
            errors[name] = max(found, default=0.0)  # type: ignore[type-var]
    return errors


def _call_error(
    ours: list[Tensor],
    theirs: list[Tensor],
    rows: tuple[int, int, int],
    *,
    features: tuple[int, int],
    tokens: tuple[int, int],
    context: tuple[int, int],
) -> float | None:
    if len(ours) != len(theirs):
        return None
    first, num_rows, total_rows = rows
    worst = 0.0
    for mine, whole in zip(ours, theirs, strict=True):
        each, odd = divmod(whole.shape[0], total_rows)  # some modules flatten rows and tokens into one dim
        expected = whole.narrow(0, first * each, num_rows * each) if each and not odd else whole
        if mine.shape != expected.shape and mine.shape[-1] * features[1] == expected.shape[-1]:
            expected = expected.narrow(-1, features[0] * mine.shape[-1], mine.shape[-1])
        if mine.shape != expected.shape and mine.dim() == expected.dim() == 3:
            (own,) = Cut(1, expected.shape[1]).ranges(expected.shape[1], num_slices=tokens[1], index=tokens[0])
            expected = expected.narrow(1, own.start, own.length)
        if mine.shape != expected.shape and context[1] > 1 and expected.dim() >= 2:
            chunks = zigzag(expected.shape[1], num_ranks=context[1])[context[0]]
            expected = torch.cat([expected.narrow(1, chunk.start, chunk.length) for chunk in chunks], dim=1)
        if mine.shape != expected.shape:
            return None
        worst = max(worst, relative_error(mine, expected, floor=_OUTPUT_FLOOR))
    return worst

"""Trial on a tiny model of the same kind: are its outputs the same when it is cut between its layers?

[Note: trial of stages]
    A pipeline plan declares the order of modules, but does not promise that they pass on hidden states only. Layers
    that return something else beside them, or leave it in a cache for later layers, cannot be run as stages, and some
    would not even fail: a tensor unpacks into as many values as it has rows. So a tiny model runs once whole and once
    with a stage for each of its layers, and the outputs must be the same, also for padded tokens, with a mask
    and without: some models make a mask from token ids, which later stages do not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rotorch._torch_private import tree_flatten
from rotorch.models.stages import StagedModule, StageOutput, layer_order

_TOLERANCE = 1e-9
"""Relative, of outputs. The operations are the same, so mostly there is no difference at all."""


def why_not_in_stages(tiny: nn.Module, *, run: Callable[[], Any]) -> str:
    """Returns the reason why a model cannot be cut between its layers; "" if it can (see [Note: trial of stages]).

    Args:
        tiny: a model that runs; it is left as it is.
        run: a forward of `tiny`, without gradients, every time on the same input.
    """
    order = layer_order(tiny)
    if order.refused:
        return order.refused
    handed_on: list[int] = []
    hooks = [
        tiny.get_submodule(layer).register_forward_hook(lambda _, __, output: handed_on.append(_number_of(output)))
        for layer in order.layers
    ]
    try:
        whole = _first_of(run())
    finally:
        for hook in hooks:
            hook.remove()
    if (most := max(handed_on, default=1)) > 1:
        return f"its layers hand on {most} values, of which stages know the hidden states only"
    try:
        staged = _first_of(_in_stages(tiny, run=run))
    except Exception as error:  # whatever its code does not like about layers that are passed over
        return (
            f"a tiny model of its kind does not run in stages ({type(error).__name__}: {' '.join(str(error).split())})"
        )
    if staged.shape != whole.shape or not (staged - whole).norm() <= _TOLERANCE * whole.norm():
        return "a tiny model of its kind gives something else in stages: its layers share more than hidden states"
    return ""


def _in_stages(tiny: nn.Module, *, run: Callable[[], Any]) -> Any:
    order = layer_order(tiny)
    parts = [range(number, number + 1) for number in range(len(order.layers))]
    staged = StagedModule(tiny, order=order, parts=parts)
    received: Tensor | None = None
    for number in range(len(parts)):
        with staged.stage(number, received=received):
            try:
                output = run()
            except StageOutput as end:
                received = end.hidden_states
            else:
                return output
    raise AssertionError("the last stage ends with the model's output")


def _number_of(output: Any) -> int:
    return sum(value is not None for value in output) if isinstance(output, tuple) else 1


def _first_of(output: Any) -> Tensor:
    return next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point())

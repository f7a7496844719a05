"""Trial on a tiny model of the same kind: are its outputs the same when it is cut between its layers, or inside?

[Note: trial of stages]
    A pipeline plan declares the order of modules, but does not promise that they pass on hidden states only. Layers
    that return something else beside them, or leave it in a cache for later layers, cannot be run as stages, and some
    would not even fail: a tensor unpacks into as many values as it has rows. So a tiny model runs once whole and once
    with a stage for each of its layers, and the outputs must be the same, also for padded tokens, with a mask
    and without: some models make a mask from token ids, which later stages do not see.

[Note: trial of halves]
    A layer may be cut inside if it calls two blocks with matrices, one after the other, and if nobody can tell when one
    half of its modules is left out in one stage and the other in the next. Norms between the blocks may belong to
    either (of a block's output, or of the next one's input), and so may dropouts, which scale what they are given here:
    each place between the blocks is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten
from rotorch.core.spec import Half, LayerOrder
from rotorch.models.stages import StagedModule, StageOutput, layer_order

_SCALE = 1.25
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
    places = [range(2 * number, 2 * number + 2) for number in range(len(order.layers))]
    try:
        staged = _first_of(_in_stages(tiny, order=order, places=places, run=run))
    except Exception as error:  # whatever its code does not like about layers that are passed over
        return (
            f"a tiny model of its kind does not run in stages ({type(error).__name__}: {' '.join(str(error).split())})"
        )
    if not _same(staged, whole):
        return "a tiny model of its kind gives something else in stages: its layers share more than hidden states"
    return ""


def find_halves(tiny: nn.Module, *, run: Callable[[], Any]) -> tuple[tuple[Half, ...], str]:
    """Finds the halves of a model's layers (see [Note: trial of halves]); none, and why, if these stay whole.

    Args:
        tiny: a model that runs, and can be cut between its layers; it is left as it is.
        run: a forward of `tiny`, without gradients, every time on the same input.
    """
    order = layer_order(tiny)
    layers = [tiny.get_submodule(name) for name in order.layers]
    with _felt(layers):
        return _find_halves(tiny, order, layers, run=run)


def has_own(layer: nn.Module) -> bool:
    """True if a layer has weights or buffers that none of its modules has: nobody knows where it uses them."""
    return any(True for held in (layer.parameters(recurse=False), layer.buffers(recurse=False)) for _ in held)


@contextmanager
def _felt(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Lets modules without weights, and dropout, scale what they are given, within the block.

    A dropout does nothing in a trial, so it would not be missed in either half.
    """
    scaled = mock.patch.object(F, "dropout", lambda given, *_, **__: given * _SCALE)
    children = [child for layer in layers for child in layer.children() if not any(True for _ in child.parameters())]

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return output * _SCALE if isinstance(output, Tensor) and output.is_floating_point() else output

    hooks = [child.register_forward_hook(hook) for child in dict.fromkeys(children)]
    try:
        with scaled:
            yield
    finally:
        for each in hooks:
            each.remove()


def _find_halves(
    tiny: nn.Module, order: LayerOrder, layers: Sequence[nn.Module], *, run: Callable[[], Any]
) -> tuple[tuple[Half, ...], str]:
    whole, calls = _watched_children(layers, run=run)
    if any(found != calls[0] for found in calls):
        return (), "its layers call different modules"
    if any(map(has_own, layers)):
        return (), "its layers have weights or buffers of their own, beside those of their modules"
    names = [name for name, _ in calls[0]]
    if len(set(names)) < len(names):
        return (), "its layers call a module twice"
    learns = {name for name, child in layers[0].named_children() if any(True for _ in child.parameters())}
    if learns - set(names):
        return (), f"its layers do not call {', '.join(sorted(learns - set(names)))}"
    children = dict(layers[0].named_children())
    blocks = [place for place, name in enumerate(names) if any(p.ndim > 1 for p in children[name].parameters())]
    if len(blocks) != 2:
        return (), f"its layers call {len(blocks)} modules with matrices, not an attention and what follows"
    first, second = blocks
    for cut in range(first + 1, second + 1):
        halves = tuple(
            Half(tuple(names[part]), names[block], calls[0][block][1])
            for part, block in ((slice(cut), first), (slice(cut, None), second))
        )
        if _is_whole_in_halves(tiny, replace(order, halves=halves), run=run, whole=whole):
            return halves, ""
    return (), "a tiny model of its kind gives something else where a layer's attention and what follows are apart"


def _watched_children(
    layers: Sequence[nn.Module], *, run: Callable[[], Any]
) -> tuple[Tensor, list[list[tuple[str, int]]]]:
    """A model's output, and of each layer the children that it calls, with their numbers of outputs (0: no tuple)."""
    calls: list[list[tuple[str, int]]] = [[] for _ in layers]
    hooks = []
    for found, layer in zip(calls, layers, strict=True):
        for name, child in layer.named_children():

            def note(_: nn.Module, __: Any, output: Any, name: str = name, found: Any = found) -> None:
                found.append((name, len(output) if isinstance(output, tuple) else 0))

            hooks.append(child.register_forward_hook(note))
    try:
        return _first_of(run()), calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_whole_in_halves(tiny: nn.Module, order: LayerOrder, *, run: Callable[[], Any], whole: Tensor) -> bool:
    """True if a model with a stage for each half layer gives what the whole model does."""
    places = [range(number, number + 1) for number in range(order.num_places)]
    try:
        return _same(_first_of(_in_stages(tiny, order=order, places=places, run=run)), whole)
    except Exception:  # whatever its code does not like about modules that are passed over
        return False


def _in_stages(tiny: nn.Module, *, order: LayerOrder, places: Sequence[range], run: Callable[[], Any]) -> Any:
    staged = StagedModule(tiny, order=order, places=places)
    received: Tensor | None = None
    for number in range(len(places)):
        with staged.stage(number, received=received):
            try:
                output = run()
            except StageOutput as end:
                received = end.hidden_states
            else:
                return output
    raise AssertionError("the last stage ends with the model's output")


def _same(staged: Tensor, whole: Tensor) -> bool:
    return staged.shape == whole.shape and bool((staged - whole).norm() <= _TOLERANCE * whole.norm())


def _number_of(output: Any) -> int:
    return sum(value is not None for value in output) if isinstance(output, tuple) else 1


def _first_of(output: Any) -> Tensor:
    return next(leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point())

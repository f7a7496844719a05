"""Linear layers inside a unit, on one slice: like `F.linear`, but a weight's gradient never exists on its own.

In backward the product that makes the weight's gradient accumulates straight into the buffer that travels with the
slice. Otherwise the gradient would be made, added, and freed: for few tokens that costs as much as the products. In the
same way the gradient of a layer whose input is the unit's adds to the unit's input gradient, and the output of a layer
that makes the unit's output adds to the sum over slices (`running_sum.py`).

[Note: layers of one input]
    Queries, keys and values are products of one input, and so are an MLP's gate and its other half. To autograd they
    are one function, since what a visit costs the host is mostly its functions: whichever layer runs first makes the
    outputs of all, each in memory of its own, and the others find theirs. That only takes place where it changes
    nothing: outputs are the same products of the same numbers. A module that then gives one of them another input has
    its layers run one by one from there on.

Shapes: B tokens (all leading dims flattened), I input features, O output features of the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch._torch_private import saved_tensor_hooks
from rotorch.ops.autocast_state import AutocastState, as_dtype
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.running_sum import RunningSum


class Layer(NamedTuple):
    """A linear layer of a unit: the numbers of its weight and of its bias, which is None unless it is cut with it."""

    weight: int
    bias: int | None


class SliceLinears:
    """The linear layers of a unit.

    Args:
        unit: the unit, whose slices visit.
        of_one_input: layers that are likely to multiply the same input, set by set.
    """

    def __init__(self, unit: RotatingUnit, of_one_input: Iterable[Sequence[Layer]] = ()) -> None:
        self._unit = unit
        self._together = {layer: tuple(layers) for layers in of_one_input for layer in layers}
        self._weights: Sequence[Tensor] = ()
        self._hooks: Any = None
        self._runs = False
        self._early: dict[Layer, Tensor] = {}
        """Outputs that are made and not asked for yet, of the input, its version and the autocast below."""
        self._input: Tensor | None = None
        self._made: tuple[int, AutocastState] | None = None

    def start(self, weights: Sequence[Tensor]) -> None:
        """Begins a run of the module on a slice with these weights."""
        self.put(weights)
        self._hooks, self._runs = saved_tensor_hooks(), True

    def stop(self) -> None:
        """Ends the run."""
        self._one_by_one(*self._early)
        self._runs = False

    def put(self, weights: Sequence[Tensor]) -> None:
        """Takes the weights of a slice, for parts of the module that run in its backward (`RotatingUnit.put`)."""
        self._weights, self._runs = weights, False
        self._forget()

    def __call__(self, layer: Layer, x: Tensor, *, by_itself: bool = False) -> Tensor:
        """`x [.., I]` times a layer's weight, plus its bias if it is cut with it: `[.., O]`.

        Args:
            layer: which one.
            x: input.
            by_itself: the output is not added to those of other slices, here or in a later slice.
        """
        unit, together = self._unit, self._together.get(layer)
        # Within hooks of their own (activation checkpointing around a part of the module) functions must run again as
        # they ran, and that part may have some of the layers only.
        if together and self._runs and torch.is_grad_enabled() and saved_tensor_hooks() == self._hooks:
            y = self._one_of(together, layer, x)
        elif torch.is_grad_enabled():
            (y,) = self._apply((layer,), x)
        else:
            y = _forward(unit, layer, x, self._weights)
        if unit.output_sum is not None and not by_itself:
            unit.output_sum.note(layer.weight, y)
        return y

    def _one_of(self, together: Sequence[Layer], layer: Layer, x: Tensor) -> Tensor:
        made = x._version, AutocastState.now(x.device.type)
        if self._early:
            if layer not in self._early or x is not self._input or made != self._made:
                self._one_by_one(layer)
                return self._apply((layer,), x)[0]
        else:
            self._early = dict(zip(together, self._apply(together, x), strict=True))
            self._input, self._made = x, made
        y = self._early.pop(layer)
        if not self._early:
            self._forget()  # an input that is kept would be memory
        return y

    def _one_by_one(self, *layers: Layer) -> None:
        """Runs these layers and those beside them, as well as all whose outputs wait, by themselves from now on."""
        for layer in (*layers, *self._early):
            for each in self._together.get(layer, ()):
                self._together.pop(each)
        self._forget()

    def _forget(self) -> None:
        self._early, self._input, self._made = {}, None, None

    def _apply(self, layers: Sequence[Layer], x: Tensor) -> Sequence[Tensor]:
        unit = self._unit
        y = _SliceLinears.apply(unit, layers, unit.leaf_of(x), self._weights, unit.anchor, x)
        return y if isinstance(y, tuple) else (y,)


def _forward(unit: RotatingUnit, layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    weight, bias = weights[layer.weight], None if layer.bias is None else weights[layer.bias]
    if unit.output_sum is not None and bias is None:
        total = unit.output_sum.product(layer.weight, x, weight)
        if total is not None:
            return total
    return F.linear(x, weight, bias)


class _SliceLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        unit: RotatingUnit,
        layers: Sequence[Layer],
        leaf: int | None,
        weights: Sequence[Tensor],
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.unit, ctx.layers, ctx.leaf = unit, layers, leaf
        # Weights are no inputs: their gradients go to the receiver, and autograd must not make them too. Nor are they
        # saved: they may lie elsewhere when their slice comes in backward.
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        if len(layers) == 1:
            return _forward(unit, layers[0], x, weights)
        return tuple(_forward(unit, layer, x, weights) for layer in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), unit = ctx.saved_tensors, ctx.unit
        given = [(layer, grad) for layer, grad in zip(ctx.layers, grads, strict=True) if grad is not None]
        if not given:
            return None, None, None, None, None, None
        x_BI, dtype = x.reshape(-1, x.shape[-1]), given[0][1].dtype
        right_BI = as_dtype(x_BI, dtype)
        # Within autocast (of a backward, where forward ran without) products are not of the sum's dtype either.
        adds = x.dtype == dtype and not torch.is_autocast_enabled(x.device.type)
        inputs = unit.input_sums[ctx.leaf] if adds and ctx.leaf is not None else None
        # Past autograd, which would make a gradient of each layer and slice, and add them up.
        total = RunningSum() if inputs is None else inputs
        for layer, grad in reversed(given):  # as autograd would
            grad_BO = grad.reshape(-1, grad.shape[-1])
            if unit.trained:
                unit.receiver.add_product(layer.weight, grad_BO, right_BI)
                if layer.bias is not None:
                    unit.receiver.add(layer.bias, grad_BO.sum(0))
            if ctx.needs_input_grad[5]:
                factors = grad_BO.view(grad.shape), as_dtype(unit.present[layer.weight], dtype)
                total.add_product(*factors) if adds else total.add(as_dtype(torch.matmul(*factors), x.dtype))
        return None, None, None, None, None, None if total is inputs else total.value

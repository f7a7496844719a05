"""Linear layers inside a unit, on one slice: like `F.linear`, but a weight's gradient never exists on its own.

In backward the product that makes the weight's gradient accumulates straight into the buffer that travels with the
slice. Otherwise the gradient would be made, added, and freed: for few tokens that costs as much as the products. In the
same way the gradient of a layer whose input is the unit's adds to the unit's input gradient, and the output of a layer
that makes the unit's output adds to the sum over slices (`running_sum.py`).

[Note: layers of one input]
    Queries, keys and values are products of one input, and so are an MLP's gate and its other half. To autograd they
    are one function, since what a visit costs the host is mostly its functions: whichever layer runs first makes the
    outputs of all, each in memory of its own, and the others find theirs. Outputs are the same products of the same
    numbers. A module that then gives one of them another input, or leaves one out, has these layers run one by one from
    there on.

Shapes: B tokens (all leading dims flattened), I input features, O output features of the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch._torch_private import saved_tensor_hooks
from rotorch.core.errors import ConfigError
from rotorch.ops.autocast_state import AutocastState, as_dtype
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.running_sum import RunningSum


class Layer(NamedTuple):
    """A linear layer of a unit: the numbers of its weight and of its bias among the unit's weights.

    The bias is None if the layer has none, or one that is not cut with the weight.
    """

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
        self._beside = {layer: tuple(layers) for layers in of_one_input for layer in layers}
        """Of each layer the set that it belongs to."""
        self._weights: Sequence[Tensor] = ()
        self._in_run, self._hooks = False, None
        """Within `running`; the hooks of saved tensors that were there when it began."""
        self._early: dict[Layer, Tensor] = {}
        """Outputs that are made and that nobody has asked for yet."""
        self._input: Tensor | None = None
        self._made_under: tuple[int, AutocastState] | None = None
        """What they are made of: a tensor, its version, and the autocast."""

    @contextmanager
    def running(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """A block in which the module runs on a slice with these weights."""
        self.put(weights)
        self._in_run, self._hooks = True, saved_tensor_hooks()
        try:
            yield
            self._one_by_one()
        finally:
            self.put(weights)

    def put(self, weights: Sequence[Tensor]) -> None:
        """Takes a slice's weights, for parts of the module that run outside of `running` (`RotatingUnit.put`)."""
        self._weights = weights
        # The hooks of activation checkpointing would keep its inputs, whose memory is all that it is for.
        self._in_run, self._hooks = False, None
        self._forget()

    @torch.compiler.disable  # a graph would have the weights of one slice in it
    def __call__(self, layer: Layer, x: Tensor, *, by_itself: bool = False) -> Tensor:
        """`x [.., I]` times a layer's weight, plus its bias if it is cut with it: `[.., O]`.

        Args:
            layer: which one.
            x: input.
            by_itself: the output is not added to those of other slices, here or in a later slice.
        """
        unit, beside = self._unit, self._beside.get(layer)
        if not torch.is_grad_enabled():
            y = _forward(unit, layer, x, self._weights)
        # Within hooks of their own (activation checkpointing around a part of the module) functions must run again as
        # they ran, and that part may have some of the layers only.
        elif beside and self._in_run and not x.is_inference() and saved_tensor_hooks() == self._hooks:
            y = self._one_of(beside, layer, x)
        else:
            (y,) = self._apply((layer,), x)
        if unit.output_sum is not None and not by_itself:
            unit.output_sum.note(layer.weight, y)
        return y

    def _one_of(self, beside: Sequence[Layer], layer: Layer, x: Tensor) -> Tensor:
        made_under = x._version, AutocastState.now(x.device.type)
        if self._early:
            if layer not in self._early or x is not self._input or made_under != self._made_under:
                self._one_by_one(layer)
                return self._apply((layer,), x)[0]
        else:
            self._early = dict(zip(beside, self._apply(beside, x), strict=True))
            self._input, self._made_under = x, made_under
        y = self._early.pop(layer)
        if not self._early:
            self._forget()  # an input that is kept would be memory
        return y

    def _one_by_one(self, *layers: Layer) -> None:
        """Runs these layers and those beside them, as well as all whose outputs wait, by themselves from now on."""
        for layer in (*layers, *self._early):
            for each in self._beside.get(layer, ()):
                self._beside.pop(each)
        self._forget()

    def _forget(self) -> None:
        self._early, self._input, self._made_under = {}, None, None

    def _apply(self, layers: Sequence[Layer], x: Tensor) -> Sequence[Tensor]:
        unit = self._unit
        outputs = _SliceLinears.apply(unit, layers, unit.leaf_of(x), self._weights, unit.anchor, x)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _forward(unit: RotatingUnit, layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    # Detached: autocast keeps its casts of leaves, here of every slice that visits.
    weight, bias = weights[layer.weight].detach(), None if layer.bias is None else weights[layer.bias].detach()
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
        if unit.receiver is None:
            raise ConfigError(
                f"rtp: {unit.unit.name!r}: gradients of a part of its forward are asked for outside of its backward, "
                f"when its slices are not there. Ask for those of its output, or {unit.instead_of_visits}"
            )
        given = [(layer, grad) for layer, grad in zip(ctx.layers, grads, strict=True) if grad is not None]
        if not given:
            return None, None, None, None, None, None
        x_BI, dtype = x.reshape(-1, x.shape[-1]), given[0][1].dtype
        right_BI = as_dtype(x_BI, dtype)
        # Within autocast (of a backward, where forward ran without) products are not of the sum's dtype either.
        adds = x.dtype == dtype and not torch.is_autocast_enabled(x.device.type)
        inputs = unit.input_sums[ctx.leaf] if adds and ctx.leaf is not None else None
        # Past autograd, which would make a gradient of each layer and slice, and add them up. What is left to it is no
        # view of a product: autograd adds to it in place where other layers have the same input.
        total = RunningSum() if inputs is None else inputs
        for layer, grad in reversed(given):  # as autograd would
            grad_BO = grad.reshape(-1, grad.shape[-1])
            if unit.trained:
                unit.receiver.add_product(layer.weight, grad_BO, right_BI)
                if layer.bias is not None:
                    unit.receiver.add(layer.bias, grad_BO.sum(0))
            if ctx.needs_input_grad[5]:
                factors = grad_BO.view(grad.shape), as_dtype(unit.backward_weights[layer.weight], dtype)
                total.add_product(*factors) if adds else total.add(as_dtype(torch.matmul(*factors), x.dtype))
        return None, None, None, None, None, None if total is inputs else total.value

"""Convolutions with a rotating weight that is cut along its output channels.

A slice's channels may begin and end within a group of a grouped convolution. Then it takes up to three calls: the rest
of a group, whole groups, the beginning of one; each with the input channels that belong to it.

Shapes: N batch, I input channels, O output channels of the whole, R output channels of a slice, S any spatial dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotorch.core.spec import Range
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.rotate import RotatingUnit, SliceGradient

PLAIN: dict[Callable[..., Tensor], int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED: dict[Callable[..., Tensor], int] = {
    torch.conv_transpose1d: 1,
    torch.conv_transpose2d: 2,
    torch.conv_transpose3d: 3,
}
CONVOLUTIONS = PLAIN | TRANSPOSED
"""All convolutions, with the number of their spatial dims."""


@dataclass(frozen=True)
class Convolution:
    """One call's settings, one entry per spatial dim."""

    num_dims: int
    transposed: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, groups: int) -> Tensor:
        """The convolution of `x [N, I, S]`, in `groups` groups."""
        settings = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups)
        return torch.convolution(x, weight, bias, *settings)

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, *, groups: int, wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias, as far as they are `wanted`."""
        settings = (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups)
        bias = [grad.shape[1]]
        return torch.ops.aten.convolution_backward(grad, x, weight, bias, *settings, wanted)


def rotate_conv(func: Callable[..., Tensor], unit: RotatingUnit, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`func(x, the unit's weight, the unit's bias if it has one, *args, **kwargs)`, one of `CONVOLUTIONS`.

    All ranks of the ring call it for the same units in the same order. Sends the unit's slices once, in backward once
    more and the gradients.

    Args:
        func: the convolution.
        unit: of the weight `[O, I / groups, ..]` (transposed: `[I, O, ..]`, one group), cut along O, and a bias `[O]`.
        x: `[N, I, S]` or `[I, S]`.
        args: the arguments behind the bias.
        kwargs: the same by name.
    """
    x, call = _call(func, unit, x, *args, **kwargs)
    batched = x.dim() == call.num_dims + 2
    # Channels are dim 1 for the slices, so a single input gets a batch dim.
    x_NIS = x if batched else x.unsqueeze(0)
    if torch.is_grad_enabled() and (unit.trained or x.requires_grad):
        y = _RotateConv.apply(unit, call, unit.anchor, x_NIS)
    else:
        y = _forward(unit, call, x_NIS.detach(), AutocastState.now(x.device.type))
    return y if batched else y.squeeze(0)


def _call(
    func: Callable[..., Tensor],
    unit: RotatingUnit,
    x: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    *more: Any,
    **kwargs: Any,
) -> tuple[Tensor, Convolution]:
    transposed = func in TRANSPOSED
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = {"output_padding": 0, "groups": 1, "dilation": 1, **dict(zip(names, more, strict=False)), **kwargs}
    num_dims = CONVOLUTIONS[func]
    dilation = _each(given["dilation"], num_dims)
    if isinstance(padding, str):
        kernel = unit.slices.weights[0].shape[2:]
        x, padding = _padded(x, padding, kernel=kernel, dilation=dilation)
    call = Convolution(
        num_dims,
        transposed,
        _each(stride, num_dims),
        _each(padding, num_dims),
        _each(given["output_padding"], num_dims),
        dilation,
        given["groups"],
    )
    return x, call


def _each(value: Any, num_dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * num_dims if len(values) == 1 else values


def _padded(x: Tensor, mode: str, *, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Translates `padding="valid"` or `"same"` into an input and numbers; odd padding goes to the end."""
    if mode == "valid":
        return x, (0,) * len(kernel)
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    odd = [side for t in reversed(total) for side in (0, t % 2)]
    return (F.pad(x, odd) if any(odd) else x), tuple(t // 2 for t in total)


@dataclass(frozen=True)
class _Groups:
    """Whole groups of a slice, or a part of one, that one call computes.

    Attributes:
        out: its channels within the whole output.
        local: their first channel within the slice.
        inputs: the input channels that it needs.
        groups: number of groups in it.
    """

    out: Range
    local: int
    inputs: Range
    groups: int


def _parts(rows: Range, *, call: Convolution, num_out: int, num_in: int) -> Iterator[_Groups]:
    """Cuts a slice where groups begin (see the top of this file)."""
    each_out, each_in = num_out // call.groups, num_in // call.groups
    start = rows.start
    while start < rows.stop:
        # With `inside` the slice begins in the middle of a group, whose rest needs a call of its own.
        group, inside = divmod(start, each_out)
        whole = 0 if inside else (rows.stop - start) // each_out
        length = whole * each_out if whole else min(each_out - inside, rows.stop - start)
        inputs = Range(group * each_in, max(whole, 1) * each_in)
        yield _Groups(Range(start, length), start - rows.start, inputs, max(whole, 1))
        start += length


def _rows(unit: RotatingUnit, index: int) -> tuple[Range, int, int]:
    """The channels of slice `index`, the number of all, and the weight's dim along which they lie."""
    weight = unit.slices.weights[0]
    if weight.cut is None:
        raise AssertionError(f"{weight.name} is not cut")
    dim = weight.cut.dim
    rows = unit.slices.ranges(weight, index=index)[0]
    return rows, weight.shape[dim], dim


def _forward(unit: RotatingUnit, call: Convolution, x: Tensor, autocast: AutocastState) -> Tensor:
    x_NIS = x.to(autocast.dtype_for(x))
    y_NOS: Tensor | None = None
    with torch.autocast(x.device.type, enabled=False):  # inputs have its dtype already; it would cache each slice
        for visit in unit.visits(backward=False):
            weight, *bias = (w.detach().to(x_NIS.dtype) for w in unit.weights(visit))
            rows, num_out, dim = _rows(unit, visit.index)
            for part in _parts(rows, call=call, num_out=num_out, num_in=x.shape[1]):
                part_NRS = call(
                    x_NIS.narrow(1, part.inputs.start, part.inputs.length),
                    weight.narrow(dim, part.local, part.out.length),
                    bias[0].narrow(0, part.local, part.out.length) if bias else None,
                    groups=part.groups,
                )
                # Not before the first product, which alone tells the spatial size of outputs.
                if y_NOS is None:
                    y_NOS = x_NIS.new_empty(x.shape[0], num_out, *part_NRS.shape[2:])
                y_NOS.narrow(1, part.out.start, part.out.length).copy_(part_NRS)
    if y_NOS is None:
        raise AssertionError(f"{unit.unit.name}: every slice is empty")
    return y_NOS


class _RotateConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, call: Convolution, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.unit, ctx.call, ctx.autocast = unit, call, AutocastState.now(x.device.type)
        # Not the weight: its slices come again in backward.
        ctx.save_for_backward(x)
        return _forward(unit, call, x.detach(), ctx.autocast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        (x,) = ctx.saved_tensors
        dtype, wants_input = ctx.autocast.dtype_for(x), ctx.needs_input_grad[3]
        x_NIS, grad_NOS = x.to(dtype), grad.to(dtype)
        dx_NIS = torch.zeros_like(x_NIS) if wants_input else None
        for visit in unit.visits(backward=True):
            weight = unit.weights(visit)[0].detach().to(dtype)
            # All calls of the slice write into one gradient, which is handed over once.
            d_weight = torch.empty_like(weight) if unit.trained else None
            rows, num_out, dim = _rows(unit, visit.index)
            for part in _parts(rows, call=ctx.call, num_out=num_out, num_in=x.shape[1]):
                dx, dw, _ = ctx.call.backward(
                    grad_NOS.narrow(1, part.out.start, part.out.length).contiguous(),
                    x_NIS.narrow(1, part.inputs.start, part.inputs.length),
                    weight.narrow(dim, part.local, part.out.length),
                    groups=part.groups,
                    wanted=(wants_input, unit.trained, False),
                )
                if dx_NIS is not None:
                    # Several slices' channels may read the same input channels: their gradients add up.
                    dx_NIS.narrow(1, part.inputs.start, part.inputs.length).add_(dx)
                if d_weight is not None:
                    d_weight.narrow(dim, part.local, part.out.length).copy_(dw)
            if d_weight is not None:
                # After this slice's products: meanwhile the sum of the ranks before this one may have come.
                receiver = SliceGradient(unit, visit, wait=False)
                receiver.add(0, d_weight)
                if len(unit.slices.weights) > 1:
                    part_NRS = grad_NOS.narrow(1, rows.start, rows.length)
                    receiver.add(1, part_NRS.sum([d for d in range(part_NRS.dim()) if d != 1]))
                receiver.pass_on()
        return None, None, None, None if dx_NIS is None else dx_NIS.to(x.dtype)

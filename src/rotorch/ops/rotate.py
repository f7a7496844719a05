"""A module's forward and backward over visiting slices of its weights (rotation, arXiv 2311.01635 section 3).

[Note: one function per unit]
    A unit is one autograd function. Forward runs the module's own code once per visiting slice and sums the outputs;
    backward meets the slices in the opposite order, differentiates one slice's graph at a time, and hands its weight
    gradients to the ring. So the order of visits is explicit, a slice's interior is freed as soon as it is used, and
    recomputing it is one line: with `recompute`, forward keeps only the inputs, or the sources from which they are
    recomputed (see `recompute_norm.py`).

[Note: kept graphs and moving slices]
    Without recompute, a slice's graph outlives its visit. If slices pass through slots that are used again, tensors
    that autograd saves inside the slot are replaced by their offset in it, and looked up in backward in the buffer that
    then holds the same slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rotorch._torch_private import storage_key
from rotorch.comm.ring import GradientBuffer, Ring, Visit
from rotorch.comm.status_word import Operation, at
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range, Unit
from rotorch.ops.autocast_state import AutocastState
from rotorch.ops.ids_in_slice import add_rows
from rotorch.ops.keep_attention import KeepAttention
from rotorch.ops.no_saved_tensor_hooks import no_saved_tensor_hooks, to_save
from rotorch.ops.random_state import RandomState
from rotorch.ops.recompute_norm import recipe_of
from rotorch.ops.running_sum import OutputSum, RunningSum, add_product
from rotorch.shard.flat import FlatSlices

RunSlice = Callable[[list[Tensor], Sequence[Tensor]], Tensor]
"""(weights of one slice, inputs) -> output of that slice."""


@dataclass
class RotatingUnit:
    """A cut unit on this rank: its item on the ring, and the views of the visiting slice.

    Attributes:
        unit: its description.
        ring: brings the slices.
        item: its number on the ring.
        slices: layout of a visit in a flat buffer.
        recompute: backward runs a slice's forward again instead of keeping its graph.
        dtype: of its weights as modules see them: that of visiting slices, or, under autocast, of slices at home.
        keep_attention: a recomputed forward takes the kept outputs of attention.
        trained: True if its weights get gradients.
        may_lie_whole: True if its weights would be read whole in place over shared memory.
        recorded: True if what a slice's graph gives lies in memory that the next micro-batch overwrites (CUDA graphs).
        anchor: a scalar that requires a gradient, so that autograd visits the unit even if no input does.
        receiver: takes the weights' gradients during the backward of a slice.
        backward_weights: weights of the slice that visits, during its backward.
        put: puts a slice's weights into the module, for parts of it that run again while a kept graph is differentiated
            (a user's own `torch.utils.checkpoint`).
        leaves: the inputs that the graph of a slice begins with, while its forward runs.
        output_sum: sum of the slices' outputs, while their forward runs.
        input_sums: sums of their gradients, while the backward of a slice runs; None for inputs without gradients.
        parts: units of its slices' parts, each an item of its own (`core/row_parts.py`); none if slices come whole.
        visiting: number of the slice that came last.
        reached: numbers of the weights that a backward of this rank's step has given a gradient.
    """

    unit: Unit
    ring: Ring
    item: int
    slices: FlatSlices
    recompute: bool
    dtype: torch.dtype
    trained: bool = True
    keep_attention: bool = False
    may_lie_whole: bool = False
    recorded: bool = False
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    receiver: SliceGradient | None = None
    backward_weights: Sequence[Tensor] = ()
    put: Callable[[Sequence[Tensor]], None] | None = None
    leaves: Sequence[Tensor] = ()
    output_sum: OutputSum | None = None
    input_sums: Sequence[RunningSum | None] = ()
    parts: tuple[RotatingUnit, ...] = ()
    visiting: int = 0
    reached: set[int] = field(default_factory=set)
    _views: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Tensor | None:
        """The unit's one weight, whole, where its slices lie side by side (see `ops/side_by_side.py`); else None."""
        flat = self.ring.whole_weights(self.item)
        return None if flat is None else self.slices.whole(flat)

    @property
    def instead_of_visits(self) -> str:
        """The layout to write where slices that visit will not do, for errors."""
        return "write transport=shared_memory" if self.may_lie_whole else "write fsdp in place of rtp"

    @cached_property
    def forward_status(self) -> int:
        """The value of `StatusWord.now` for the whole unit's forward."""
        return at(Operation.BLOCK_FORWARD, unit=self.item)

    @cached_property
    def ranges(self) -> list[Range]:
        """Per slice: its range along the cut dim of the unit's one weight."""
        (weight,) = self.slices.weights
        return [self.slices.ranges(weight, index=k)[0] for k in range(self.slices.num_visits)]

    def visits(self, *, backward: bool, fetch: bool = True) -> Iterator[Visit]:
        """Yields the slices that are not empty, in this rank's order; the ring still gets its calls for empty ones."""
        for visit in self.ring.visits(self.item, backward=backward, fetch=fetch):
            if self.slices.numels[visit.index]:
                self.visiting = visit.index
                yield visit
            elif backward and self.trained:
                # Other ranks may wait for this one's turn or message, also for an empty slice.
                self.ring.gradient(self.item, visit, wait=True)
                self.ring.pass_on(self.item, visit)

    def sum_of(self, parts: RunningSum) -> Tensor | None:
        """The sum of what slices have given, in memory that stays."""
        return parts.owned() if self.recorded else parts.value

    @property
    def items(self) -> tuple[int, ...]:
        """Its items on the ring."""
        return tuple(part.item for part in self.parts) or (self.item,)

    def visits_of_parts(self, *, backward: bool, fetch: bool = True) -> Iterator[tuple[RotatingUnit, Visit]]:
        """Yields the visits of all parts, each with the unit of its part; in backward the last part comes first."""
        parts = self.parts or (self,)
        for part in reversed(parts) if backward else parts:
            for visit in part.visits(backward=backward, fetch=fetch):
                yield part, visit

    @contextmanager
    def summing(self, leaves: Sequence[Tensor]) -> Iterator[OutputSum]:
        """A block in which slices run forward from `leaves`; gives the sum of their outputs."""
        self.leaves, self.output_sum = leaves, OutputSum()
        try:
            yield self.output_sum
        finally:
            self.leaves, self.output_sum = (), None

    def leaf_of(self, x: Tensor) -> int | None:
        """Number of the input that `x` is; None if it is none."""
        for number, leaf in enumerate(self.leaves):
            if leaf is x:
                return number
        return None

    def weights(self, visit: Visit) -> list[Tensor]:
        """The visiting slice's weights as autograd leaves; the same objects for the same memory."""
        if visit.weights is None:
            raise AssertionError("this visit was asked for without weights")
        key = (visit.index, visit.weights.data_ptr())
        if key not in self._views:
            # .data, not .detach(): a leaf that is no view, so optimizers may write to the memory between two steps.
            views = self.slices.views(visit.weights, index=visit.index)
            self._views[key] = [view.data.requires_grad_(self.trained) for view in views]
        return self._views[key]

    def gradients(self, buffer: GradientBuffer, *, index: int) -> list[Tensor]:
        """The weights' parts of a slice's gradient buffer; the same objects for the same memory, where that stays."""
        flat = buffer.flat
        if not buffer.stays:
            return self.slices.views(flat, index=index)
        key = (index, flat.data_ptr())
        if key not in self._views:
            self._views[key] = self.slices.views(flat, index=index)
        return self._views[key]


class SliceGradient:
    """Takes the weight gradients of one visiting slice and passes their sum on.

    Products go straight into the travelling buffer, so that no weight gradient exists twice. If the buffer has not come
    yet (`wait=False` looks without waiting), their operands are kept, and they are made once it has.
    """

    def __init__(self, unit: RotatingUnit, visit: Visit, *, wait: bool) -> None:
        self._unit = unit
        self._visit = visit
        self._views: list[Tensor] | None = None
        self._fresh = [False] * len(unit.slices.weights)
        self._early: list[Callable[[], None]] = []
        if unit.trained:
            self._look(wait=wait)

    def _look(self, *, wait: bool) -> None:
        buffer = self._unit.ring.gradient(self._unit.item, self._visit, wait=wait)
        if buffer is not None:
            self._views = self._unit.gradients(buffer, index=self._visit.index)
            self._fresh = [buffer.fresh] * len(self._views)

    def add(self, number: int, grad: Tensor) -> None:
        """Adds the gradient of weight `number` of the unit."""
        self._unit.reached.add(number)
        if self._views is None:
            self._early.append(lambda: self.add(number, grad))
        elif self._fresh[number]:
            self._views[number].copy_(grad)
            self._fresh[number] = False
        else:
            self._views[number].add_(grad)

    def add_product(self, number: int, left_BM: Tensor, right_BN: Tensor) -> None:
        """Adds `left.T @ right`: of a linear layer's weight `[O, I]`, its output's gradient and its input."""
        self._unit.reached.add(number)
        if self._views is None:
            self._early.append(lambda: self.add_product(number, left_BM, right_BN))
            return
        left_MB = left_BM.t()
        if add_product(self._views[number], left_MB, right_BN, fresh=self._fresh[number]):
            self._fresh[number] = False
        else:
            self.add(number, torch.mm(left_MB, right_BN))

    def add_rows(self, number: int, ids_B: Tensor, grad_BD: Tensor, *, rows: Range) -> None:
        """Adds the gradients of looked-up ids to that of an embedding's weight, of which the slice has `rows`."""
        if self._views is None:
            raise AssertionError("rows are added to a buffer that was waited for")
        self._unit.reached.add(number)
        if self._fresh[number]:
            self._views[number].zero_()
            self._fresh[number] = False
        view = self._views[number]
        if view.dtype == self._unit.ring.dtype:
            add_rows(view, ids_B, grad_BD, rows=rows)
            return
        # In the precision of hops each token would round the sum of its row.
        sums = torch.zeros_like(view, dtype=self._unit.ring.dtype)
        add_rows(sums, ids_B, grad_BD, rows=rows)
        view.add_(sums)

    def pass_on(self) -> None:
        """Makes additions that came too early, and sends the sum on; this rank has added all its parts."""
        unit = self._unit
        if not unit.trained or self._complete(wait=False):
            return
        # The own slice is the last of this rank's backward, no rank waits for it: its turn can come in a later layer.
        if unit.ring.defers_adds and self._visit.index == unit.ring.position:
            unit.ring.defer(self._complete)
        else:
            self._complete(wait=True)

    def _complete(self, *, wait: bool) -> bool:
        if self._views is None:  # this visit's products took time: the buffer may have come meanwhile
            self._look(wait=wait)
        if self._views is None:
            return False
        for addition in self._early:
            addition()
        self._early.clear()
        for view, fresh in zip(self._views, self._fresh, strict=True):
            # A weight that this slice did not use: the next rank adds to the contents of this memory.
            if fresh:
                view.zero_()
        self._unit.ring.pass_on(self._unit.item, self._visit)
        return True


def rotate_module(unit: RotatingUnit, run: RunSlice, inputs: Sequence[Tensor]) -> Tensor:
    """Returns the sum over slices of `run(slice weights, inputs)`.

    Differentiable in the inputs and, through the ring, the weights.

    All ranks of the ring call it for the same units in the same order. Sends the unit's slices once, in backward once
    more and the gradients.
    """
    if not torch.is_grad_enabled() or not (unit.trained or any(x.requires_grad for x in inputs)):
        with torch.no_grad():
            return _sum_slices(unit, run, inputs)
    return _RotateModule.apply(unit, run, unit.anchor, *inputs)


def _sum_slices(unit: RotatingUnit, run: RunSlice, inputs: Sequence[Tensor]) -> Tensor:
    autocast = AutocastState.now(unit.ring.home_weights(unit.item).device.type)
    with unit.summing(inputs) as total:
        for visit in unit.visits(backward=False):
            with autocast.again():
                while not total.take(run(unit.weights(visit), inputs)):
                    pass
    return _complete(total, unit)


def _complete(total: OutputSum, unit: RotatingUnit) -> Tensor:
    if (outputs := unit.sum_of(total)) is None:
        raise AssertionError(f"{unit.unit.name}: every slice is empty")
    return outputs


@dataclass
class _Kept:
    """One slice's state for backward: its weights and the end of its graph, or the random state for its recomputation.

    Not its output: that is in the sum, and the graph does not need it.
    """

    weights: list[Tensor]
    end: GradientEdge | None
    random: RandomState | None
    attention: KeepAttention | None

    def same_attention(self) -> AbstractContextManager[Any]:
        """Returns a block for the recomputation in which attention gives its kept outputs, if there are any."""
        return nullcontext() if self.attention is None else self.attention.use()


class _RotateModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: RotatingUnit, run: RunSlice, anchor: Tensor, *inputs: Tensor) -> Tensor:
        # Leaves: backward of a slice's graph ends here, and their gradients are summed over slices.
        leaves = _leaves(inputs, ctx.needs_input_grad[3:])
        ctx.unit, ctx.run, ctx.kept, ctx.resident = unit, run, {}, _Resident()
        if unit.recompute:
            ctx.norm_recipes, sources = zip(*map(recipe_of, inputs), strict=True) if inputs else ((), ())
            ctx.save_for_backward(*sources)  # notices if one is overwritten before backward
        else:
            ctx.leaves = leaves  # where the kept graphs begin
        ctx.autocast = AutocastState.now(unit.ring.home_weights(unit.item).device.type)
        with unit.summing(leaves) as total:
            for visit in unit.visits(backward=False):
                output, ctx.kept[visit.index] = _run_kept(ctx, visit, leaves)
                while not total.take(output):
                    output, ctx.kept[visit.index] = _run_kept(ctx, visit, leaves)
                del output
        return _complete(total, unit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        unit: RotatingUnit = ctx.unit
        if ctx.run is None:
            raise ConfigError(
                f"rtp: {unit.unit.name!r}: a second backward through a graph that the first has freed: slices are not "
                f"kept by retain_graph=True. Add the losses and call backward once, or {unit.instead_of_visits}"
            )
        leaves = _leaves(_inputs_again(ctx), ctx.needs_input_grad[3:]) if unit.recompute else ctx.leaves
        wanted = [x for x in leaves if x.requires_grad]
        sums = [RunningSum() for _ in wanted]
        given = iter(sums)
        unit.input_sums = [next(given) if x.requires_grad else None for x in leaves]
        for visit in unit.visits(backward=True):
            # Popped: this slice's graph is freed as soon as it has been differentiated.
            kept: _Kept = ctx.kept.pop(visit.index)
            weights, end = kept.weights, kept.end
            unit.backward_weights = unit.weights(visit)
            if end is None:
                weights, unit.leaves = unit.backward_weights, leaves
                with torch.enable_grad(), ctx.autocast.again(), _again(kept.random), kept.same_attention():
                    end = get_gradient_edge(ctx.run(weights, leaves))
            elif unit.put is not None:
                unit.put(unit.backward_weights)
            # Tensors saved inside the slot are found here while autograd runs this slice's graph.
            ctx.resident.weights = visit.weights
            unit.receiver = SliceGradient(unit, visit, wait=False)
            # Linear layers hand their weights' gradients to the receiver, and autograd has none; it has those of other
            # uses, also of a layer's weight that the module's code takes by itself.
            trained = [(i, w) for i, w in enumerate(weights) if w.requires_grad]
            asked = [unit.anchor, *wanted, *(w for _, w in trained)]
            # The anchor is asked for too: something must be, if inputs need no gradients and the receiver takes all.
            _, *grads = torch.autograd.grad([end], asked, [grad_output], allow_unused=True)
            del end, kept
            for total, grad in zip(sums, grads, strict=False):
                if grad is not None:
                    total.add(grad)
            for (number, _), grad in zip(trained, grads[len(wanted) :], strict=True):
                if grad is not None:
                    unit.receiver.add(number, grad)
            # Gradients of a slice's experts are as large as the slice: not beside those of the next one.
            grad, grads = None, []
            unit.receiver.pass_on()
        # The graph may live on with the loss that was computed from it; its inputs need not.
        unit.receiver = ctx.resident.weights = ctx.run = ctx.leaves = ctx.norm_recipes = None
        found, unit.leaves, unit.input_sums, unit.backward_weights = unit.input_sums, (), (), ()
        return (None, None, None, *(None if total is None else unit.sum_of(total) for total in found))


def _run_kept(ctx: Any, visit: Visit, leaves: list[Tensor]) -> tuple[Tensor, _Kept]:
    """Runs the visiting slice; returns its output, and what backward needs of it."""
    unit: RotatingUnit = ctx.unit
    weights = unit.weights(visit)
    # Per slice: each draws on from where the slice before it left the generators.
    random = RandomState.now(weights[0]) if unit.recompute else None
    keep_graph, forget = torch.set_grad_enabled(not unit.recompute), _forget_weights(unit, visit, ctx.resident)
    attention = KeepAttention() if unit.keep_attention else None
    with keep_graph, forget, ctx.autocast.again(), attention or nullcontext():
        output = ctx.run(weights, leaves)
    # The edge, not the output: the sum has its values already.
    end = None if unit.recompute else get_gradient_edge(output)
    return output, _Kept(weights, end, random, attention)


def _inputs_again(ctx: Any) -> list[Tensor]:
    pairs = zip(ctx.norm_recipes, ctx.saved_tensors, strict=True)
    return [source if how is None else how.again(source) for how, source in pairs]


def _again(random: RandomState | None) -> Any:
    return nullcontext() if random is None else random.again()


def _leaves(inputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor]:
    """The inputs as leaves of a new graph, in the same memory."""
    return [x.detach().requires_grad_(needed) for x, needed in zip(inputs, needs_grad, strict=True)]


@dataclass(frozen=True)
class _InSlot:
    """Position of a saved tensor in the visiting slice."""

    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass
class _Resident:
    """The slice that is visiting in backward.

    Kept graphs refer to this and not to their function, which refers to them: such a cycle would never be freed.
    """

    weights: Tensor | None = None


def _forget_weights(unit: RotatingUnit, visit: Visit, resident: _Resident) -> Any:
    """Keeps a graph from saving views of a slot (see [Note: kept graphs and moving slices])."""
    if unit.recompute or visit.weights is None or unit.ring.stays(unit.item, visit):
        return no_saved_tensor_hooks()
    slot, start = storage_key(visit.weights), visit.weights.storage_offset()

    def pack(tensor: Tensor) -> Tensor | _InSlot:
        if tensor.is_meta or storage_key(tensor) != slot:
            return to_save(tensor)
        return _InSlot(tensor.storage_offset() - start, tensor.size(), tensor.stride())

    def unpack(saved: Tensor | _InSlot) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        flat = resident.weights
        if flat is None:
            raise AssertionError("a kept graph is used outside its backward")
        return torch.as_strided(flat, saved.size, saved.stride, flat.storage_offset() + saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

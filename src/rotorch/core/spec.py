"""The parts of a model as strategies see it: weights, the cuts that each allows, and the units that they form.

A `Weight` has the cut that it allows (`Cut`), a `Unit` is the smallest piece that a strategy moves, splits or keeps
whole, a `ModelSpec` is the whole model. All of it is plain data: the planner reads it without torch,
`models/describe.py` makes it.

[Note: slices]
    A cut divides one dimension of a weight into `groups` indivisible groups (an attention's key/value heads, the rows
    of a vocabulary, the columns of an MLP), possibly repeated in `blocks` (gate and up fused in one matrix: each half
    is cut). Slice k of n takes a run of consecutive groups of every block; when n does not divide the groups, the
    first slices take one group more, and some may be empty. All cut weights of one unit have the same number of
    groups, so that slice k of the unit is a smaller unit of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

Note = TypeVar("Note")


class Combine(StrEnum):
    """The combination of slices' outputs into the unit's output."""

    SUM = "sum"  # column-wise then row-wise products: partial sums
    CONCAT = "concat"  # output columns, placed side by side
    NONE = "none"  # nothing is cut


class UnitKind(StrEnum):
    """The kind of a unit: the part of the model that it is."""

    MODULE = "module"  # a module whose forward runs on slices of its weights as it is
    WEIGHT = "weight"  # one weight that is cut at the place of its use: a linear layer, an embedding, a head
    REPLICATED = "replicated"  # weights nobody cuts: norms, biases added after a sum, buffers with gradients


@dataclass(frozen=True)
class Range:
    """`length` consecutive indices from `start` along one dimension."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Cut:
    """The cut that a weight allows: along `dim`, into `groups` indivisible groups, in each of `blocks` blocks."""

    dim: int
    groups: int
    blocks: int = 1

    def ranges(self, size: int, *, num_slices: int, index: int, count: int = 1) -> tuple[Range, ...]:
        """Returns the ranges along `dim` that slice `index` of `num_slices` takes, one per block (see [Note: slices]).

        Args:
            size: length of the weight along `dim`; a multiple of `groups * blocks`.
            num_slices: number of slices.
            index: number of the slice, 0-based.
            count: so many slices from this one on, together.
        """
        block, rest = divmod(size, self.blocks)
        group_size, odd = divmod(block, self.groups)
        if rest or odd:
            raise ValueError(f"size {size} is not a multiple of {self.blocks} blocks x {self.groups} groups")
        each, extra = divmod(self.groups, num_slices)
        first, end = (k * each + min(k, extra) for k in (index, index + count))
        return tuple(Range(b * block + first * group_size, (end - first) * group_size) for b in range(self.blocks))

    def of_slice(self, *, num_slices: int, index: int) -> Cut | None:
        """Returns the cut that slice `index` of `num_slices` allows in turn; None if the slice is empty."""
        each, extra = divmod(self.groups, num_slices)
        groups = each + (index < extra)
        return replace(self, groups=groups) if groups else None


@dataclass(frozen=True)
class GridCut:
    """The cut that a weight allows on a grid of ranks, where activations are cut along their features.

    A matrix of linear layers is cut along its inputs by rows of the grid and along its outputs by columns, a table for
    look-ups by its rows and its columns; weights with one feature of the residual stream per entry of a dim (norms,
    biases, positions, a convolution that makes features of an image) by columns only.

    Attributes:
        rows: among the ranks of one column; None: they hold the same.
        columns: among the ranks of one row; None: they hold the same.
        sums: numbers per token that are summed over all features where the weight is used (by a norm), in forward and
            again in backward.
        whole_output: True for the matrix of a linear layer whose outputs every rank has whole (a classifier): it is cut
            along its inputs, by columns, and the products of a row's ranks are summed.
    """

    rows: Cut | None = None
    columns: Cut | None = None
    sums: int = 0
    whole_output: bool = False

    @property
    def is_table(self) -> bool:
        """True if rows of the weight lie in rows of the grid, as for look-ups."""
        return self.rows is not None and self.rows.dim == 0

    @property
    def is_linear(self) -> bool:
        """True if its inputs lie in rows of the grid and its outputs in columns."""
        return self.rows is not None and self.rows.dim == 1


@dataclass(frozen=True)
class Weight:
    """One parameter of the model: its name, its whole shape, and the cut that it allows (None: it stays whole).

    `aliases` are further names of the same tensor (a head tied to its embedding); they never count twice. `trained`
    weights get gradients. One that is `beside_slices` is not cut, but used only by modules that run on slices: each
    slice gives a part of its gradient. `grid` is the cut that it allows where activations are cut along their features;
    None if that was not asked for. `copy_itemsize` is of the copies that passes compute with in another dtype
    (`param_dtype`); None if they compute with the weight itself.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    cut: Cut | None = None
    aliases: tuple[str, ...] = ()
    trained: bool = True
    beside_slices: bool = False
    grid: GridCut | None = None
    copy_itemsize: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def itemsize_in_pass(self) -> int:
        """Bytes of an element of what passes compute with."""
        return self.copy_itemsize or self.itemsize

    def slice_shape(self, *, num_slices: int, index: int, count: int = 1) -> tuple[int, ...]:
        """Returns the shape of `count` slices of `num_slices` from `index` on; the whole shape if it is not cut."""
        if self.cut is None:
            return self.shape
        dim = self.cut.dim
        ranges = self.cut.ranges(self.shape[dim], num_slices=num_slices, index=index, count=count)
        return (*self.shape[:dim], sum(r.length for r in ranges), *self.shape[dim + 1 :])

    def slice(self, *, num_slices: int, index: int) -> Weight:
        """Returns slice `index` of `num_slices` as a weight of its own, which may be cut again; itself if not cut."""
        if self.cut is None:
            return self
        shape = self.slice_shape(num_slices=num_slices, index=index)
        return replace(self, shape=shape, cut=self.cut.of_slice(num_slices=num_slices, index=index))

    def block_shape(self, *, size: int, row: int, column: int) -> tuple[int, ...]:
        """Returns the shape of the block at `row` and `column` of a grid of `size` x `size`."""
        shape = list(self.shape)
        if self.grid is not None:
            for cut, index in ((self.grid.rows, row), (self.grid.columns, column)):
                if cut is not None:
                    ranges = cut.ranges(self.shape[cut.dim], num_slices=size, index=index)
                    shape[cut.dim] = sum(r.length for r in ranges)
        return tuple(shape)

    def slice_bytes(self, *, num_slices: int, index: int) -> int:
        """Returns the bytes of slice `index` of `num_slices`."""
        return math.prod(self.slice_shape(num_slices=num_slices, index=index)) * self.itemsize


@dataclass(frozen=True)
class Unit:
    """The smallest piece that a strategy moves, splits or keeps whole.

    Attributes:
        name: the module's name, or the weight's for `UnitKind.WEIGHT`.
        kind: see `UnitKind`.
        combine: the combination of its slices' outputs into its output.
        weights: that it owns; a tied weight belongs to the unit of its first use.
        uses: number of its uses in a step's forward (a tied embedding and head: 2).
        reads_in_backward: number of those uses that need the weights again in backward (an embedding's does not).
        replicated: names of weights that its forward needs whole beside its slices (q_norm); they belong to a
            REPLICATED unit.
        added_once: names of biases that are added once, after the sum over slices; they belong to a REPLICATED unit.
        logits: True if one of its uses is a language model's head, whose products only a loss reads.
        stages: the pipeline stages that use it, if there are stages (see `core/stages.py`).
        notes: strategies' own records about it: an object each, of a class of their own (see `note`).
    """

    name: str
    kind: UnitKind
    combine: Combine
    weights: tuple[Weight, ...]
    uses: int = 1
    reads_in_backward: int = 1
    replicated: tuple[str, ...] = ()
    added_once: tuple[str, ...] = ()
    logits: bool = False
    stages: tuple[int, ...] = ()
    notes: tuple[object, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(w.num_bytes for w in self.weights)

    @property
    def bytes_in_pass(self) -> int:
        """Bytes of its weights as passes compute with them."""
        return sum(w.numel * w.itemsize_in_pass for w in self.weights)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the weights that get gradients, which are as large."""
        return sum(w.num_bytes for w in self.weights if w.trained)

    def note(self, kind: type[Note]) -> Note | None:
        """Returns a strategy's note about the unit, by the note's class; None if there is none."""
        return next((note for note in self.notes if type(note) is kind), None)

    def with_note(self, note: object) -> Unit:
        """The same unit with a note, in place of the one of that class that was there."""
        return replace(self, notes=(*(other for other in self.notes if type(other) is not type(note)), note))

    def slice_bytes(self, *, num_slices: int, index: int) -> int:
        """Returns the bytes of slice `index` of `num_slices` of this unit's weights."""
        return sum(w.slice_bytes(num_slices=num_slices, index=index) for w in self.weights)

    def slice(self, *, num_slices: int, index: int) -> Unit:
        """Returns slice `index` of `num_slices` as a unit of its own, which may be cut again."""
        return replace(self, weights=tuple(w.slice(num_slices=num_slices, index=index) for w in self.weights))


@dataclass(frozen=True)
class Half:
    """A half of a layer whose two blocks each add to the hidden states: its attention, or what follows.

    Attributes:
        children: names of the layer's modules that belong to it, in order of use.
        block: the one of them whose output is added.
        outputs: how many values it gives as a tuple, the hidden states first; 0: these alone.
    """

    children: tuple[str, ...]
    block: str
    outputs: int = 0


@dataclass(frozen=True)
class LayerOrder:
    """The layers that hidden states pass one after another, and the modules behind them.

    Attributes:
        layers: names of the repeated layers, in order; none if the model cannot be cut between layers.
        after: names of modules between the last layer and the output.
        width: features of the hidden states between layers.
        attention_width: features of all heads of a layer together; 0 if that is not known.
        experts_per_token: number of a layer's experts that a token goes to; 0 if all.
        refused: the reason why the model cannot be cut into stages; "" if it can.
        halves: both of each layer, if it may be cut inside of its layers as well; else none.
        not_in_halves: the reason why it may not be; "" if it may, or if nobody knows.
        kinds: kind of each layer, such as "full_attention" and "sliding_attention"; none if all are alike.
    """

    layers: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    width: int = 0
    attention_width: int = 0
    experts_per_token: int = 0
    refused: str = ""
    halves: tuple[Half, ...] = ()
    not_in_halves: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def num_places(self) -> int:
        """Number of half layers, between which stages begin."""
        return 2 * len(self.layers)

    def place_number(self, name: str) -> int:
        """The half layer of a weight by number, two for each layer; -1 before the layers, `num_places` behind them."""
        layer = self.layer_number(name)
        if not 0 <= layer < len(self.layers):
            return -1 if layer < 0 else self.num_places
        child = name.removeprefix(f"{self.layers[layer]}.").partition(".")[0]
        return 2 * layer + (bool(self.halves) and child in self.halves[1].children)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {layer: number for number, layer in enumerate(self.layers)}

    def layer_number(self, name: str) -> int:
        """The layer of a weight by number; -1 before the layers, the number of layers behind them."""
        if name not in self._layer_numbers:
            self._layer_numbers[name] = self._find(name)
        return self._layer_numbers[name]

    @cached_property
    def _layer_numbers(self) -> dict[str, int]:
        """Results of `layer_number`: a search asks for the same names in every layout."""
        return {}

    def _find(self, name: str) -> int:
        number = _number_in(name, self._numbers)
        if number is not None:
            return number
        return len(self.layers) if any(name.startswith(f"{module}.") for module in self.after) else -1


NO_ORDER = LayerOrder(refused="it has no pipeline plan (base_model_pp_plan of a Hugging Face configuration)")


@dataclass(frozen=True)
class KeptWhole:
    """A weight that is large enough to be cut and is not, with the reason."""

    name: str
    num_bytes: int
    why: str


NEEDED_WHOLE = "every slice of a module that runs on slices of its weights needs it"
"""The reason why a weight of `ModelSpec.inside` is whole, where it is."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as strategies and the planner see it: its units in order of use.

    Attributes:
        name: the model's class.
        units: all its units, in order of use.
        kept_whole: large weights that have no role in a declared plan, and that the rules could not cut either.
        inside: units of weights that modules which run on slices need whole: `replicated`, unless a strategy makes
            them whole for each call (`with_inside_cut`).
        experts: units of modules of experts, cut between experts; in `units` their weights are cut as the plan says, or
            whole (`core/whole_experts.py`).
        experts_stay_cut: the reason why `experts` has none, or lacks some; "" if there is none.
        by_plan: True if the cuts are those of the user's own plan, not of the model's plan or our rules.
        features_stay_whole: the reason why activations cannot be cut along their features; "" if they can.
        tokens_stay_whole: the same for the tokens of a sequence, between the modules of its layers; "" also if that was
            not asked for.
        sequences_stay_whole: the same for sequences of which each rank has a part from the embedding to the loss.
        heads_stay_together: the same for attentions of which each rank then computes some heads.
        order: the layers between which it may be cut into pipeline stages.
        blocks: names of its repeated modules, also of those that cannot be stages; none if it has no list of modules.
    """

    name: str
    units: tuple[Unit, ...]
    kept_whole: tuple[KeptWhole, ...] = ()
    inside: tuple[Unit, ...] = ()
    experts: tuple[Unit, ...] = ()
    experts_stay_cut: str = ""
    by_plan: bool = False
    features_stay_whole: str = ""
    tokens_stay_whole: str = ""
    sequences_stay_whole: str = ""
    heads_stay_together: str = ""
    order: LayerOrder = NO_ORDER
    blocks: tuple[str, ...] = ()

    def block_number(self, weight: Weight) -> int:
        """The one repeated module that a weight is used in, by number; the number of all if there is no such one."""
        found = {_number_in(name, self._block_numbers) for name in (weight.name, *weight.aliases)}
        number = found.pop() if len(found) == 1 else None
        return len(self.blocks) if number is None else number

    def weights_of_blocks(self) -> list[tuple[str, ...]]:
        """Names of the weights of each repeated module, in the module's order, without those that others use too."""
        found: list[list[str]] = [[] for _ in self.blocks]
        for weight in self.weights:
            if (number := self.block_number(weight)) < len(found):
                found[number].append(weight.name)
        return [tuple(names) for names in found]

    @cached_property
    def _block_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.blocks)}

    def with_copies(self, itemsize: int | None) -> ModelSpec:
        """The same, if passes compute in `itemsize` bytes an element, so with copies of weights of another size.

        None: with the weights themselves.
        """

        def copied(weight: Weight) -> Weight:
            return weight if weight.itemsize == itemsize else replace(weight, copy_itemsize=itemsize)

        def all_copied(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
            return tuple(replace(unit, weights=tuple(map(copied, unit.weights))) for unit in units)

        if itemsize is None:
            return self
        units, inside, experts = map(all_copied, (self.units, self.inside, self.experts))
        return replace(self, units=units, inside=inside, experts=experts)

    def with_inside_cut(self) -> ModelSpec:
        """The same with the units of `inside` among the cut ones."""
        cut = {w.name for unit in self.inside for w in unit.weights}
        beside = {w.name for w in self.weights if w.beside_slices}
        units: list[Unit] = list(self.cut_units)
        for unit in self.inside:  # before the unit that needs it
            marked = tuple(replace(w, beside_slices=w.name in beside) for w in unit.weights)
            unit = replace(unit, weights=marked)
            here = (i for i, other in enumerate(units) if unit.name in other.replicated)
            units.insert(next(here, len(units)), unit)
        for unit in self.units:
            if unit.kind is UnitKind.REPLICATED:
                left = tuple(w for w in unit.weights if w.name not in cut)
                units += [replace(unit, weights=left)] if left else []
        kept = tuple(kept for kept in self.kept_whole if kept.name not in cut)
        return replace(self, units=tuple(units), kept_whole=kept, inside=())

    def with_inside_whole(self) -> ModelSpec:
        """The same without the cuts of `with_inside_cut`: the modules that need these weights find them whole."""
        needed = {name for unit in self.units for name in unit.replicated}
        left = [KeptWhole(u.name, u.num_bytes, NEEDED_WHOLE) for u in self.cut_units if u.name in needed]
        if not left:
            return self

        def uncut(unit: Unit) -> Unit:
            if unit.kind is UnitKind.REPLICATED or unit.name not in needed:
                return unit
            weights = tuple(replace(weight, cut=None) for weight in unit.weights)
            return replace(unit, kind=UnitKind.REPLICATED, combine=Combine.NONE, weights=weights)

        return replace(self, units=tuple(map(uncut, self.units)), kept_whole=(*self.kept_whole, *left))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(w for u in self.units for w in u.weights)

    @cached_property
    def shared_by_layers(self) -> str:
        """Name of a weight that several layers share, or a layer and what lies around the layers; "" if there is none.

        An embedding tied to a head is none.
        """
        for weight in self.weights:
            layers = {self.order.layer_number(name) for name in (weight.name, *weight.aliases)}
            if len(layers) > 1 and any(0 <= layer < len(self.order.layers) for layer in layers):
                return weight.name
        return ""

    @property
    def num_parameters(self) -> int:
        return sum(w.numel for w in self.weights)

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that get gradients; all of them, unless some are frozen."""
        return sum(w.numel for w in self.weights if w.trained)

    @property
    def num_bytes(self) -> int:
        return sum(w.num_bytes for w in self.weights)

    @property
    def copies_bytes(self) -> int:
        """Bytes of copies of all weights in the dtype of passes; 0 if passes compute with the weights."""
        return sum(w.numel * (w.copy_itemsize or 0) for w in self.weights)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the weights that get gradients, which are as large."""
        return sum(u.trained_bytes for u in self.units)

    @cached_property
    def finest_cut(self) -> int:
        """Groups of the weight that has most of them: on more ranks than this, some would hold nothing."""
        return max((w.cut.groups for u in self.cut_units for w in u.weights if w.cut), default=1)

    @cached_property
    def cut_units(self) -> tuple[Unit, ...]:
        """The units that can be cut into slices."""
        return tuple(u for u in self.units if u.kind is not UnitKind.REPLICATED)

    def summary(self, *, most: int = 5) -> str:
        """Bytes that are cut and that stay whole, as text; names the `most` largest of `kept_whole` with the reason."""
        cut = sum(u.num_bytes for u in self.cut_units)
        lines = [
            f"{self.name}: {cut:,} of {self.num_bytes:,} bytes of weights are cut, in {len(self.cut_units)} units; "
            f"{self.num_bytes - cut:,} are whole on every rank"
        ]
        lines += [f"whole: {kept.name!r} ({kept.num_bytes:,} bytes): {kept.why}" for kept in self.kept_whole[:most]]
        rest = self.kept_whole[most:]
        if rest:
            lines.append(f"whole: {len(rest)} more ({sum(kept.num_bytes for kept in rest):,} bytes)")
        return "\n".join(lines)


def _number_in(name: str, numbers: Mapping[str, int]) -> int | None:
    """The number of the module that a weight's name begins with; None if it begins with none of them."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if (number := numbers.get(".".join(parts[:end]))) is not None:
            return number
    return None

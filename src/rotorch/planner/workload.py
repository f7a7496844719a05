"""A model folded into classes of equal layers, and the operators that one rank issues for each of them.

[Note: classes]
    Layers of one kind whose units have the same weights, cuts and roles are one class, so 2 and 1,000 layers cost a
    plan the same. One layer represents its class; all others differ from it in their number only.

[Note: what is no product]
    Between products a model reads and writes activations: norms and residual sums at both sides of an attention and an
    MLP, biases and activation functions behind each matrix. Each is counted as an operator with the bytes that it reads
    and writes. Attention is one operator whose scores never reach memory, or, if it is not fused, two batched
    products with a softmax and a dropout of scores between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.core.visits_by_size import Visits
from rotorch.core.whole_experts import WholeExperts
from rotorch.core.whole_units import is_whole
from rotorch.planner.speeds import Row, Work

_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Cutting:
    """Numbers of parts into which a rank's operators are cut.

    Attributes:
        interior: ranks among which heads, columns of an MLP and rows of a vocabulary are cut.
        features: ranks among which features of the residual stream are cut.
        slices: slices that a rank computes with one after another, of a module's interior.
        steps: blocks that a product is made of, along its inputs.
    """

    interior: int = 1
    features: int = 1
    slices: int = 1
    steps: int = 1

    @property
    def parts(self) -> int:
        """Number of parts in which a unit is computed."""
        return self.slices * self.steps

    def of(self, unit: Unit) -> Cutting:
        """The same for a unit that has a number of visits of its own."""
        note = unit.note(Visits)
        return self if note is None else replace(self, slices=note.count)


@dataclass(frozen=True)
class Numerics:
    """Numerics of a model's step that change its work.

    Attributes:
        fused_attention: attention is one operator, and its scores never reach memory.
        heads: of an attention; needed only where it is not fused.
        optimizer_bytes: read and written per parameter in an optimizer's step, gradient norm included.
        recompute: backward computes every layer again.
        recompute_attention: backward computes the scores of attentions again, which are not kept.
        adds_gradients: each micro-batch adds its gradients to those before.
    """

    fused_attention: bool = True
    heads: int = 1
    optimizer_bytes: float = 40.0
    recompute: bool = False
    recompute_attention: bool = False
    adds_gradients: bool = True


@dataclass(frozen=True)
class Passes:
    """Operators of one unit for one micro-batch."""

    forward: Work
    backward_input: Work
    backward_weight: Work

    @staticmethod
    def together(each: Sequence[Passes]) -> Passes:
        """Joins the passes of units that run one after another."""
        return Passes(
            Work.together([p.forward for p in each]),
            Work.together([p.backward_input for p in each]),
            Work.together([p.backward_weight for p in each]),
        )

    @property
    def backward(self) -> Work:
        """Both of its halves."""
        return Work.together([self.backward_input, self.backward_weight])


@dataclass(frozen=True)
class LayerClass:
    """Equal layers (see [Note: classes]).

    Attributes:
        units: of one of them; weights that nobody cuts come last, in a unit of their own.
        count: number of such layers.
    """

    units: tuple[Unit, ...]
    count: int


@dataclass(frozen=True)
class FoldedModel:
    """A model as the planner computes with it.

    Attributes:
        name: of its class.
        before: units before the layers: embeddings.
        classes: of layers.
        pattern: the class of each layer, in order.
        after: units behind the layers: the last norm, a head.
        width: features between layers.
        attention_width: of all heads together.
        experts: to how many experts of a layer a token goes; 0: to all.
        refused: why it cannot be cut into pipeline stages; "" if it can.
        spec: with one layer of each class only, after `short`.
    """

    name: str
    before: tuple[Unit, ...]
    classes: tuple[LayerClass, ...]
    pattern: tuple[int, ...]
    after: tuple[Unit, ...]
    width: int
    attention_width: int
    experts: int
    refused: str
    spec: ModelSpec

    def short(self) -> FoldedModel:
        """Returns the model with a specification that has one layer of each class only."""
        first = {number: self.pattern.index(number) for number in range(len(self.classes))}
        layers = tuple(self.spec.order.layers[layer] for layer in first.values())
        kinds = tuple(self.spec.order.kinds[layer] for layer in first.values() if self.spec.order.kinds)
        units = (*self.before, *(unit for layer in self.classes for unit in layer.units), *self.after)
        order = replace(self.spec.order, layers=layers, kinds=kinds)
        return replace(self, spec=replace(self.spec, units=units, order=order))

    def under(self, *strategies: Strategy) -> FoldedModel:
        """Returns the model with its units as strategies hold them, outermost first, after `short`."""
        spec = self.spec
        for strategy in strategies:
            spec = strategy.units_of(spec)
        held = fold(spec)
        pattern = tuple(held.pattern[number] for number in self.pattern)
        classes = tuple(replace(layer, count=pattern.count(number)) for number, layer in enumerate(held.classes))
        return replace(held, classes=classes, pattern=pattern)

    def with_layers_of(self, num_bytes: int) -> ModelSpec:
        """Returns the specification with each class's layer as often as makes so many bytes, or as the model has it.

        Its units have the same names: it is good for sums over units.
        """

        def repeated(layer: LayerClass) -> tuple[Unit, ...]:
            of_one = sum(weight.num_bytes for unit in layer.units for weight in unit.weights)
            return layer.units * max(1, min(layer.count, -(-num_bytes // max(1, of_one))))

        units = (*self.before, *(unit for layer in self.classes for unit in repeated(layer)), *self.after)
        return replace(self.spec, units=units)

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @cached_property
    def head(self) -> Unit | None:
        """The unit whose products a loss looks at, wherever it is held."""
        return next((u for u in (*self.after, *self.before) if u.logits), None)

    @cached_property
    def visits_by_name(self) -> dict[str, int]:
        """Numbers of visits of the units that have one of their own, once per class of layers."""
        units = (*self.before, *(unit for layer in self.classes for unit in layer.units), *self.after)
        return {unit.name: note.count for unit in units if (note := unit.note(Visits)) is not None}

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of all layers and of the units around them."""
        outside = sum(w.numel for u in (*self.before, *self.after) for w in u.weights)
        return outside + sum(c.count * sum(w.numel for u in c.units for w in u.weights) for c in self.classes)

    def counts_of(self, layers: range) -> Counter[int]:
        """Counts the layers of each class within a range of layers."""
        return Counter(self.pattern[layers.start : layers.stop])


def fold(spec: ModelSpec) -> FoldedModel:
    """Folds a model's equal layers into classes (see [Note: classes])."""
    by_layer = _units_by_layer(spec)
    num_layers = len(spec.order.layers)
    keys: dict[tuple[object, ...], int] = {}
    pattern: list[int] = []
    shown: list[tuple[Unit, ...]] = []
    for number, layer in enumerate(spec.order.layers):
        units = by_layer.get(number, ())
        key = (*(_without_name(unit, layer=layer) for unit in units), *spec.order.kinds[number : number + 1])
        if key not in keys:
            keys[key] = len(keys)
            shown.append(tuple(units))
        pattern.append(keys[key])
    return _folded(spec, before=by_layer.get(-1, ()), shown=shown, pattern=pattern, after=by_layer.get(num_layers, ()))


def _folded(
    spec: ModelSpec,
    *,
    before: Sequence[Unit],
    shown: Sequence[tuple[Unit, ...]],
    pattern: Sequence[int],
    after: Sequence[Unit],
) -> FoldedModel:
    count, order = Counter(pattern), spec.order
    return FoldedModel(
        name=spec.name,
        before=tuple(before),
        classes=tuple(LayerClass(units, count[number]) for number, units in enumerate(shown)),
        pattern=tuple(pattern),
        after=tuple(after) if order.layers else (),
        width=order.width,
        attention_width=order.attention_width,
        experts=order.experts_per_token,
        refused=order.refused,
        spec=spec,
    )


def _units_by_layer(spec: ModelSpec) -> dict[int, list[Unit]]:
    """Units by the number of their layer: -1 before all layers, as many as there are behind them."""
    layer_of = spec.order.layer_number
    by_layer: dict[int, list[Unit]] = {}
    for unit in spec.units:
        if unit.kind is not UnitKind.REPLICATED:
            by_layer.setdefault(layer_of(unit.weights[0].name), []).append(unit)
            continue
        weights: dict[int, list[Weight]] = {}
        for weight in unit.weights:
            weights.setdefault(layer_of(weight.name), []).append(weight)
        for number, mine in weights.items():
            by_layer.setdefault(number, []).append(replace(unit, weights=tuple(mine)))
    return by_layer


def _without_name(unit: Unit, *, layer: str) -> Unit:
    """Returns the unit with names relative to its layer, so that equal layers have equal units."""

    def short(name: str) -> str:
        return name.removeprefix(layer)

    weights = tuple(replace(w, name=short(w.name), aliases=tuple(map(short, w.aliases))) for w in unit.weights)
    return replace(
        unit,
        name=short(unit.name),
        weights=weights,
        replicated=tuple(map(short, unit.replicated)),
        added_once=tuple(map(short, unit.added_once)),
    )


# ---------------------------------------------------------------- operators


def layer_passes(
    model: FoldedModel,
    layer: LayerClass,
    *,
    batch: MicroBatch,
    cutting: Cutting,
    numerics: Numerics,
    attention: Passes | None = None,
) -> list[Passes]:
    """The operators of each unit of a layer, in order; the first cut unit has the attention.

    Args:
        model: folded.
        layer: of it.
        batch: rows and tokens that a rank computes.
        cutting: of operators.
        numerics: of the model.
        attention: of ranks that share sequences; None: each attends to what it computes.
    """
    tokens = batch.num_rows * batch.num_tokens
    found: list[Passes] = []
    has_attention = False
    for unit in layer.units:
        whole = is_whole(unit) and any(len(w.shape) > 1 for w in unit.weights)
        if unit.kind is UnitKind.REPLICATED and not whole:
            found.append(_norms(unit, tokens=tokens, width=model.width, batch=batch, cutting=cutting))
            continue
        of_experts = unit.note(WholeExperts) is not None  # each once, by whole matrices
        cut = Cutting() if whole or of_experts else cutting.of(unit)
        passes = unit_passes(unit, tokens=tokens, batch=batch, cutting=cut, experts=model.experts, numerics=numerics)
        if not has_attention and model.attention_width:
            has_attention = True
            attended = attention or _attention(model.attention_width, batch=batch, cutting=cut, numerics=numerics)
            passes = Passes.together([passes, attended])
        found.append(passes)
    return found


def unit_passes(
    unit: Unit, *, tokens: int, batch: MicroBatch, cutting: Cutting, experts: int, numerics: Numerics
) -> Passes:
    """The operators of a unit's matrices, with what follows each of them."""
    forward: list[Row] = []
    inputs: list[Row] = []
    weights: list[Row] = []
    size = batch.itemsize
    for weight in unit.weights:
        if len(weight.shape) < (2 if unit.note(WholeExperts) is None else 3):  # experts' biases are stacked, too
            continue
        *several, outputs, features = weight.shape
        number = several[0] if several else 1
        rows = tokens / number * min(experts or number, number)  # of each expert
        is_row = weight.cut is not None and weight.cut.dim == len(weight.shape) - 1
        outer = outputs / (cutting.features if is_row else cutting.interior * cutting.slices)
        inner = features / (cutting.interior * cutting.slices if is_row else cutting.features)
        for row, (m, k, n) in ((forward, (rows, inner, outer)), (inputs, (rows, outer, inner))):
            row += [_product(m, k, n, itemsize=size)] * (number * cutting.parts)
        if weight.trained:
            held = outer * inner * weight.itemsize
            for _ in range(number * cutting.parts):
                weights.append(_product(inner, rows, outer, itemsize=size))
                if numerics.adds_gradients:
                    weights.append((0.0, 0.0, 3.0 * held, 1.0))
        # A bias or an activation function behind a column-wise matrix, a residual sum behind a row-wise one.
        moved = tokens * outer * size * (min(experts or number, number) if several else 1)
        after, passes = (1, 3.0) if is_row or unit.combine is not Combine.SUM else (cutting.slices, 2.0)
        forward += [(0.0, 0.0, passes * moved, 1.0)] * after
        inputs += [(0.0, 0.0, 1.5 * passes * moved, 1.0)] * after
    return Passes(Work.of(*forward), Work.of(*inputs), Work.of(*weights))


def head_passes(model: FoldedModel, *, batch: MicroBatch, cutting: Cutting) -> Passes:
    """The products of a head and its loss; nothing for a model without one."""
    head = model.head
    if head is None:
        return Passes(Work.of(), Work.of(), Work.of())
    cutting = cutting.of(head)
    matrix = next(w for w in head.weights if len(w.shape) == 2)
    tokens = batch.num_rows * batch.num_tokens
    outer, inner = matrix.shape[0] / (cutting.interior * cutting.slices), matrix.shape[1] / cutting.features
    numbers = tokens * outer
    products, parts = _product, cutting.parts
    loss = (0.0, 0.0, numbers * (batch.itemsize + 3.0 * batch.loss_itemsize), 4.0)
    forward = [products(tokens, inner, outer, itemsize=batch.itemsize), loss]
    inputs = [products(tokens, outer, inner, itemsize=batch.itemsize), loss]
    weights = [products(inner, tokens, outer, itemsize=batch.itemsize)] if matrix.trained else []
    return Passes(Work.of(*forward * parts), Work.of(*inputs * parts), Work.of(*weights * parts))


def embedding_passes(model: FoldedModel, *, batch: MicroBatch, cutting: Cutting) -> Passes:
    """Look-ups before the first layer."""
    moved = float(batch.num_rows * batch.num_tokens * model.width * batch.itemsize) / cutting.features
    tables = sum(len(w.shape) == 2 for u in model.before for w in u.weights)
    look_up = (0.0, 0.0, 3.0 * moved, 3.0)
    return Passes(Work.of(*[look_up] * tables), Work.of(), Work.of(*[look_up] * tables))


def _product(m: float, k: float, n: float, *, itemsize: int) -> Row:
    least = [max(side, 1.0) for side in (m, k, n)]
    unaligned = float(any(int(side) * itemsize % _ALIGNED_BYTES for side in (m, k, n)))
    return 2.0 * m * k * n, sum(1.0 / side for side in least), (m * k + k * n + m * n) * itemsize, 1.0, unaligned


def _norms(unit: Unit, *, tokens: int, width: int, batch: MicroBatch, cutting: Cutting) -> Passes:
    """Norms of a layer: one operator each, in forward and in backward."""
    number = sum(w.name.endswith("weight") for w in unit.weights)
    moved = tokens * width * batch.itemsize / cutting.features
    one = (0.0, 0.0, 2.0 * moved, 1.0)
    return Passes(Work.of(*[one] * number), Work.of(*[(0.0, 0.0, 4.0 * moved, 2.0)] * number), Work.of())


def _attention(width: int, *, batch: MicroBatch, cutting: Cutting, numerics: Numerics) -> Passes:
    """Scores and values of an attention (see [Note: what is no product])."""
    b, s, size = batch.num_rows, batch.num_tokens, batch.itemsize
    cut = cutting.interior * cutting.slices
    flops = 4.0 * b * s * s * width / cut
    moved = 4.0 * b * s * width / cut * size
    if numerics.fused_attention:
        sides = 2.0 / s + 1.0 / 128
        forward: list[Row] = [(flops / 2, sides, moved, 2.0)] * cutting.slices
        backward: list[Row] = [(2.5 * flops / 2, sides, 2 * moved, 3.0)] * cutting.slices
        return Passes(Work.of(*forward), Work.of(*backward), Work.of())
    heads = max(numerics.heads, 1)
    scores = b * heads / cut * s * s
    sides = 2.0 / s + heads / width
    product = (flops / 2, sides, moved / 2 + scores * size, 1.0)
    softmax, dropout = (0.0, 0.0, 2.0 * scores * size, 1.0), (0.0, 0.0, scores * (2.0 * size + 1), 1.0)
    turned = (0.0, 0.0, moved, 2.0)
    forward = [turned, product, softmax, dropout, product, turned] * cutting.slices
    backward = [turned, product, product, dropout, softmax, product, product, turned] * cutting.slices
    if numerics.recompute_attention:
        backward = forward + backward
    return Passes(Work.of(*forward), Work.of(*backward), Work.of())


def optimizer_work(num_parameters: float, *, num_weights: float, numerics: Numerics) -> Work:
    """Work of one step of AdamW on a rank's weights."""
    operators = min(num_weights, _OPTIMIZER_OPERATORS)
    return Work.of((0.0, 0.0, num_parameters * numerics.optimizer_bytes, operators))


_OPTIMIZER_OPERATORS = 16
"""Of a step on all weights: kernels take lists of tensors."""

"""Models as the planner sees them, made of nothing but shapes."""

from dataclasses import replace

from rotorch.core.shared_context import KeysAndValues
from rotorch.core.spec import Combine, Cut, GridCut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.whole_experts import WholeExperts


def transformer(*, layers: int, width: int = 1024, vocabulary: int = 32000, itemsize: int = 2) -> ModelSpec:
    """Attention and an MLP per layer, an embedding and a head of its own."""
    units = [
        Unit(
            "embed.weight",
            UnitKind.WEIGHT,
            Combine.SUM,
            (Weight("embed.weight", (vocabulary, width), itemsize, Cut(0, vocabulary)),),
            reads_in_backward=0,
        )
    ]
    norms = []
    for number in range(layers):
        name = f"layers.{number}"
        for module, inside, heads in (("attention", width, width // 64), ("mlp", 4 * width, 4 * width)):
            first = Weight(f"{name}.{module}.first.weight", (inside, width), itemsize, Cut(0, heads))
            second = Weight(f"{name}.{module}.second.weight", (width, inside), itemsize, Cut(1, heads))
            units.append(Unit(f"{name}.{module}", UnitKind.MODULE, Combine.SUM, (first, second)))
        norms.append(Weight(f"{name}.norm.weight", (width,), itemsize))
    head = Weight("head.weight", (vocabulary, width), itemsize, Cut(0, vocabulary))
    units.append(Unit("head.weight", UnitKind.WEIGHT, Combine.CONCAT, (head,), logits=True))
    norms.append(Weight("norm.weight", (width,), itemsize))
    units.append(Unit("replicated", UnitKind.REPLICATED, Combine.NONE, tuple(norms)))
    names = tuple(f"layers.{number}" for number in range(layers))
    order = LayerOrder(layers=names, after=("norm", "head"), width=width, attention_width=width)
    return ModelSpec("Transformer", tuple(units), order=order, features_stay_whole="only shapes are known")


def mixture(*, layers: int, num_experts: int) -> ModelSpec:
    """The transformer with stacked experts in place of its MLPs; a token goes to two of a layer's."""
    dense = transformer(layers=layers)
    units, whole = [], []
    for unit in dense.units:
        if unit.name.endswith(".mlp"):
            stacked = tuple(
                replace(w, shape=(num_experts, *w.shape), cut=replace(w.cut, dim=w.cut.dim + 1))
                for w in unit.weights
                if w.cut is not None
            )
            unit = replace(unit, weights=stacked)
            sets = tuple(replace(w, cut=Cut(0, num_experts)) for w in stacked)
            note = WholeExperts(num_experts, per_token=2, width=dense.order.width)
            whole.append(replace(unit, weights=sets, notes=(note,)))
        units.append(unit)
    order = replace(dense.order, experts_per_token=2)
    return replace(dense, name="Mixture", units=tuple(units), order=order, experts=tuple(whole))


def attending(spec: ModelSpec, *, window: int | None = None) -> ModelSpec:
    """The same transformer as ranks see it that share sequences: its attentions weight by weight."""
    units: list[Unit] = []
    for unit in spec.units:
        if not unit.name.endswith(".attention"):
            units.append(unit)
            continue
        first, second = (
            Unit(w.name, UnitKind.WEIGHT, Combine.CONCAT, (replace(w, cut=replace(w.cut, dim=0)),))
            for w in unit.weights
            if w.cut is not None
        )
        wide = spec.order.attention_width
        units += [first.with_note(KeysAndValues(2 * wide, window, 8, 8, wide, wide)), second]
    return replace(spec, units=tuple(units))


def on_grids(spec: ModelSpec) -> ModelSpec:
    """The same transformer with all cuts that grids of ranks need: activations may be cut along their features."""

    def cut(weight: Weight) -> Weight:
        if len(weight.shape) == 1:
            return replace(weight, grid=GridCut(columns=Cut(0, weight.shape[0])))
        outer, inner = (Cut(dim, weight.shape[dim]) for dim in (0, 1))
        is_table = weight.name.startswith("embed")
        return replace(weight, grid=GridCut(rows=outer if is_table else inner, columns=inner if is_table else outer))

    units = [replace(unit, weights=tuple(map(cut, unit.weights))) for unit in spec.units]
    units[0] = replace(units[0], combine=Combine.SUM)  # rows of a table that other ranks hold count as zeros
    return replace(spec, units=tuple(units), features_stay_whole="")

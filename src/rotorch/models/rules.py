"""Units by rules over the kinds of layers: of modules without a declared plan, and of weights that a plan leaves out.

[Note: rules]
    Linear layers, embeddings and convolutions are cut along their output, weight by weight (RTP, arXiv 2311.01635,
    section 3); `nn.MultiheadAttention` between its heads. Everything else (norms, recurrent layers, parameters of
    unknown modules, adapters) is whole on every rank, and its gradients are summed.

[Note: nothing is assumed]
    A rule knows weights, not the code of the modules around them. So the use of a cut weight is found when it happens:
    a proxy answers linear layers, convolutions and look-ups slice by slice, and gathers the whole weight for any other
    operation (`ops/weight_proxy.py`). The result is right in any case, and the log names the weights that were
    gathered.

[Note: what a plan leaves out]
    Plans of transformers are written for speed, and leave awkward weights whole: latent attention, state
    spaces, per-layer embeddings. Here such weights cost memory on every rank, so the same rules cut them, with two
    conditions. All ranks must use the same weights in a pass; a trial on a tiny model shows these
    (`models/trial/uses.py`), and others stay whole. Small weights also stay whole, all of them together less than a
    thousandth of the model: a message for each router costs more than its memory. Inside a module that runs on slices
    every slice needs such a weight (`ModelSpec.inside`); rtp gathers it once for all slices, other strategies have it
    whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from rotorch.core.spec import NEEDED_WHOLE, Combine, Cut, KeptWhole, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.lora import is_adapter, without_adapters
from rotorch.models.trial.uses import Use, pattern_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SMALL = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.PReLU)
"""Whole by design: as large as a row of the layers around them."""


_SMALL_SHARE = 1 / 1000
"""Of all bytes of a model, what its small weights may be together (see [Note: what a plan leaves out])."""


def spec_by_rule(module: nn.Module, weights: Mapping[str, Weight]) -> ModelSpec:
    """The units that the rules give for a module; all other weights are whole on every rank.

    Args:
        module: any module; meta tensors will do.
        weights: its parameters by their first names.
    """
    units = _units(module, _of_one_dtype(module, weights))
    owned = {w.name for unit in units for w in unit.weights}
    left = [w for name, w in weights.items() if name not in owned and not _whole_by_design(w, module=module)]
    kept = [KeptWhole(w.name, w.num_bytes, _reason(w, module=module)) for w in left]
    return _spec(type(module).__name__, units, weights, kept=kept)


def large_and_left(module: nn.Module, spec: ModelSpec) -> list[Weight]:
    """The weights that a plan leaves whole and that are large (see [Note: what a plan leaves out])."""
    whole = [w for unit in spec.units if unit.kind is UnitKind.REPLICATED for w in unit.weights]
    left = sorted((w for w in whole if not _whole_by_design(w, module=module)), key=lambda w: w.num_bytes)
    budget, small = spec.num_bytes * _SMALL_SHARE, 0
    for num_bytes, alike in groupby(left, key=lambda w: w.num_bytes):
        budget -= sum(w.num_bytes for w in alike)
        if budget < 0:
            break
        small = num_bytes
    return [w for w in left if w.num_bytes > small]


def cut_what_is_left(
    module: nn.Module, spec: ModelSpec, weights: Mapping[str, Weight], *, uses: Mapping[str, Use] | None
) -> ModelSpec:
    """Adds units by rule for large weights without a role in the plan that `spec` was made by.

    Args:
        module: the model; meta tensors will do.
        spec: its units by the plan that it declares.
        weights: its parameters by their first names.
        uses: of its weights, by pattern, as a tiny model showed; None: there is none that runs.
    """
    by_plan = [unit for unit in spec.cut_units if unit.kind is not UnitKind.WEIGHT or not _varies(unit, uses)]
    kept = [
        KeptWhole(w.name, w.num_bytes, _use_of(w, uses).obstacle)
        for unit in spec.cut_units
        if unit not in by_plan
        for w in unit.weights[:1]  # its bias is small
    ]
    inside: dict[str, int] = {}
    for unit in spec.units:
        for name in unit.replicated:
            inside[name] = inside.get(name, 0) + unit.uses
    travelling = {w.name for unit in spec.cut_units for w in unit.weights}
    of_one_dtype = _of_one_dtype(module, weights, among=travelling or None)
    free: dict[str, Weight] = {}
    large = large_and_left(module, spec)
    for weight in large:
        why = _obstacle(weight, uses, module=module)
        if why:
            kept.append(KeptWhole(weight.name, weight.num_bytes, why))
        elif weight.name in of_one_dtype:
            free[weight.name] = weight
            bias = of_one_dtype.get(f"{weight.name.removesuffix('weight')}bias")
            use = _use_of(weight, uses)
            by_layers = weight.name not in inside and not use.others and not use.alone
            if bias is not None and bias.name not in travelling and by_layers:
                free[bias.name] = bias
    by_rule = _units(module, free)
    for unit in by_rule:
        if unit.name in inside:
            kept.append(KeptWhole(unit.name, unit.num_bytes, NEEDED_WHOLE))
    settled = {w.name for unit in by_rule for w in unit.weights} | {each.name for each in kept}
    kept += [KeptWhole(w.name, w.num_bytes, _reason(w, module=module)) for w in large if w.name not in settled]
    units = [_as_used(unit, uses) for unit in by_rule if unit.name not in inside]
    made = _spec(spec.name, [*by_plan, *units], weights, kept=kept)
    called = (replace(u, uses=inside[u.name], reads_in_backward=0) for u in by_rule if u.name in inside)
    return replace(made, inside=tuple(called))


def _varies(unit: Unit, uses: Mapping[str, Use] | None) -> bool:
    """True if ranks may use a WEIGHT unit differently: a list of experts, or stacked ones that are taken one by one."""
    return uses is not None and any(_use_of(w, uses).varies for w in unit.weights)


def _obstacle(weight: Weight, uses: Mapping[str, Use] | None, *, module: nn.Module) -> str:
    """Returns the reason why a weight without a role cannot rotate, by its layer and the trial; "" if none is known."""
    if any(isinstance(_use(layer), str) for layer in _layers(weight, module)):
        return _reason(weight, module=module)
    if uses is None:
        return f"no tiny {type(module).__name__} runs, so its uses are not known"
    return _use_of(weight, uses).obstacle


def _use_of(weight: Weight, uses: Mapping[str, Use] | None) -> Use:
    found = (uses or {}).get(pattern_of(without_adapters(weight.name)))
    return Use(obstacle="a pass of a tiny model does not use it") if found is None else found


def _as_used(unit: Unit, uses: Mapping[str, Use] | None) -> Unit:
    """A unit with the numbers of uses that a trial showed."""
    if unit.kind is not UnitKind.WEIGHT:
        return unit
    use = _use_of(unit.weights[0], uses)
    return replace(unit, uses=use.products + use.lookups + len(use.others), reads_in_backward=use.products)


def _spec(name: str, units: Sequence[Unit], weights: Mapping[str, Weight], *, kept: Sequence[KeptWhole]) -> ModelSpec:
    """Units in the order of their weights, and one of all other weights."""
    order = {weight: place for place, weight in enumerate(weights)}
    ordered = sorted(units, key=lambda u: min(order[w.name] for w in u.weights))
    owned = {w.name for unit in units for w in unit.weights}
    rest = tuple(w for weight, w in weights.items() if weight not in owned)
    if rest:
        ordered.append(Unit("replicated", UnitKind.REPLICATED, Combine.NONE, rest))
    return ModelSpec(name, tuple(ordered), kept_whole=tuple(sorted(kept, key=lambda k: -k.num_bytes)))


def _units(module: nn.Module, weights: Mapping[str, Weight]) -> list[Unit]:
    units: list[Unit] = []
    inside_attentions: set[str] = set()
    for name, child in module.named_modules():
        if isinstance(child, nn.MultiheadAttention):
            unit = _attention(name, child, weights=weights)
            if unit is not None:
                units.append(unit)
            # Its forward reads the weights of its inner layer itself, so they are no units of their own.
            inside_attentions.update(f"{name}.{inner}".lstrip(".") for inner, _ in child.named_parameters())
    for name, weight in weights.items():
        if name.rpartition(".")[2] == "weight" and inside_attentions.isdisjoint({name, *weight.aliases}):
            unit = None if is_adapter(name) else _layer(weight, module=module, weights=weights)
            if unit is not None:
                units.append(unit)
    return units


def _of_one_dtype(
    module: nn.Module, weights: Mapping[str, Weight], *, among: Collection[str] | None = None
) -> dict[str, Weight]:
    """The weights of the dtype in which the most bytes are (`among` these): slices of all units travel in one."""
    dtypes = {name: p.dtype for name, p in module.named_parameters() if p.is_floating_point()}
    counted = [name for name in dtypes if among is None or name in among]
    num_bytes = {d: sum(weights[n].num_bytes for n in counted if dtypes[n] is d) for d in set(dtypes.values())}
    most = max(num_bytes, key=lambda d: (num_bytes[d], str(d)), default=None)
    return {name: weight for name, weight in weights.items() if dtypes.get(name) is most}


def _whole_by_design(weight: Weight, *, module: nn.Module) -> bool:
    """True if a weight is whole on every rank by design: norms, biases, vectors, adapters."""
    holder, _, attribute = weight.name.rpartition(".")
    small = "bias" in attribute or isinstance(module.get_submodule(holder), _SMALL) or len(weight.shape) < 2
    return small or is_adapter(weight.name)


@dataclass(frozen=True)
class _Use:
    """Use of a weight by one layer: the kind of operation, and the dim along which its output lies."""

    kind: str
    dim: int = 0


def _use(layer: nn.Module) -> _Use | str:
    """Returns the use that a layer makes of its `weight`, or the reason why that cannot be cut."""
    if isinstance(layer, nn.Linear):
        return _Use("rows")
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            return "an embedding with max_norm, scale_grad_by_freq or sparse gradients"
        return _Use("rows")
    if isinstance(layer, CONVOLUTIONS):
        return _Use("convolution")
    if isinstance(layer, TRANSPOSED):
        return _Use("transposed", dim=1) if layer.groups == 1 else "a transposed convolution in groups"
    if _is_linear_transposed(layer):
        return _Use("inputs first", dim=1)
    return f"no rule cuts a {type(layer).__name__}"


def _is_linear_transposed(layer: nn.Module) -> bool:
    """True for transformers' linear layer that keeps its weight as `[inputs, outputs]` (`Conv1D`)."""
    weight, outputs, inputs = (getattr(layer, name, None) for name in ("weight", "nf", "nx"))
    return weight is not None and tuple(weight.shape) == (inputs, outputs)


def _adds_its_bias(layer: nn.Module) -> bool:
    """True if a layer's forward, torch's own or that of transformers' `Conv1D`, adds the bias with the product."""
    return type(layer).forward.__module__.startswith("torch.") or _is_linear_transposed(layer)


def _layers(weight: Weight, module: nn.Module) -> Iterator[nn.Module]:
    for name in (weight.name, *weight.aliases):
        yield module.get_submodule(name.rpartition(".")[0])


def _reason(weight: Weight, *, module: nn.Module) -> str:
    """Returns the reason why no rule cuts a weight."""
    uses = [_use(layer) for layer in _layers(weight, module)]
    why = next((use for use in uses if isinstance(use, str)), None)
    if why is not None:
        return why
    return "layers of several kinds share it" if len(set(uses)) > 1 else "another dtype than most weights"


def _layer(weight: Weight, *, module: nn.Module, weights: Mapping[str, Weight]) -> Unit | None:
    """The WEIGHT unit of a layer's weight and bias, cut along the output; None if there is no rule for it."""
    uses = {_use(layer) for layer in _layers(weight, module)}
    use = next(iter(uses))
    if len(uses) > 1 or isinstance(use, str) or len(weight.shape) < 2:
        return None
    layers = list(_layers(weight, module))
    groups = weight.shape[use.dim]
    parts = [replace(weight, cut=Cut(use.dim, groups))]
    bias = weights.get(f"{weight.name.removesuffix('weight')}bias")
    # A bias rotates with its rows. Of a tied weight it stays whole: other uses of the weight do without it. So does
    # one that a forward of the user's own may add by itself, as Falcon's layers do after `input @ self.weight.T`.
    of_one_layer = bias is not None and not weight.aliases and not bias.aliases and bias.trained == weight.trained
    if bias is not None and of_one_layer and _adds_its_bias(layers[0]):
        parts.append(replace(bias, cut=Cut(0, groups)))
    looked_up = [isinstance(layer, nn.Embedding) for layer in layers]
    return Unit(
        weight.name,
        UnitKind.WEIGHT,
        Combine.SUM if looked_up[0] else Combine.CONCAT,
        tuple(parts),
        uses=len(layers),
        reads_in_backward=looked_up.count(False),
    )


def _attention(name: str, attention: nn.MultiheadAttention, *, weights: Mapping[str, Weight]) -> Unit | None:
    """The MODULE unit of an attention, cut between heads; None if it is not torch's own or shares weights."""
    if type(attention).forward is not nn.MultiheadAttention.forward:
        return None
    heads, prefix = attention.num_heads, f"{name}." if name else ""
    blocks = 3  # of queries, keys and values, fused in one matrix
    cuts = {
        "in_proj_weight": Cut(0, heads, blocks),
        "q_proj_weight": Cut(0, heads),
        "k_proj_weight": Cut(0, heads),
        "v_proj_weight": Cut(0, heads),
        "in_proj_bias": Cut(0, heads, blocks),
        "bias_k": Cut(2, heads),
        "bias_v": Cut(2, heads),
        "out_proj.weight": Cut(1, heads),
    }
    inside = {inner for inner, _ in attention.named_parameters()}
    if not inside <= {*cuts, "out_proj.bias"} or any(f"{prefix}{inner}" not in weights for inner in inside):
        return None
    members = [replace(weights[prefix + inner], cut=cut) for inner, cut in cuts.items() if inner in inside]
    names = {*(w.name for w in members), prefix + "out_proj.bias"}
    if any(weights[n].aliases for n in names if n in weights) or len({w.trained for w in members}) > 1:
        return None
    added_once = (f"{prefix}out_proj.bias",) if "out_proj.bias" in inside else ()
    return Unit(name, UnitKind.MODULE, Combine.SUM, tuple(members), added_once=added_once)

"""Units of modules that declare no plan, by rules over the kinds of their layers.

[Note: rules]
    Linear layers, embeddings and convolutions are cut along their output, weight by weight (RTP, arXiv 2311.01635,
    section 3); `nn.MultiheadAttention` between its heads. Everything else (norms, recurrent layers, parameters of
    unknown modules, adapters) is whole on every rank, and its gradients are summed.

[Note: nothing is assumed]
    A rule speaks of weights, not of what the modules around them do with them. So a cut weight is found out at its
    use: a stand-in answers linear layers, convolutions and look-ups slice by slice, and is made whole for the moment
    when anything else is asked of it (`ops/rotating_weight.py`). The result is right in any case, and the log says
    what was made whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from rotorch.core.spec import Combine, Cut, KeptWhole, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.lora import is_adapter

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SMALL = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.PReLU)
"""Whole by design: as large as a row of the layers around them."""


def spec_by_rule(module: nn.Module, weights: Mapping[str, Weight]) -> ModelSpec:
    """The units that the rules give for a module; what is in none of them is whole on every rank.

    Args:
        module: any module; meta tensors will do.
        weights: its parameters by their first names.
    """
    order = {name: place for place, name in enumerate(weights)}
    units = sorted(_units(module, weights), key=lambda u: min(order[w.name] for w in u.weights))
    owned = {w.name for unit in units for w in unit.weights}
    rest = tuple(w for name, w in weights.items() if name not in owned)
    if rest:
        units.append(Unit("replicated", UnitKind.REPLICATED, Combine.NONE, rest))
    return ModelSpec(type(module).__name__, tuple(units), kept_whole=_kept_whole(module, rest))


def _units(module: nn.Module, weights: Mapping[str, Weight]) -> list[Unit]:
    weights = _of_one_dtype(module, weights)
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


def _of_one_dtype(module: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The weights of the dtype in which the most bytes are: slices of all units travel in one."""
    dtypes = {name: p.dtype for name, p in module.named_parameters() if p.is_floating_point()}
    num_bytes = {d: sum(weights[n].num_bytes for n in dtypes if dtypes[n] is d) for d in set(dtypes.values())}
    most = max(num_bytes, key=lambda d: (num_bytes[d], str(d)), default=None)
    return {name: weight for name, weight in weights.items() if dtypes.get(name) is most}


def _kept_whole(module: nn.Module, rest: Sequence[Weight]) -> tuple[KeptWhole, ...]:
    """Weights of `rest` that are whole for lack of a rule, largest first; norms and biases are so by design."""
    found = []
    for weight in rest:
        holder, _, attribute = weight.name.rpartition(".")
        small = isinstance(module.get_submodule(holder), _SMALL) or is_adapter(weight.name)
        by_design = "bias" in attribute or small or len(weight.shape) < 2
        if not by_design:
            found.append(KeptWhole(weight.name, weight.num_bytes, _reason(weight, module=module)))
    return tuple(sorted(found, key=lambda kept: -kept.num_bytes))


@dataclass(frozen=True)
class _Use:
    """How one layer uses a weight: by which kind of operation, and along which dim its output lies."""

    kind: str
    dim: int = 0


def _use(layer: nn.Module) -> _Use | str:
    """How a layer uses its `weight`, or why that cannot be cut."""
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
    """Whether a layer is transformers' linear layer that keeps its weight as `[inputs, outputs]` (`Conv1D`)."""
    weight, outputs, inputs = (getattr(layer, name, None) for name in ("weight", "nf", "nx"))
    return weight is not None and tuple(weight.shape) == (inputs, outputs)


def _layers(weight: Weight, module: nn.Module) -> Iterator[nn.Module]:
    for name in (weight.name, *weight.aliases):
        yield module.get_submodule(name.rpartition(".")[0])


def _reason(weight: Weight, *, module: nn.Module) -> str:
    """Why no rule cuts a weight."""
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
    # A bias goes round with its rows. Of a tied weight it stays whole: other uses of the weight do without it.
    if bias is not None and not weight.aliases and not bias.aliases and bias.trained == weight.trained:
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

"""Description of an `nn.Module` by its plan, as a ModelSpec: cuts of its weights, and the units that they form.

[Note: units]
    Weights with a column role and weights with a row role under one parent form a MODULE unit: the parent's own
        forward runs on slices, and their outputs sum. A weight that stands alone (an embedding, a head, a linear
        layer whose output the plan gathers) forms a WEIGHT unit, cut along its output. A module without any plan is
        cut by rules over its layers (`models/rules.py`), and so are large weights without a role in a plan that the
        model declares itself. All other weights are replicated.

[Note: groups]
    An attention may only be cut between key/value heads; its modules declare the head's size (`head_dim`), its
    configuration the number of heads. An MLP may be cut between any two columns. If a parent's weights cannot be cut
    into the same groups, or if it holds other units, each of its weights becomes a WEIGHT unit of its own: right for
    any module, only less fused.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import NO_ORDER, Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.blocks import block_names
from rotorch.models.features import with_features_cut
from rotorch.models.heads import GROUP_COUNTS, HEAD_SIZES, LATENT_HEAD_SIZE
from rotorch.models.hf import Plan, head_weights, tensor_parallel_plan
from rotorch.models.lora import base_of
from rotorch.models.rules import cut_what_is_left, large_and_left, spec_by_rule
from rotorch.models.stages import layer_order
from rotorch.models.trial.features import is_from_config, last_linear, why_not_in_halves
from rotorch.models.trial.sequence import why_not_along_tokens
from rotorch.models.trial.shared_sequence import SharedTrial, runs_whole, try_shared, with_sequences_shared
from rotorch.models.trial.slices import Trial, try_tiny
from rotorch.models.trial.stages import has_own
from rotorch.models.whole_experts import stacked_experts, with_experts

_log = logging.getLogger(__name__)

_COLUMN_BLOCKS = {"colwise": 1, "packed_colwise": 2}
_ROW_BLOCKS = {"rowwise": 1, "packed_rowwise": 2}
_ALONE = {"colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise"}
# Of these some say how transformers sends activations or tells its autograd of slices, which is not needed here: under
# a router and its experts everybody has all tokens, and a latent projection's gradient sums over slices as norms' do.
_NOT_CUT = {
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
}
_KNOWN = {*_COLUMN_BLOCKS, *_ROW_BLOCKS, *_ALONE, *_NOT_CUT}


def describe(
    module: nn.Module,
    *,
    plan: Plan | None = None,
    features: bool = False,
    tokens: bool = False,
    context: bool = False,
) -> ModelSpec:
    """Derives the units of `module` from `plan`, from the plan that it declares itself, or else by rules.

    Works on meta tensors.

    Args:
        module: the model.
        plan: name patterns to roles, in place of its own.
        features: say also how its weights are cut where activations are cut along their features.
        tokens: say also whether activations between the modules of its layers may be cut along the sequence.
        context: say also whether ranks may share a sequence, and describe attentions weight by weight: ranks that
            exchange keys and values need the same heads at the same moment.

    Raises:
        ConfigError: a pattern that matches nothing, or a role that is not known.
    """
    prefix, base = base_of(module)
    if prefix and plan is None:
        inside = describe(base, features=features, tokens=tokens, context=context)
        return _wrapped(inside, module, prefix=f"{prefix}.")
    weights = _weights(module)
    roles: dict[str, str] = {}
    order = layer_order(base)
    shared = try_shared(module) if context else SharedTrial()
    trial: Trial | None = None
    if plan is None and not module_declares(module):
        spec = spec_by_rule(module, weights)
    elif plan is not None:
        roles = _expand(plan, module)
        spec = replace(_spec(module, roles, weights), by_plan=True)
    else:
        roles = _expand(tensor_parallel_plan(module), module)
        spec = _spec(module, roles, weights)
        classes = {type(module.get_submodule(u.name)) for u in spec.units if u.kind is UnitKind.MODULE}
        can_be_tried = is_from_config(module) and (classes or order.layers or large_and_left(module, spec))
        trial = try_tiny(module, describe=_trusting) if can_be_tried else Trial()
        for each in sorted(c.__name__ for c in classes - trial.on_slices):
            _log.info("%s does not run on slices of its weights: they rotate one by one", each)
        spec = _spec(module, roles, weights, proven=runs_whole(module, trial.on_slices, shared))
        spec = cut_what_is_left(module, spec, weights, uses=trial.uses)
        order = _with_halves(replace(order, refused=order.refused or trial.not_in_stages), trial, base)
    if stacked_experts(module):
        if trial is None and is_from_config(module):
            trial = try_tiny(module, describe=_trusting)
        spec = with_experts(spec, module, weights, among=trial.on_experts if trial is not None else {})
    spec = replace(_marked(spec, module), order=order, blocks=block_names(module))
    if context:
        spec = with_sequences_shared(spec, module, shared)
    if tokens and spec.order.layers:
        spec = replace(spec, tokens_stay_whole=why_not_along_tokens(module))
    return _with_features(spec, module, roles=roles) if features else spec


def _with_halves(order: LayerOrder, trial: Trial, module: nn.Module) -> LayerOrder:
    """Adds the halves of layers that a tiny model has shown, if all layers of this one have the same modules."""
    known = {name for half in trial.halves for name in half.children}
    for layer in map(module.get_submodule, order.layers if trial.halves else ()):
        children = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
        if not children <= known or has_own(layer):
            return replace(order, not_in_halves="its layers have different modules")
    return replace(order, halves=trial.halves, not_in_halves=trial.not_in_halves)


def _wrapped(spec: ModelSpec, module: nn.Module, *, prefix: str) -> ModelSpec:
    """The spec of a model under its names in a module around it, whose own weights are whole.

    Args:
        spec: of the model.
        module: the one around it.
        prefix: beginning of the model's names there.
    """
    if spec.order.layers:
        refused = (
            "peft has wrapped it. Write peft.inject_adapter_in_model(config, model) in the place of get_peft_model"
        )
        spec = replace(spec, order=replace(NO_ORDER, refused=refused))
    units = [_renamed(unit, prefix=prefix) for unit in spec.units]
    known = {name for unit in units for w in unit.weights for name in (w.name, *w.aliases)}
    rest = tuple(w for name, w in _weights(module).items() if name not in known)
    if rest:
        units.append(Unit("around", UnitKind.REPLICATED, Combine.NONE, rest))
    return replace(
        spec,
        name=type(module).__name__,
        units=tuple(units),
        kept_whole=tuple(replace(kept, name=prefix + kept.name) for kept in spec.kept_whole),
        inside=tuple(_renamed(unit, prefix=prefix) for unit in spec.inside),
        experts=tuple(_renamed(unit, prefix=prefix) for unit in spec.experts),
        blocks=tuple(prefix + name for name in spec.blocks),
        tokens_stay_whole="peft has wrapped the model",
    )


def _renamed(unit: Unit, *, prefix: str) -> Unit:
    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    return replace(
        unit,
        name=unit.name if unit.kind is UnitKind.REPLICATED else (prefix + unit.name).rstrip("."),
        weights=tuple(replace(w, name=prefix + w.name, aliases=renamed(w.aliases)) for w in unit.weights),
        replicated=renamed(unit.replicated),
        added_once=renamed(unit.added_once),
    )


def _with_features(spec: ModelSpec, module: nn.Module, *, roles: Mapping[str, str]) -> ModelSpec:
    """Adds the cuts of weights on a grid, or the reason against them; a plan of the user's own is believed."""
    tried = is_from_config(module) and not spec.by_plan
    last = last_linear(module) if tried and not any(u.logits for u in spec.units) else ""
    spec = with_features_cut(module, spec, roles=roles, last=last, tried=tried)
    if spec.features_stay_whole or not tried:
        return spec
    classes = {type(module.get_submodule(u.name)) for u in spec.units if u.kind is UnitKind.MODULE}

    def describe_tiny(tiny: nn.Module) -> ModelSpec:
        tiny_roles, weights = _expand(tensor_parallel_plan(tiny), tiny), _weights(tiny)
        declares = module_declares(tiny)
        made = _spec(tiny, tiny_roles, weights, proven=classes) if declares else spec_by_rule(tiny, weights)
        return with_features_cut(tiny, _marked(made, tiny), roles=tiny_roles, last=last, tried=True)

    return replace(spec, features_stay_whole=why_not_in_halves(module, describe=describe_tiny))


def _marked(spec: ModelSpec, module: nn.Module) -> ModelSpec:
    """Marks the unit that is the head, and whole weights that only modules which run on slices use."""
    head = head_weights(module)
    beside = {name for u in spec.units for name in u.replicated}
    inside = tuple(f"{u.name}." if u.name else "" for u in spec.units if u.kind is UnitKind.MODULE)
    units = []
    for unit in spec.units:
        logits = unit.kind is UnitKind.WEIGHT and any(head & {w.name, *w.aliases} for w in unit.weights)
        weights = [
            replace(w, beside_slices=w.name in beside and all(n.startswith(inside) for n in (w.name, *w.aliases)))
            for w in unit.weights
        ]
        units.append(replace(unit, logits=logits, weights=tuple(weights)))
    return replace(spec, units=tuple(units))


def _trusting(module: nn.Module) -> ModelSpec:
    """The units of a model that declares a plan, if all it says holds."""
    return _spec(module, _expand(tensor_parallel_plan(module), module), _weights(module))


def _spec(
    module: nn.Module, roles: Mapping[str, str], weights: Mapping[str, Weight], *, proven: Set[type] | None = None
) -> ModelSpec:
    """The units that roles make of weights; with `proven`, only modules of these classes run on slices."""
    alone = {name for name, role in roles.items() if role in _ALONE and name in weights}
    parents: dict[str, dict[str, str]] = defaultdict(dict)
    uses: dict[str, set[str]] = defaultdict(set)
    for name, role in roles.items():
        if role in _COLUMN_BLOCKS or role in _ROW_BLOCKS:
            first = _first_name(name, module=module, weights=weights)
            parents[_parent(first, module)][first] = role
            uses[_parent(first, module)].add(_parent(name, module))
    units: dict[str, Unit] = {}
    below = _by_module(weights)
    for parent, members in parents.items():
        unit = None
        if proven is None or type(module.get_submodule(parent)) in proven:
            inside = below[parent]
            unit = _module_unit(parent, members, module=module, weights=weights, inside=inside, uses=len(uses[parent]))
        if unit is None:
            alone.update(n for n in members if len(weights[n].shape) > 1)
        else:
            units[parent] = unit
    cut = {w.name for u in units.values() for w in u.weights} | alone
    for parent, unit in list(units.items()):
        if not cut.isdisjoint(unit.replicated):  # it holds other units, which would rotate once per slice of it
            alone.update(w.name for w in unit.weights if len(w.shape) > 1)
            del units[parent]
    owned = {w.name for u in units.values() for w in u.weights}
    for name in sorted(alone - owned):
        if len(weights[name].shape) < 2:  # a bias is cut with its weight, or not at all if that is tied to another's
            continue
        unit = _weight_unit(name, module=module, weights=weights)
        units[unit.name] = unit
        owned.update(w.name for w in unit.weights)
    rest = tuple(w for n, w in weights.items() if n not in owned)
    order = {name: i for i, name in enumerate(weights)}
    ordered = sorted(units.values(), key=lambda u: min(order[w.name] for w in u.weights))
    if rest:
        ordered.append(Unit("replicated", UnitKind.REPLICATED, Combine.NONE, rest))
    return ModelSpec(type(module).__name__, tuple(ordered))


def _expand(plan: Plan, module: nn.Module) -> dict[str, str]:
    """Resolves patterns to parameter names. A role given to a module holds for its parameters."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = [name for name, _ in module.named_modules()]
    roles: dict[str, str] = {}
    for pattern, role in plan.items():
        if role not in _KNOWN:
            if any(_matches(n, pattern) for n in [*parameters, *modules]) or not module_declares(module):
                raise ConfigError(
                    f"plan: role {role!r} of {pattern!r} is not supported. Known: {', '.join(sorted(_KNOWN))}"
                )
            continue
        hit = [n for n in parameters if _matches(n, pattern) or _matches(n.rpartition(".")[0], pattern)]
        if not hit and not any(_matches(n, pattern) for n in modules):
            if module_declares(module):
                continue  # a family's plan also names what only some of its configurations have
            raise ConfigError(f"plan: {pattern!r} matches nothing in {type(module).__name__}")
        if role not in _NOT_CUT:
            roles.update(dict.fromkeys(hit, role))
    for name, role in list(roles.items()):  # a plan that names weights means their biases too
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(".weight") and bias in parameters:
            roles.setdefault(bias, role)
    return roles


def module_declares(module: nn.Module) -> bool:
    """True if the module brings a plan of its own."""
    return bool(getattr(module, "tp_plan", None))


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts, wanted, strict=True))


def _weights(module: nn.Module) -> dict[str, Weight]:
    """Every parameter once, with the further names of tied ones."""
    names: dict[int, str] = {}
    weights: dict[str, Weight] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first == name:
            shape, itemsize = tuple(parameter.shape), parameter.element_size()
            weights[name] = Weight(name, shape, itemsize, trained=parameter.requires_grad)
        else:
            weights[first] = replace(weights[first], aliases=(*weights[first].aliases, name))
    return weights


def _first_name(name: str, *, module: nn.Module, weights: Mapping[str, Weight]) -> str:
    """The name under which a weight is described, which is another one in a module that is used in several places."""
    if name in weights:
        return name
    first = next(w.name for w in weights.values() if name in w.aliases)
    if module.get_submodule(_parent(name, module)) is not module.get_submodule(_parent(first, module)):
        raise ConfigError(
            f"plan: {name!r} is the same weight as {first!r}, in another module; only whole modules can be shared. "
            "Give both of them no role"
        )
    return first


def _parent(name: str, module: nn.Module) -> str:
    """The module whose forward uses the parameter.

    A linear layer's parent, or the module that holds the parameter itself.
    """
    holder = name.rpartition(".")[0]
    if isinstance(module.get_submodule(holder), nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return holder.rpartition(".")[0]
    return holder


def _by_module(weights: Mapping[str, Weight]) -> dict[str, set[str]]:
    """Names of the weights inside of each module, by the module's name."""
    found: dict[str, set[str]] = defaultdict(set)
    for weight in weights.values():
        for name in (weight.name, *weight.aliases):
            while name:
                name = name.rpartition(".")[0]
                found[name].add(weight.name)
    return found


def _module_unit(
    parent: str,
    members: Mapping[str, str],
    *,
    module: nn.Module,
    weights: Mapping[str, Weight],
    inside: set[str],
    uses: int,
) -> Unit | None:
    """The MODULE unit of `parent`, or None if its weights do not share groups (see [Note: groups]).

    Args:
        parent: name of the module.
        members: its weights' roles.
        module: the model.
        weights: of the model, by name.
        inside: names of those within `parent`.
        uses: of the module in a forward.
    """
    columns = {n: weights[n] for n, role in members.items() if role in _COLUMN_BLOCKS}
    rows = {n: weights[n] for n, role in members.items() if role in _ROW_BLOCKS and len(weights[n].shape) > 1}
    added_once = tuple(n for n, role in members.items() if role in _ROW_BLOCKS and len(weights[n].shape) == 1)
    if not columns or not rows:
        return None
    sizes = {n: (_column_dim(w), _COLUMN_BLOCKS[members[n]]) for n, w in columns.items()}
    sizes |= {n: (len(w.shape) - 1, _ROW_BLOCKS[members[n]]) for n, w in rows.items()}
    lengths = {n: weights[n].shape[dim] // blocks for n, (dim, blocks) in sizes.items()}
    groups = _num_head_groups(module.get_submodule(parent), least=min(lengths.values())) or min(lengths.values())
    if any(weights[n].shape[dim] % (blocks * groups) for n, (dim, blocks) in sizes.items()):
        return None
    cut = tuple(replace(weights[n], cut=Cut(dim, groups, blocks)) for n, (dim, blocks) in sizes.items())
    whole = tuple(sorted(inside - set(sizes) - set(added_once)))
    return Unit(
        parent,
        UnitKind.MODULE,
        Combine.SUM,
        cut,
        uses=uses,
        reads_in_backward=uses,
        replicated=whole,
        added_once=added_once,
    )


def _column_dim(weight: Weight) -> int:
    """Output dim of a column-wise weight: 0 of [out, in] and of a bias, 1 of stacked experts [expert, out, in]."""
    return max(len(weight.shape) - 2, 0)


def _num_head_groups(parent: nn.Module, *, least: int) -> int | None:
    """Number of groups that an attention may be cut into: its key/value heads; None if `parent` is no attention.

    Args:
        parent: the module.
        least: length of the smallest of its weights along what is cut.
    """
    names = (*HEAD_SIZES, LATENT_HEAD_SIZE)
    head_sizes = [s for s in (getattr(parent, name, None) for name in names) if isinstance(s, int)]
    if not head_sizes:
        return None
    for name in GROUP_COUNTS:
        for source in (parent, getattr(parent, "config", None)):
            try:
                count = getattr(source, name, None)
            except Exception:  # a configuration whose layers differ answers only for each of them
                return least // head_sizes[0]
            if isinstance(count, int):
                return count
    return None


def _weight_unit(name: str, *, module: nn.Module, weights: Mapping[str, Weight]) -> Unit:
    """A weight (and its bias) cut along its output.

    An embedding's slices answer the tokens in their range, so they sum.
    """
    holder, _, _ = name.rpartition(".")
    layer = module.get_submodule(holder)
    rows = weights[name].shape[0]
    embedding = isinstance(layer, nn.Embedding)
    # A tied bias cannot be: only weights are tied. A bias is cut with the rows that it is added to.
    bias = weights.get(f"{holder}.bias") if not embedding else None
    parts = [weights[name]] if bias is None else [weights[name], bias]
    uses = 1 + len(weights[name].aliases)
    reads = uses - 1 if embedding else uses
    return Unit(
        name,
        UnitKind.WEIGHT,
        Combine.SUM if embedding else Combine.CONCAT,
        tuple(replace(w, cut=Cut(0, rows)) for w in parts),
        uses=uses,
        reads_in_backward=reads,
    )

"""Modules of experts whose slices may be sets of whole experts, and their units.

A module of experts has the weights of all its experts stacked, one after another along their first dim. That it may be
called on some of them is tried on a tiny model of the same kind (`models/trial/slices.py`); no list of names decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.whole_experts import WholeExperts
from rotorch.models.stages import experts_per_token, width_of


def stacked_experts(module: nn.Module) -> dict[str, tuple[int, frozenset[str]]]:
    """Modules that may hold stacked experts, by name: the number of experts, and the names of their parameters in it.

    Such a module is no layer of torch's, and holds parameters of three dims or more. If these do not agree in the
    first, the number is 0.
    """
    return {name: found for name, child in module.named_modules() if (found := _stacked(child)) is not None}


def _stacked(child: nn.Module) -> tuple[int, frozenset[str]] | None:
    own = dict(child.named_parameters(recurse=False))
    numbers = {p.shape[0] for p in own.values() if p.dim() > 2}
    if numbers <= {1} or type(child).__module__.startswith("torch."):
        return None
    number = numbers.pop() if len(numbers) == 1 else 0
    return number, frozenset(n for n, p in own.items() if number and p.dim() and p.shape[0] == number)


def whole_expert_units(
    module: nn.Module, weights: Mapping[str, Weight], *, among: Mapping[type, frozenset[str]] | None = None
) -> Iterator[Unit]:
    """Units of the modules of experts, cut between experts.

    Args:
        module: the model; meta tensors will do.
        weights: its parameters by their first names.
        among: only of these classes, and only with these parameters cut; None: all.
    """
    for name, (number, cut) in stacked_experts(module).items():
        if not cut or (among is not None and among.get(type(module.get_submodule(name))) != cut):
            continue
        prefix = f"{name}." if name else ""
        mine = {w.name: w for w in weights.values() if w.name.startswith(prefix)}
        parts = [replace(w, cut=Cut(0, number)) for n, w in mine.items() if n.removeprefix(prefix) in cut]
        if len(parts) < len(cut) or any(w.aliases for w in parts):  # shared with another module
            continue
        yield Unit(
            name,
            UnitKind.MODULE,
            Combine.SUM,
            tuple(parts),
            replicated=tuple(sorted(n for n in mine if n.removeprefix(prefix) not in cut)),
            notes=(WholeExperts(number),),
        )


def with_experts(
    spec: ModelSpec, module: nn.Module, weights: Mapping[str, Weight], *, among: Mapping[type, frozenset[str]]
) -> ModelSpec:
    """The spec with `experts`, or with the reason against them in `experts_stay_cut`.

    Args:
        spec: the units of the model.
        module: the model; meta tensors will do.
        weights: its parameters by their first names.
        among: classes whose experts a trial has found to be able, with the parameters that are cut.
    """
    found, refused = [], [type(module.get_submodule(name)).__name__ for name in stacked_experts(module)]
    config = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    sizes = WholeExperts(0, experts_per_token(text), width_of(text))
    for unit in whole_expert_units(module, weights, among=among):
        own = {w.name for w in unit.weights}
        around = [u for u in spec.cut_units if not own.isdisjoint(w.name for w in u.weights)]
        inside = {w.name for u in spec.cut_units for w in u.weights} & set(unit.replicated)
        note = unit.note(WholeExperts)
        if note is not None and not inside and all(own >= {w.name for w in u.weights} for u in around):
            found.append(unit.with_note(replace(sizes, number=note.number)))
            refused.remove(type(module.get_submodule(unit.name)).__name__)
    if not refused:
        return replace(spec, experts=tuple(found))
    if any(w.aliases for name in stacked_experts(module) for n, w in weights.items() if n.startswith(f"{name}.")):
        return replace(spec, experts=tuple(found), experts_stay_cut="modules share the weights of their experts")
    why = f"{sorted(set(refused))[0]} was not seen to compute tokens by the experts that they go to"
    return replace(spec, experts=tuple(found), experts_stay_cut=why)

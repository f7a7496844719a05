"""Cuts of a model's weights where activations are cut along their features: into blocks on a grid of ranks.

[Note: features]
    Every rank of a row of the grid has the same tokens and its own part of their features, everywhere: of the residual
    stream, of heads, of the columns of an MLP. A linear layer takes parts of its inputs and gives parts of its outputs,
    whatever its role (`ops/summa.py`); the role says how parts of its interior must be made: by whole heads, by halves
    that are fused. Attentions and MLPs that run on slices of their weights (`models/trial/slices.py`) therefore run on
    their part of the interior. Norms have their sums over features completed (`models/feature_sums.py`). Operations
    that add, scale or drop single features need no change.

    Tokens enter through tables, images through convolutions whose output channels are the features; a linear layer
    on whole patches takes its part of them. The output is a language model's head, whose logits are cut
    for the loss, or the last linear layer of a pass (a classifier), whose outputs are gathered on every rank.

[Note: without a plan]
    Models of Hugging Face that declare no plan have linear layers without a role, all of which are cut evenly along
    inputs and outputs: where heads divide, between heads. Only the trial shows that their forward splits them in the
    same way (`models/trial/features.py`).

[Note: what is not known is refused]
    A model is refused by the name of its first part without a rule: a matrix that no linear layer,
    embedding or head uses, a vector of another size than the features it could belong to. For a norm, the module itself
    is tried: on random numbers, in two parts, against its own output.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rotorch.core.spec import Cut, GridCut, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.feature_sums import CompletedSums
from rotorch.models.heads import HEAD_SIZES, num_head_groups, num_heads
from rotorch.models.rules import CONVOLUTIONS
from rotorch.shard.sites import Site, find_sites

_COLUMN_ROLES = {"colwise", "colwise_gather_output"}
_ROW_ROLES = {"rowwise", "rowwise_split_input"}
_TOLERANCE = 1e-5
_MOST_SUMS = 8


class _Unknown(Exception):
    """There is no rule for a part of the model: says which."""


def with_features_cut(
    module: nn.Module, spec: ModelSpec, *, roles: Mapping[str, str], last: str = "", tried: bool = False
) -> ModelSpec:
    """Returns the spec with `Weight.grid` of every weight; or with the reason against it in `features_stay_whole`.

    Args:
        module: the model, also on meta.
        spec: its units.
        roles: of its parameters, from its plan.
        last: the weight of the linear layer that gives the model's output, by name; "" if none does.
        tried: True if a trial will show what rules alone cannot know (see [Note: without a plan]).
    """
    if why := _drops_whole_samples(module):
        return replace(spec, features_stay_whole=why)
    try:
        cuts = _Cuts(module, spec, roles, last, tried).by_name()
    except _Unknown as unknown:
        return replace(spec, features_stay_whole=str(unknown))
    units = (replace(u, weights=tuple(replace(w, grid=cuts[w.name]) for w in u.weights)) for u in spec.units)
    return replace(spec, units=tuple(units))


_DROPS = re.compile(r"drop_?path|layer_?drop|stochastic_depth|survival")


def _drops_whole_samples(module: nn.Module) -> str:
    """Returns an obstacle if forward drops samples or layers at random: ranks that share tokens draw different ones."""
    config = getattr(module, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    for key, value in values.items():
        if _DROPS.search(key) and isinstance(value, float) and value > 0:
            return f"{key} = {value:g} drops whole samples or layers, and ranks that share tokens would drop others"
    return ""


@dataclass
class _Cuts:
    module: nn.Module
    spec: ModelSpec
    roles: Mapping[str, str]
    last: str
    tried: bool
    _sites: dict[str, tuple[Site, ...]] = field(init=False)
    _weights: dict[str, Weight] = field(init=False)
    _cuts: dict[str, GridCut] = field(init=False)

    def by_name(self) -> dict[str, GridCut]:
        self._sites, self._cuts = find_sites(self.module), {}
        self._weights = {w.name: w for w in self.spec.weights}
        self._hidden = self._hidden_size()
        if not any(u.logits for u in self.spec.units) and not any(map(self._gives_output, self._weights.values())):
            raise _Unknown(
                "it has no language-model head and ends with no linear layer, so each rank would return a part of the "
                "features"
            )
        for unit in self.spec.units:
            if unit.kind is UnitKind.MODULE:
                self._module(unit)
            elif unit.kind is UnitKind.WEIGHT:
                self._single(unit)
        for weight in self._weights.values():
            if weight.name not in self._cuts:
                self._cuts[weight.name] = self._rest(weight)
        self._try_norms()
        return self._cuts

    def _hidden_size(self) -> int:
        """Features of the residual stream: inputs and outputs of units that run on slices, or inputs of a head."""
        sizes = {w.shape[1 - w.cut.dim] for u in self._modules() for w in u.weights if w.cut and len(w.shape) == 2}
        if not sizes and self.tried:
            heads = [w for u in self.spec.units for w in u.weights if u.logits or self._gives_output(w)]
            sizes = {w.shape[1] for w in heads if len(w.shape) == 2}
        if len(sizes) != 1:
            raise _Unknown(
                f"its attentions and MLPs work between {' and '.join(map(str, sorted(sizes)))} features"
                if sizes
                else "it has no attention or MLP that is known to run on slices of its weights"
            )
        return sizes.pop()

    def _gives_output(self, weight: Weight) -> bool:
        """True for the matrix of a linear layer whose outputs must be whole on every rank."""
        if len(weight.shape) != 2 or not self._is_used_by(weight, nn.Linear):
            return False
        if self.roles.get(weight.name) == "colwise_gather_output":
            return not self._heads_around(weight)
        return weight.name == self.last

    def _heads_around(self, weight: Weight) -> Mapping[int, int]:
        """Sizes that the heads of the attention around a layer take together, and into how many groups they divide."""
        parent = self.module.get_submodule(weight.name.rpartition(".")[0].rpartition(".")[0])
        groups, heads = num_head_groups(parent), num_heads(parent)
        size = next((s for s in (getattr(parent, n, None) for n in HEAD_SIZES) if isinstance(s, int)), 0)
        return {groups * size: groups, heads * size: groups} if groups and heads and size else {}

    def _modules(self) -> Iterator[Unit]:
        return (u for u in self.spec.units if u.kind is UnitKind.MODULE)

    def _module(self, unit: Unit) -> None:
        for weight in unit.weights:
            cut = weight.cut
            if cut is None or len(weight.shape) > 2 or not self._is_used_by(weight, nn.Linear):
                raise _Unknown(f"{weight.name!r} is used by no linear layer")
            if len(weight.shape) == 1:
                self._cuts[weight.name] = GridCut(columns=cut)
            elif cut.dim == 0:
                self._cuts[weight.name] = GridCut(rows=Cut(1, self._hidden), columns=cut)
            else:
                self._cuts[weight.name] = GridCut(rows=cut, columns=Cut(0, self._hidden))
        for name in unit.added_once:
            self._cuts[name] = self._hidden_vector()
        for name in unit.replicated:
            self._cuts[name] = self._inside(self._weights[name], self.module.get_submodule(unit.name))

    def _inside(self, weight: Weight, parent: nn.Module, *, spans: Mapping[int, int] | None = None) -> GridCut:
        """A vector inside of an attention or an MLP: of one head, of all features, or of sizes that `spans` groups."""
        (size,) = weight.shape if len(weight.shape) == 1 else (0,)
        head_sizes = {getattr(parent, name, None) for name in HEAD_SIZES}
        if size and size == self._hidden:
            return self._hidden_vector()
        if spans is not None and size in spans:
            return GridCut(columns=Cut(0, spans[size]))
        if size in head_sizes:
            return GridCut()
        raise _Unknown(f"{weight.name!r} {list(weight.shape)} is neither of one head nor of all features")

    def _hidden_vector(self) -> GridCut:
        return GridCut(columns=Cut(0, self._hidden))

    def _single(self, unit: Unit) -> None:
        weight, *biases = unit.weights
        if self._is_used_by(weight, nn.Embedding) or (weight.aliases and unit.logits):
            self._cuts[weight.name] = self._table(weight, unit)
        elif unit.logits:
            self._cuts[weight.name] = self._linear(weight, Cut(1, self._hidden), Cut(0, weight.shape[0]))
        elif self._gives_output(weight):
            self._cuts[weight.name] = GridCut(columns=Cut(1, weight.shape[1]), whole_output=True)
        elif self._is_used_by(weight, CONVOLUTIONS):
            self._cuts[weight.name] = self._convolution(weight)
        elif self._is_cut_evenly(weight):
            self._cuts[weight.name] = self._without_role(weight)
        else:
            self._cuts[weight.name] = self._projection(weight)
        for bias in biases:
            self._cuts[bias.name] = _of_bias(self._cuts[weight.name])

    def _table(self, weight: Weight, unit: Unit) -> GridCut:
        layers = [site.module for site in self._sites[weight.name] if isinstance(site.module, nn.Embedding)]
        special = any(e.max_norm is not None or e.scale_grad_by_freq or e.sparse for e in layers)
        heads = len(self._sites[weight.name]) - len(layers)
        if weight.shape[1] != self._hidden or special or (heads and not unit.logits):
            raise _Unknown(f"{weight.name!r} {list(weight.shape)} is no table of {self._hidden} features")
        return GridCut(rows=Cut(0, weight.shape[0]), columns=Cut(1, self._hidden))

    def _convolution(self, weight: Weight) -> GridCut:
        """Cuts a convolution of whole images: output channels are features. One on features finds too few of them."""
        layers = [site.module for site in self._sites[weight.name]]
        if any(getattr(layer, "groups", 0) != 1 for layer in layers):
            raise _Unknown(f"{weight.name!r} {list(weight.shape)} is a convolution in groups")
        return GridCut(columns=Cut(0, weight.shape[0]))

    def _is_cut_evenly(self, weight: Weight) -> bool:
        """True if nothing is known of a linear layer, and an even cut does no harm: see [Note: without a plan].

        Of a plan of the user's own a single layer is taken, as all of it.
        """
        if self.tried:
            return weight.name not in self.roles and next(self._modules(), None) is None
        return len(weight.shape) == 2 and not self._heads_around(weight)

    def _without_role(self, weight: Weight) -> GridCut:
        """See [Note: without a plan]."""
        heads = self._heads_around(weight)
        inputs, outputs = (Cut(dim, heads.get(weight.shape[dim], weight.shape[dim])) for dim in (1, 0))
        return self._linear(weight, inputs, outputs)

    def _linear(self, weight: Weight, inputs: Cut, outputs: Cut) -> GridCut:
        if not self._is_used_by(weight, nn.Linear) or weight.shape[inputs.dim] % inputs.groups:
            raise _Unknown(f"{weight.name!r} {list(weight.shape)} is no linear layer of {self._hidden} features")
        return GridCut(rows=inputs, columns=outputs)

    def _projection(self, weight: Weight) -> GridCut:
        """Cuts a projection of an attention that is more than a sum over heads: a norm over all heads lies between."""
        parent_name = weight.name.rpartition(".")[0].rpartition(".")[0]
        parent = self.module.get_submodule(parent_name)
        role = self.roles.get(weight.name, "")
        spans = self._heads_around(weight)
        if not spans or len(weight.shape) != 2:
            raise _Unknown(f"{parent_name!r} ({type(parent).__name__}) is not known to run on slices of its weights")
        groups = next(iter(spans.values()))
        interior = weight.shape[0 if role in _COLUMN_ROLES else 1]
        if role not in _COLUMN_ROLES | _ROW_ROLES or interior not in spans:
            raise _Unknown(
                f"{weight.name!r} {list(weight.shape)} does not project to heads of {parent_name!r} or from them"
            )
        prefix = f"{parent_name}."
        for other in self._weights.values():
            vector = len(other.shape) == 1 and not isinstance(self._sites[other.name][0].module, nn.Linear)
            if other.name.startswith(prefix) and vector:
                self._cuts[other.name] = self._inside(other, parent, spans=spans)
        if role in _COLUMN_ROLES:
            return self._linear(weight, Cut(1, self._hidden), Cut(0, groups))
        return self._linear(weight, Cut(1, groups), Cut(0, self._hidden))

    def _rest(self, weight: Weight) -> GridCut:
        """Cut of a weight that belongs to no unit that cuts it."""
        layer = self._sites[weight.name][0].module
        for name, sites in self._sites.items():  # a bias goes with its layer
            its_layer = any(site == Site(each.module, "weight") for site in sites for each in self._sites[weight.name])
            if its_layer and name in self._cuts and name != weight.name:
                return _of_bias(self._cuts[name])
        if weight.shape == (self._hidden,):
            return self._hidden_vector()
        if isinstance(layer, nn.Embedding):
            return self._table(weight, Unit("", UnitKind.WEIGHT, self.spec.units[0].combine, (weight,)))
        if self._gives_output(weight):
            return GridCut(columns=Cut(1, weight.shape[1]), whole_output=True)
        if isinstance(layer, CONVOLUTIONS):
            return self._convolution(weight)
        if not isinstance(layer, nn.Linear) and weight.shape[-1:] == (self._hidden,):  # positions, a token of classes
            return GridCut(columns=Cut(len(weight.shape) - 1, self._hidden))
        raise _Unknown(f"{weight.name!r} {list(weight.shape)} of a {type(layer).__name__} has no rule")

    def _is_used_by(self, weight: Weight, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> bool:
        layers = [site.module for site in self._sites[weight.name]]
        if kind is nn.Embedding:
            return isinstance(layers[0], kind)
        return all(type(each) in (kind if isinstance(kind, tuple) else (kind,)) for each in layers)

    def _try_norms(self) -> None:
        """Counts the sums of every module with vectors of its own, by trial; refuses modules whose trial fails."""
        tried: dict[tuple[type, int], int] = {}
        for name, weight in self._weights.items():
            layer = self._sites[name][0].module
            cut = self._cuts[name]
            own = next(iter(layer._parameters))
            if cut.columns is None or cut.rows is not None or isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
                continue
            if len(weight.shape) > 1 or next(layer.children(), None) is not None:  # no norm: the trial of the whole
                continue
            if self._sites[name][0].attribute != own:  # counted with the module's first
                continue
            key = (type(layer), weight.shape[0])
            if key not in tried:
                tried[key] = sums_of_norm(layer, size=weight.shape[0], name=name.rpartition(".")[0])
            self._cuts[name] = replace(cut, sums=tried[key])


def _of_bias(of_matrix: GridCut) -> GridCut:
    """Returns the cut of a layer's bias: that of the layer's outputs."""
    if of_matrix.whole_output:
        return GridCut()
    return GridCut(columns=of_matrix.rows if of_matrix.is_table else of_matrix.columns)


def sums_of_norm(norm: nn.Module, *, size: int, name: str = "") -> int:
    """Counts the sums over features that a module's forward takes, by a trial in two halves on random numbers.

    Raises:
        _Unknown: completing them does not give what the whole module gives.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        whole = copy.deepcopy(norm)
        for key, parameter in norm._parameters.items():
            if parameter is not None:
                whole._parameters[key] = nn.Parameter(torch.randn(parameter.shape, dtype=torch.float32))
        x = torch.randn(3, size) + 0.5
        try:
            expected = whole(x)
            widths = [size - size // 2, size // 2]
            halves = [_half(whole, part, size=size) for part in range(2)]
            outputs, num_sums = _in_lockstep(halves, list(x.split(widths, -1)), size=size)
            found = torch.cat(outputs, -1)
        except _Unknown:
            raise
        except Exception as error:  # whatever its code does not like about halves
            raise _Unknown(
                f"{name!r} ({type(norm).__name__}) does not run on a part of its features: {error}"
            ) from None
    if found.shape != expected.shape or (found - expected).abs().max() > _TOLERANCE * expected.abs().max():
        raise _Unknown(f"{name!r} ({type(norm).__name__}) does something over its features that has no rule")
    return num_sums


def _half(whole: nn.Module, part: int, *, size: int) -> nn.Module:
    half = copy.deepcopy(whole)
    widths = [size - size // 2, size // 2]
    for key, parameter in whole._parameters.items():
        if parameter is not None and parameter.shape == (size,):
            half._parameters[key] = nn.Parameter(parameter.detach().split(widths)[part].clone())
    return half


def _in_lockstep(halves: list[nn.Module], inputs: list[Tensor], *, size: int) -> tuple[list[Tensor], int]:
    """Runs two modules that sum over each other, without any other rank: again and again, until all sums are known.

    The first sum that a run takes is right in the second run, the second in the third, and so on.
    """
    known: list[list[Tensor]] = [[], []]
    while True:
        heard = [_ReplayedSums(other) for other in reversed(known)]
        outputs = []
        for half, x, listener in zip(halves, inputs, heard, strict=True):
            with CompletedSums(mine=x.shape[-1], total=size, sum_over=listener):
                outputs.append(half(x))
        known, before = [listener.parts for listener in heard], known
        if len(known[0]) != len(known[1]) or len(known[0]) > _MOST_SUMS:
            raise _Unknown(f"{type(halves[0]).__name__} sums over its features in a way that depends on them")
        if all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(known, before, strict=True)):
            return outputs, len(known[0])


class _ReplayedSums:
    """Sums a half's value with that of the other half in the run before, and remembers it."""

    def __init__(self, other: list[Tensor]) -> None:
        self._other = other
        self.parts: list[Tensor] = []

    def __call__(self, part: Tensor) -> Tensor:
        place = len(self.parts)
        self.parts.append(part)
        return part + (self._other[place] if place < len(self._other) else part)

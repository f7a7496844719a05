"""The slices of a module's weights that visit a rank one after another (rtp): see `rotate.py` for the rotation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Range
from rotorch.core.whole_experts import WholeExperts
from rotorch.models.routed_pairs import RoutedPairs
from rotorch.ops.conjugates import ParallelRegion
from rotorch.ops.partial_module import ModuleSlices, Prove, RunOnSlice
from rotorch.ops.random_state import own_rng
from rotorch.ops.recompute_norm import hand_on_recipe
from rotorch.ops.rotate import RotatingUnit, rotate_module
from rotorch.ops.slice_linear import Layer, SliceLinears
from rotorch.ops.sliced_cache import is_cache, make_room, of_slice
from rotorch.shard.buffers import WrittenBuffers
from rotorch.shard.sites import Site


class VisitingSlices(ModuleSlices):
    """All slices of a unit, in this rank's order.

    Args:
        module: the unit's.
        rotating: the unit on its ring.
        sites: places of weights in the module.
        whole: gives a weight by name that every slice needs whole; called once per call of the module.
        compiled: the module's forward is compiled. A graph has its own products, and gives the gradients of a slice's
            weights as autograd does.
        within: the ranks among which weights are cut before they rotate; None if they rotate whole.
    """

    strategy = "rtp"

    def __init__(
        self,
        module: nn.Module,
        rotating: RotatingUnit,
        *,
        sites: Mapping[str, tuple[Site, ...]],
        whole: Callable[[str], Tensor],
        compiled: bool,
        within: ParallelRegion | None = None,
    ) -> None:
        self._within = within
        self.num_slices = rotating.slices.num_visits * (1 if within is None else within.axis_group.size)
        self._module, self._rotating = module, rotating
        self._buffers = WrittenBuffers(module)
        self._whole = whole
        self._whole_sites = [sites[name] for name in rotating.unit.replicated]
        self._cut_sites = [sites[w.name] for w in rotating.unit.weights]
        rotating.put = self._put
        self._linears = self._take_over_linears([sites[w.name][0] for w in rotating.unit.weights], compiled=compiled)

    def _take_over_linears(self, sites: Sequence[Site], *, compiled: bool) -> SliceLinears:
        """Runs the unit's plain linear layers by `ops/slice_linear.py`."""
        numbers = {(id(site.module), site.attribute): i for i, site in enumerate(sites)}
        beside: defaultdict[tuple[str, int], list[Layer]] = defaultdict(list)
        for number, (site, weight) in enumerate(zip(sites, self._rotating.unit.weights, strict=True)):
            # Exactly `nn.Linear`: a subclass may do more in its forward than the product.
            if compiled or type(site.module) is not nn.Linear or site.attribute != "weight":
                continue
            layer = Layer(number, numbers.get((id(site.module), "bias")))
            # By the instance: the class's forward serves other modules too.
            site.module.forward = partial(self._linear, site.module, layer)  # type: ignore[method-assign]
            if weight.cut is not None and weight.cut.dim == 0:
                name, _, _ = weight.name.rpartition(".")
                beside[name.rpartition(".")[0], site.module.in_features].append(layer)
        return SliceLinears(self._rotating, (layers for layers in beside.values() if len(layers) > 1))

    def _linear(self, module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
        # A hook sees the output of a slice, not a sum of several.
        output = self._linears(layer, x, by_itself=bool(module._forward_hooks))
        # In a trial only: a pass has no bias here that is not cut, since it is added behind the sum.
        return output if layer.bias is not None or module.bias is None else output + module.bias

    @property
    def index(self) -> int:
        return self._rotating.visiting

    def ranges(self, cut: Cut, size: int) -> tuple[Range, ...]:
        slices = self._rotating.slices
        visit = {"index": self.index * slices.per_visit, "count": slices.per_visit}
        if self._within is None:
            return cut.ranges(size, num_slices=slices.num_slices, **visit)
        part = {"num_slices": self._within.axis_group.size, "index": self._within.axis_group.position}
        mine, left = cut.ranges(size, **part), cut.of_slice(**part)
        if left is None:
            return mine
        found = left.ranges(sum(r.length for r in mine), num_slices=slices.num_slices, **visit)
        # Blocks lie side by side in a part, and apart in the whole.
        blocks = enumerate(zip(found, mine, strict=True))
        return tuple(Range(r.start - n * own.length + own.start, r.length) for n, (r, own) in blocks)

    def own(self) -> list[Tensor] | None:
        rotating = self._rotating
        home = rotating.ring.home_weights(rotating.item).to(rotating.dtype)
        if not home.numel():
            return None
        return [w.detach() for w in rotating.slices.home.views(home, index=rotating.ring.position)]

    def total(self, run: RunOnSlice, leaves: list[Any], prove: Prove) -> list[Tensor]:
        """Runs the module once per visit, in one autograd function."""
        within, active = self._within, self._module.training
        if within is None:
            return self._total(run, leaves, prove=prove)
        entered = within.enter_all(leaves)
        for leaf, inside in zip(leaves, entered, strict=True):
            if inside is not leaf:
                hand_on_recipe(leaf, to=inside)
        # The others wait in these sums, so the proof, which may raise on one rank only, comes behind them.
        proofs: list[Callable[[Sequence[Tensor]], Tensor]] = []
        with own_rng(within.axis_group.position, like=leaves, active=active):
            parts = self._total(run, entered, prove=proofs.append)
        sums = [within.leave(part) for part in parts]
        for proof in proofs:
            prove(proof)
        return sums

    def _total(self, run: RunOnSlice, leaves: list[Any], prove: Prove) -> list[Tensor]:
        unit = self._rotating.unit
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        whole = [sites[0].get() for sites in self._whole_sites]
        # Weights that slices need whole are inputs too: each slice gives a part of their gradients, which sum.
        inputs = [*(leaves[i] for i in where), *map(self._whole, unit.replicated)]
        packed, pairs = _Packed(), self._pairs(leaves)
        caches = [i for i, leaf in enumerate(leaves) if is_cache(leaf)]
        for i in caches:
            # For as many as a pass may have: attentions of other sizes have other numbers of visits.
            make_room(leaves[i], module=self._module, name=unit.name, num_slices=self._rotating.slices.num_slices)

        def run_slice(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
            self._put_whole(inputs[len(where) :])
            given = list(leaves)
            for i, tensor in zip(where, inputs, strict=False):
                given[i] = tensor
            for i in caches:
                given[i] = of_slice(leaves[i], self.index)
            with self._linears.running(weights):
                parts = run(weights, given) if pairs is None else [self._on_experts(pairs, run, weights, given)]
            self._put_whole(whole)  # other modules may share them, and must not compute with leaves of this graph
            return packed.pack(parts)

        # Inference tensors count no versions.
        watched = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [leaf._version for leaf in watched]
        for i in where:
            leaves[i] = None  # `run_slice` lives until backward, and would keep the input alive
        self._buffers.start()
        total = rotate_module(self._rotating, run_slice, inputs)
        if versions != [leaf._version for leaf in watched]:
            raise ConfigError(
                f"rtp: {unit.name!r} changes its input in place: every slice would change it again. "
                "Give its weights no role in the plan, or let it change a copy"
            )
        if self._buffers.any_written():
            raise ConfigError(
                f"rtp: {unit.name!r} writes its buffers in forward (running statistics): it would do so "
                "once per slice. Give its weights no role in the plan, or 'colwise_gather_output'"
            )
        if not caches:  # the trial would append to them
            prove(lambda weights: run_slice(weights, inputs))
        return packed.unpack(total)

    def _pairs(self, leaves: list[Any]) -> RoutedPairs | None:
        """The pairs of tokens and experts of a call, if slices are sets of whole experts."""
        unit = self._rotating.unit
        note = unit.note(WholeExperts)
        if note is None:
            return None
        return RoutedPairs(self._module, name=unit.name, num_experts=note.number, leaves=leaves)

    def _on_experts(self, pairs: RoutedPairs, run: RunOnSlice, weights: Sequence[Tensor], leaves: list[Any]) -> Tensor:
        """Runs the module on the visiting experts and the tokens that go to them."""
        number = pairs.num_experts
        (experts,) = self.ranges(Cut(0, number), number)
        return pairs.run(leaves, experts, run=lambda given: run(weights, given)[0], anchor=self._rotating.anchor)

    def _put(self, weights: Sequence[Tensor]) -> None:
        """Puts a slice's weights where its forward has had them."""
        self._linears.put(weights)
        for sites, weight in zip(self._cut_sites, weights, strict=True):
            for site in sites:
                site.put(weight)

    def _put_whole(self, tensors: Sequence[Tensor | None]) -> None:
        """Puts the weights that the unit needs whole into all their places."""
        for sites, tensor in zip(self._whole_sites, tensors, strict=True):
            for site in sites:
                site.put(tensor)


class _Packed:
    """Several outputs in one tensor, since a rotation sums one tensor over slices."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Size, torch.dtype]] = []

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns one tensor with the elements of all `tensors`."""
        if len(tensors) == 1:
            return tensors[0]
        # Alike for all slices, so the last one's serve for the sum.
        self._parts = [(t.shape, t.dtype) for t in tensors]
        return torch.cat([t.reshape(-1) for t in tensors])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Returns the tensors again."""
        if not self._parts:
            return [packed]
        split = packed.split([shape.numel() for shape, _ in self._parts])
        return [part.view(shape).to(dtype) for part, (shape, dtype) in zip(split, self._parts, strict=True)]

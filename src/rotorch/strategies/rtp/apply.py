"""The `rtp` strategy's hold on a model.

One slice of every cut weight per rank, rotating over a ring for a pass (see `plan.py` for the picture).

At rest each parameter is a DTensor over this rank's home slice, which lies in the ring's memory, and so does its
gradient. For a pass, attentions and MLPs run their own forward once per visiting slice (`ops/partial_module.py`,
`ops/visiting_slices.py`); embedding, head and other single weights are replaced by proxies that rotate where they are
used (`ops/ring_use.py`); norms are passed whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from rotorch.comm.collectives import barrier
from rotorch.comm.observe import Observer, observe_ring
from rotorch.comm.ring import Ring
from rotorch.comm.status_word import StatusWord
from rotorch.comm.transports import make_ring
from rotorch.core.compiling import RECORDED
from rotorch.core.errors import ConfigError
from rotorch.core.row_parts import RowParts
from rotorch.core.spec import Unit, UnitKind, Weight
from rotorch.core.visits_by_size import visits_of
from rotorch.core.whole_experts import WholeExperts, check_not_compiled
from rotorch.core.whole_units import is_whole
from rotorch.hold.early_sums import Part, SumLater, in_runs
from rotorch.hold.ring_memory import RingMemory
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.hold.shared_batch import SharedBatch
from rotorch.models.describe import module_declares
from rotorch.models.hf import head_weights
from rotorch.ops.gather_weight import gather_weights
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.recompute_norm import recompute_norm
from rotorch.ops.ring_use import use_on_ring
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.visiting_slices import VisitingSlices
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.shard.flat import FlatSlices, can_lie_side_by_side
from rotorch.shard.sites import Site
from rotorch.strategies.rtp.plan import RTP

_log = logging.getLogger(__name__)


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model over the ring of the mesh."""
    return RTPModel(setup)


class RTPModel(SimpleShardedModel, ShardedStages):
    """One rank's slices, its ring, and the weights that are whole on every rank."""

    def __init__(self, setup: Setup) -> None:
        module, strategy, spec, mesh, sites = setup.module, setup.strategy, setup.spec, setup.mesh, setup.sites
        compiled = bool(setup.compiled)
        self._mesh = mesh
        self._within = within = None if setup.within is None else SharedBatch(setup)
        if spec.kept_whole and mesh.size() > 1 and mesh.get_rank() == 0:
            _log.warning("rtp: %s", spec.summary())
        if compiled and strategy.recompute == "all_but_attention":
            raise ConfigError(
                "rtp: recompute=all_but_attention selects operations of a forward, and a compiled one has none to "
                "select. Write recompute=slice, or leave compile out"
            )
        check_not_compiled(spec, kind="rtp", compiled=compiled)
        heads = head_weights(module)
        visiting = spec.cut_units if within is None else within.visiting
        self.ring, self.units = _on_a_ring(setup, visiting, heads=heads)
        self._memory = memory = RingMemory(self.ring, self.units)
        if within is None:
            shards = setup.shards(ShardPlacement.of_units(spec.units, mesh=mesh), memory=memory)
        else:
            shards = setup.shards(within.placements, memory=memory, mesh=setup.inside)
        super().__init__(module, shards)
        shards.withhold(u.unit for u in self.units)
        alone = {u.unit.weights[0].name: u for u in self.units if u.unit.kind is UnitKind.WEIGHT}
        for rotating in self.units:
            if rotating.unit.kind is UnitKind.MODULE:
                part, whole_weight = module.get_submodule(rotating.unit.name), partial(self._whole_weight, alone)
                slices = VisitingSlices(
                    part,
                    rotating,
                    sites=sites,
                    whole=whole_weight,
                    compiled=compiled,
                    within=None if within is None else within.region,
                )
                PartialModule(
                    part,
                    unit=rotating.unit if within is None else within.whole_units[rotating.unit.name],
                    slices=slices,
                    sites=sites,
                    once=shards.leaves.__getitem__,
                    proven=module_declares(module) or rotating.unit.note(WholeExperts) is not None,
                    compiled=setup.compiled,
                )
            else:
                for weight in rotating.unit.weights:
                    head = bool(heads & {weight.name, *weight.aliases})
                    keep_logits = strategy.recompute == "none"
                    use = use_on_ring(weight, rotating, head=head, keep_logits=keep_logits, by_plan=spec.by_plan)
                    like = self.ring.home_weights(rotating.item).new_empty(0, dtype=rotating.dtype)
                    proxy = WeightProxy(use, like=like)
                    if within is not None:
                        proxy = within.proxy(weight.name, of=rotating.unit.name, shard=proxy)
                    shards.replace(weight.name, proxy)
        if within is not None:
            within.hold_empty_parts(module, shards=shards, sites=sites, compiled=compiled)
        if strategy.recomputes_units:
            between = [u for u in spec.units if u.kind is UnitKind.REPLICATED and not is_whole(u)]
            whole = {weight.name for unit in between for weight in unit.weights}
            for norm in _between_units(module, [u.unit for u in self.units], whole=whole):
                recompute_norm(norm)

    def _whole_weight(self, alone: Mapping[str, RotatingUnit], name: str) -> Tensor:
        """A weight that every slice of a module needs: whole at rest, or gathered for the call if it rotates alone."""
        return gather_weights(alone[name])[0] if name in alone else self.shards.leaves[name]

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        with nullcontext() if self._within is None else self._within.same_rng(), super().unsharded() as module:
            yield module

    def start(self) -> None:
        if self._within is not None:
            self._within.axis_group.start()
        super().start()

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        on_the_ring = super().placements_of(weight, unit=unit)
        return on_the_ring if self._within is None else on_the_ring * 2  # what is cut, or whole, is so on both axes

    def borrowed_ready(self) -> None:
        barrier(mesh=self._mesh)  # in shared memory a rank reads values that another one has received

    def computed_backward(self, stage: int) -> None:
        self.ring.flush()

    def make_deferred_additions(self) -> None:
        self.ring.flush()

    def finish(self) -> None:
        self.ring.finish()
        if self._within is not None:
            self.shards.reduce(self._within.gradients_in_parts, mesh=self._within.mesh)
        self.shards.reduce(mesh=self._mesh)
        if self._within is not None or self.early_sums is not None:  # a ring of one rank has summed none
            self.shards.unused_count_as_zero()
        super().finish()

    def _parts(self, sum_later: SumLater) -> list[Part]:
        ring, names = self.ring, self._names

        def before_pass(item: int, backward: bool) -> None:
            assert self.early_sums is not None
            if backward:
                self.early_sums.leave()  # what has come home since the pass before
                self.early_sums.added(names[item])
            else:
                self.early_sums.used(names[item])

        ring.before_pass = before_pass
        trained = [item for unit in self.units if unit.trained for item in unit.items]
        sizes = [(item, ring.home_weights(item).numel()) for item in reversed(trained)]
        return [
            Part(
                tuple(names[item] for item in run),
                partial(ring.home_gradients_of, run),
                sum_later,
                is_home=partial(self._are_home, run),
                beside=ring.behind_gradients,
            )
            for run in in_runs(sizes)
        ]

    def _are_home(self, items: Sequence[int]) -> bool:
        return all(map(self.ring.is_home, items))

    def _gradients_behind_backward(self) -> list[Tensor]:
        return self._memory.whole_gradients(self.weights)

    @property
    def order_hash(self) -> int:
        return self.ring.order_hash

    @property
    def transport(self) -> str | None:
        return self.ring.name

    @property
    def transport_within(self) -> str | None:
        return None if self._within is None else self._within.axis_group.transport

    @property
    def num_hosts(self) -> int | None:
        return self.ring.num_hosts

    @property
    def uncounted_bytes(self) -> int:
        return self.ring.uncounted_bytes

    def slots(self) -> list[Tensor]:
        return [*self.ring.slots(), *([] if self._within is None else self._within.axis_group.slots())]

    def write_status_to(self, status: StatusWord) -> list[str]:
        super().write_status_to(status)
        self.ring.write_status_to(status, ranks=self._mesh.mesh.flatten().tolist())
        return self._names

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        return observe_ring(self.ring, observer, names=self._names)

    @property
    def _names(self) -> list[str]:
        """Names of the ring's items."""
        return [name for rotating in self.units for name in _names_of_items(rotating)]

    def close(self) -> None:
        self.ring.close()
        if self._within is not None:
            self._within.axis_group.close()


def _on_a_ring(setup: Setup, visiting: Sequence[Unit], *, heads: set[str]) -> tuple[Ring, list[RotatingUnit]]:
    """Makes the ring and its items: the units of the model, whose slices visit, or each weight in place.

    This is the one place that decides between them: where the ring's memory gives whole weights, a unit of linear
    layers becomes one for each weight, each multiplies with its whole weight, and only gradients rotate.
    """
    strategy: RTP = setup.strategy
    parameters, size = dict(setup.module.named_parameters()), strategy.size
    in_place = _one_by_one(visiting, sites=setup.sites, heads=heads)
    grouped = strategy.visits_together
    slices = [
        FlatSlices(unit.weights, num_slices=size, num_visits=visits_of(unit, num_slices=size), cut_first=grouped)
        for unit in visiting
    ]
    in_parts = [s.in_parts(u.note(RowParts)) for u, s in zip(visiting, slices, strict=True)]
    side_by_side = [FlatSlices(u.weights, num_slices=size, side_by_side=True) for u in in_place]
    wire_dtype = None if strategy.compute is None else getattr(torch, strategy.compute)
    # Of another precision they would be converted whole, at each use; a graph gives gradients of all its weights.
    # Around another strategy modules run on that one's parts, which linear layers alone do not tell.
    reads_whole = not strategy.recomputes_units and wire_dtype is None and not setup.compiled and setup.within is None
    ring = make_ring(
        strategy.transport,
        mesh=setup.mesh,
        numels=[s.home.numels for s in slices],
        numels_in_parts=[part.home.numels for parts in in_parts for part in parts],
        later_parts=_later_parts(in_parts),
        numels_side_by_side=[s.numels for s in side_by_side] if reads_whole else None,
        dtype=_one_dtype(visiting, parameters),
        device=setup.device,
        wire_dtype=wire_dtype,
        hop_dtype=None if strategy.hops is None else getattr(torch, strategy.hops),
        fp8=strategy.wire == "fp8",
        buffering=strategy.buffering,
        ahead=strategy.ahead,
        num_hosts=strategy.hosts,
        num_visits=[part.num_visits for parts in in_parts for part in parts] if grouped else (),
        flat_chunks=[[part.flat_chunks(k) for k in range(size)] for parts in in_parts for part in parts]
        if grouped
        else (),
    )
    if ring.gives_whole:
        found = zip(in_place, side_by_side, ([s] for s in side_by_side), strict=True)
    else:
        found = zip(visiting, slices, in_parts if ring.takes_parts else ([s] for s in slices), strict=True)
    units, items = [], count()
    for unit, flat, parts in found:
        numbers = [next(items) for _ in parts]
        rotating = RotatingUnit(
            unit,
            ring,
            numbers[0],
            flat,
            recompute=strategy.recomputes_units,
            dtype=setup.param_dtype or ring.dtype,
            trained=_trained(unit, parameters),
            keep_attention=strategy.recompute == "all_but_attention",
            recorded=setup.compiled == RECORDED,
            may_lie_whole=reads_whole and setup.device.type == "cpu" and _lies_whole(unit, setup.sites, heads),
        )
        if len(parts) > 1:
            # A use of a part is one of the weight, which autograd knows by one anchor; views of visits are its own.
            rotating.parts = tuple(
                replace(rotating, item=item, slices=part, _views={}) for item, part in zip(numbers, parts, strict=True)
            )
        units.append(rotating)
    if next(items) != len(ring.numels):
        raise AssertionError(f"the ring has {len(ring.numels)} items, other ones than its units")
    return ring, units


def _later_parts(slices: Sequence[Sequence[FlatSlices]]) -> set[int]:
    """The items, in the order of units and of their parts, that are no first part."""
    numbers = [number for parts in slices for number in range(len(parts))]
    return {item for item, number in enumerate(numbers) if number > 0}


def _names_of_items(rotating: RotatingUnit) -> list[str]:
    name, total = rotating.unit.name, len(rotating.items)
    return [name] if total == 1 else [f"{name} (part {number + 1} of {total})" for number in range(total)]


def _one_dtype(units: Sequence[Unit], parameters: dict[str, nn.Parameter]) -> torch.dtype:
    dtypes = {parameters[w.name].dtype for u in units for w in u.weights}
    if len(dtypes) > 1:
        raise ConfigError(f"rtp: cut weights have several dtypes: {sorted(map(str, dtypes))}. Convert the model to one")
    return dtypes.pop() if dtypes else torch.get_default_dtype()


def _one_by_one(units: Sequence[Unit], *, sites: Mapping[str, tuple[Site, ...]], heads: set[str]) -> list[Unit]:
    """The units of a ring whose items can be read whole (see `ops/side_by_side.py`).

    A unit of linear layers only, or of a single layer, becomes a unit for each of its weights and biases. Others
    rotate: stacked experts, halves that are fused in one matrix, a head with a bias.
    """
    found: list[Unit] = []
    for unit in units:
        if _lies_whole(unit, sites, heads):
            found += [
                replace(unit, name=w.name, kind=UnitKind.WEIGHT, weights=(w,), added_once=()) for w in unit.weights
            ]
        else:
            found.append(unit)
    return found


def _lies_whole(unit: Unit, sites: Mapping[str, tuple[Site, ...]], heads: set[str]) -> bool:
    linear = all(type(site.module) is nn.Linear for w in unit.weights for site in sites[w.name])
    head = any(heads & {w.name, *w.aliases} for w in unit.weights)
    return (linear or unit.kind is UnitKind.WEIGHT) and not head and all(map(can_lie_side_by_side, unit.weights))


def _trained(unit: Unit, parameters: dict[str, nn.Parameter]) -> bool:
    # Of a unit that is frozen in part all gradients travel; those of frozen weights are dropped at home.
    return any(parameters[w.name].requires_grad for w in unit.weights)


def _between_units(module: nn.Module, units: Sequence[Unit], *, whole: Iterable[str]) -> list[nn.Module]:
    """The norms between units, which keep several times their input for backward.

    Only modules that have no others inside, and no buffers, which a second forward would change once more.
    """
    names = {name.rpartition(".")[0] for name in whole}
    inside = tuple(f"{unit.name}." for unit in units)
    found = [module.get_submodule(name) for name in sorted(names) if not f"{name}.".startswith(inside)]
    return [m for m in found if not any(True for _ in m.children()) and not any(True for _ in m.buffers())]

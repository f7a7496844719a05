"""How `rtp` holds a model.

One slice of every cut weight per rank, rotating over a ring for a pass (see `plan.py` for the picture).

At rest each parameter is a DTensor over this rank's home slice, which lies in the ring's memory, and so does its
gradient. For a pass, attentions and MLPs run their own forward once per visiting slice (`ops/partial_module.py`,
`ops/visiting_slices.py`); embedding, head and other single weights are replaced by proxies that rotate where they are
used (`ops/rotating_use.py`); norms are lent whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rotorch.comm.collectives import barrier
from rotorch.comm.observe import Observer, observe_ring
from rotorch.comm.transports import make_ring
from rotorch.comm.whereabouts import Whereabouts
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import ModelSpec, Unit, UnitKind, Weight
from rotorch.hold.sharded_weights import Memory, ShardedWeights, ShardPlacement
from rotorch.models.describe import module_declares
from rotorch.models.hf import head_weights
from rotorch.ops.gather_weight import gather_weights
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.recompute_norm import recompute_norm
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.rotating_use import RotatingUse
from rotorch.ops.visiting_slices import VisitingSlices
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.parallel_model import Holding
from rotorch.shard.flat import FlatSlices, can_lie_side_by_side
from rotorch.shard.sharded_weight import ShardedWeight, cut_pieces, dtensor_at_rest, dtensor_like
from rotorch.shard.sites import Site, find_sites
from rotorch.strategies.rtp.plan import RTP

_log = logging.getLogger(__name__)


def apply(
    module: nn.Module,
    *,
    strategy: RTP,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Cuts `module` over the ring of `mesh`."""
    return RTPHolding(module, strategy=strategy, spec=spec, mesh=mesh, device=device, compiled=compiled)


class RTPHolding(Holding):
    """One rank's slices, its ring, and the weights that are whole on every rank."""

    def __init__(
        self,
        module: nn.Module,
        *,
        strategy: RTP,
        spec: ModelSpec,
        mesh: DeviceMesh,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self._module = module
        self._mesh = mesh
        if spec.kept_whole and mesh.size() > 1 and mesh.get_rank() == 0:
            _log.warning("rtp: %s", spec.summary())
        if compiled and strategy.recompute == "all_but_attention":
            raise ConfigError(
                "rtp: recompute=all_but_attention picks operations out of a forward, and a compiled one has none to "
                "pick. Write recompute=slice, or leave compile out"
            )
        parameters, sites = dict(module.named_parameters()), find_sites(module)
        heads = head_weights(module)
        units, one_by_one = spec.cut_units, _one_by_one(spec.cut_units, sites=sites, heads=heads)
        slices, side_by_side = (
            [FlatSlices(u.weights, num_slices=strategy.size, side_by_side=us is one_by_one) for u in us]
            for us in (units, one_by_one)
        )
        wire_dtype = None if strategy.compute is None else getattr(torch, strategy.compute)
        # Of another precision they would be converted whole, at each use; a graph gives gradients of all its weights.
        reads_whole = not strategy.recomputes_units and wire_dtype is None and not compiled
        self.ring = make_ring(
            strategy.transport,
            mesh=mesh,
            numels=[s.numels for s in slices],
            numels_side_by_side=[s.numels for s in side_by_side] if reads_whole else None,
            dtype=_one_dtype(units, parameters),
            device=device,
            wire_dtype=wire_dtype,
            fp8=strategy.wire == "fp8",
            buffering=strategy.buffering,
        )
        if self.ring.gives_whole:
            units, slices = one_by_one, side_by_side
        self.units = [
            RotatingUnit(
                unit,
                self.ring,
                item,
                flat,
                recompute=strategy.recomputes_units,
                trained=_trained(unit, parameters),
                keep_attention=strategy.recompute == "all_but_attention",
            )
            for item, (unit, flat) in enumerate(zip(units, slices, strict=True))
        ]
        whole = [w for u in spec.units if u.kind is UnitKind.REPLICATED for w in u.weights]
        placements, memory = [ShardPlacement.whole(w, mesh=mesh) for w in whole], Memory(gradients_stay=mesh.size() > 1)
        self.replicas = ShardedWeights(placements, sites=sites, mesh=mesh, device=device, memory=memory)
        for name in {name for u in units for name in u.added_once}:
            self.replicas.replace(name, None)
        self._home: dict[str, ShardedWeight] = {}
        self._home_gradients: dict[str, DTensor] = {}
        self._proxies: list[tuple[Site, Tensor]] = []
        self._home_sites: list[tuple[Site, str]] = []
        self._adds_up = False
        """Whether this step adds to gradients that were there before it."""
        alone = {u.unit.weights[0].name: u for u in self.units if u.unit.kind is UnitKind.WEIGHT}
        for rotating in self.units:
            self._hold(rotating, parameters=parameters, sites=sites)
            if rotating.unit.kind is UnitKind.MODULE:
                part, whole_weight = module.get_submodule(rotating.unit.name), partial(self._whole_weight, alone)
                PartialModule(
                    part,
                    unit=rotating.unit,
                    slices=VisitingSlices(part, rotating, sites=sites, whole=whole_weight, compiled=compiled),
                    sites=sites,
                    once=self.replicas.leaves.__getitem__,
                    proven=module_declares(module),
                    compiled=compiled,
                )
            else:
                self._make_proxies(
                    rotating,
                    sites=sites,
                    heads=heads,
                    keep_logits=strategy.recompute == "none",
                    by_plan=spec.by_plan,
                )
        if strategy.recomputes_units:
            for norm in _between_units(module, units, whole=whole):
                recompute_norm(norm)
        self.weights = {w.name: (self._home | self.replicas.held)[w.name] for w in spec.weights}

    def _hold(
        self, rotating: RotatingUnit, *, parameters: dict[str, nn.Parameter], sites: dict[str, tuple[Site, ...]]
    ) -> None:
        """Gives each weight of a unit its place in the ring's memory, and the module a DTensor over it."""
        n, position = self.ring.size, self.ring.position
        locals_ = rotating.slices.views(self.ring.home_weights(rotating.item), index=position)
        grads = rotating.slices.views(self.ring.home_gradients(rotating.item), index=position)
        for weight, local, grad in zip(rotating.unit.weights, locals_, grads, strict=True):
            source = parameters[weight.name]
            pieces = cut_pieces(weight, num_slices=n, index=position)
            if not source.is_meta:
                for piece in pieces:
                    piece.of_local(local).copy_(piece.of_whole(source.detach()))
            placements = [Shard(weight.cut.dim if weight.cut is not None else 0)]
            at_rest = nn.Parameter(
                dtensor_at_rest(local, shape=weight.shape, mesh=self._mesh, placements=placements),
                requires_grad=source.requires_grad,
            )
            self._home[weight.name] = ShardedWeight(weight, local, pieces, at_rest)
            self._home_gradients[weight.name] = dtensor_like(at_rest, grad)
            for site in sites[weight.name]:
                site.put(at_rest)
                self._home_sites.append((site, weight.name))

    def _make_proxies(
        self,
        rotating: RotatingUnit,
        *,
        sites: dict[str, tuple[Site, ...]],
        heads: set[str],
        keep_logits: bool,
        by_plan: bool,
    ) -> None:
        for weight in rotating.unit.weights:
            head = bool(heads & {weight.name, *weight.aliases})
            use = RotatingUse(weight, rotating, head=head, keep_logits=keep_logits, by_plan=by_plan)
            proxy = WeightProxy(use, like=self.ring.home_weights(rotating.item))
            self._proxies.extend((site, proxy) for site in sites[weight.name])

    def _whole_weight(self, alone: Mapping[str, RotatingUnit], name: str) -> Tensor:
        """A weight that every slice of a module needs: there, or, if it goes round alone, made whole for the call."""
        return gather_weights(alone[name])[0] if name in alone else self.replicas.leaves[name]

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        with self.replicas.unsharded():
            try:
                for site, proxy in self._proxies:
                    site.put(proxy)
                yield self._module
            except BaseException as error:
                try:
                    self.ring.come_home(after=error)
                except RankFailure as lost:
                    error.add_note(str(lost))
                if self._adds_up:
                    self._drop_gradients()
                raise
            else:
                self.ring.come_home()
            finally:
                self._adds_up = False
                for site, name in self._home_sites:
                    site.put(self._home[name].parameter)

    def guests_came(self) -> None:
        barrier(mesh=self._mesh)  # in shared memory one rank reads what another has been lent

    def start(self) -> None:
        self.replicas.start()
        for rotating in self.units:
            if not rotating.trained:
                for weight in rotating.unit.weights:
                    self._home[weight.name].refuse_unfrozen()
        fresh = [self._nothing_accumulated(unit) for unit in self.units]
        self._adds_up = torch.is_grad_enabled() and not all(fresh)
        self.ring.start(fresh=fresh)

    def _drop_gradients(self) -> None:
        """They are in the memory in which a step that was broken off has added, on some ranks more than on others."""
        for held in self.weights.values():
            held.parameter.grad = None

    def computed_backward(self, stage: int) -> None:
        self.ring.catch_up()

    def _nothing_accumulated(self, rotating: RotatingUnit) -> bool:
        """Whether the user has cleared a unit's gradients; if only some of them, those become zero."""
        held = [self._home[w.name] for w in rotating.unit.weights]
        if all(h.parameter.grad is None for h in held):
            return True
        for h in held:
            buffer = self._home_gradients[h.name].to_local()
            if h.local_grad is None:
                buffer.zero_()
            elif h.local_grad.data_ptr() != buffer.data_ptr():
                buffer.copy_(h.local_grad)
        return False

    def finish(self) -> None:
        self.ring.finish()
        self.replicas.reduce()
        self.replicas.finish()
        for rotating in self.units:
            if rotating.trained and not self.ring.fresh[rotating.item]:
                for weight in rotating.unit.weights:
                    if self._home[weight.name].parameter.requires_grad:
                        self._home[weight.name].parameter.grad = self._home_gradients[weight.name]

    def gradients(self) -> list[Tensor]:
        whole = [h.local_grad for h in self.replicas.held.values() if h.local_grad is not None]
        return [self.ring.all_home_gradients, *whole]

    @property
    def transport(self) -> str | None:
        return self.ring.name

    def slots(self) -> list[Tensor]:
        return self.ring.slots()

    def mark_on(self, place: Whereabouts) -> list[str]:
        super().mark_on(place)
        self.ring.mark_on(place, ranks=self._mesh.mesh.flatten().tolist())
        return [rotating.unit.name for rotating in self.units]

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        return observe_ring(self.ring, observer, names=[rotating.unit.name for rotating in self.units])

    def close(self) -> None:
        self.ring.close()


def _one_dtype(units: Sequence[Unit], parameters: dict[str, nn.Parameter]) -> torch.dtype:
    dtypes = {parameters[w.name].dtype for u in units for w in u.weights}
    if len(dtypes) > 1:
        raise ConfigError(f"rtp: cut weights have several dtypes: {sorted(map(str, dtypes))}. Convert the model to one")
    return dtypes.pop() if dtypes else torch.get_default_dtype()


def _one_by_one(units: Sequence[Unit], *, sites: dict[str, tuple[Site, ...]], heads: set[str]) -> list[Unit]:
    """The units of a ring whose items can be read whole (see `ops/side_by_side.py`).

    A unit of linear layers only, or of a single layer, becomes a unit for each of its weights and biases. Others
    rotate: stacked experts, halves that are fused in one matrix, a head with a bias.
    """
    found: list[Unit] = []
    for unit in units:
        linear = all(type(site.module) is nn.Linear for w in unit.weights for site in sites[w.name])
        head = any(heads & {w.name, *w.aliases} for w in unit.weights)
        if (linear or unit.kind is UnitKind.WEIGHT) and not head and all(map(can_lie_side_by_side, unit.weights)):
            found += [
                replace(unit, name=w.name, kind=UnitKind.WEIGHT, weights=(w,), added_once=()) for w in unit.weights
            ]
        else:
            found.append(unit)
    return found


def _trained(unit: Unit, parameters: dict[str, nn.Parameter]) -> bool:
    wanted = {parameters[w.name].requires_grad for w in unit.weights}
    if len(wanted) > 1:
        raise ConfigError(f"rtp: {unit.name!r} is frozen in part. Freeze all of its weights or none")
    return wanted == {True}


def _between_units(module: nn.Module, units: Sequence[Unit], *, whole: Sequence[Weight]) -> list[nn.Module]:
    """The norms between units: what they keep for backward is several times their input.

    Only modules that have no others inside, and no buffers, which a second forward would change once more.
    """
    names = {w.name.rpartition(".")[0] for w in whole}
    inside = tuple(f"{unit.name}." for unit in units)
    found = [module.get_submodule(name) for name in sorted(names) if not f"{name}.".startswith(inside)]
    return [m for m in found if not any(True for _ in m.children()) and not any(True for _ in m.buffers())]

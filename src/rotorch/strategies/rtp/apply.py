"""How `rtp` holds a model.

One slice of every cut weight per rank, rotating over a ring for a pass (see `plan.py` for the picture).

At rest each parameter is a DTensor over this rank's home slice, which lies in the ring's memory, and so does its
gradient. For a pass, attentions and MLPs run their own forward once per visiting slice (`ops/rotate.py`); embedding,
head and other single weights are replaced by proxies that rotate where they are used (`ops/rotating_use.py`);
norms are lent whole.

[Note: sums]
    Outputs of slices add up only if a module's forward is linear in its row-wise weights: a residual, a norm or an
    activation behind them would count once per slice, and the loss would look right. Hugging Face's own plans keep to
    that. A plan that the user has written is tried once, on the first input: row-wise weights times -2 must give the
    output times -2, which in binary arithmetic is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.comm.collectives import barrier
from rotorch.comm.observe import Observer, observe_ring
from rotorch.comm.ring import Visit
from rotorch.comm.transports import make_ring
from rotorch.comm.whereabouts import Whereabouts
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.hold.replicas import Replicas
from rotorch.models.compiled import compiled_forward
from rotorch.models.describe import module_declares
from rotorch.models.hf import head_weights
from rotorch.ops.gather_weight import gather_weights
from rotorch.ops.multihead import multihead_on_slice
from rotorch.ops.recompute_norm import recompute_norm
from rotorch.ops.rotate import RotatingUnit, RunSlice, rotate_module
from rotorch.ops.rotating_use import RotatingUse
from rotorch.ops.slice_linear import slice_linear
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.parallel_model import Holding
from rotorch.shard.buffers import WrittenBuffers
from rotorch.shard.flat import FlatSlices, can_lie_side_by_side
from rotorch.shard.held import HeldWeight, cut_pieces, dtensor_at_rest, dtensor_like, refuse_unfrozen
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
        self.replicas = Replicas(
            whole, parameters=parameters, sites=sites, mesh=mesh, device=device, gradients_stay=mesh.size() > 1
        )
        self._added_once = [name for u in units for name in u.added_once]
        self._home: dict[str, HeldWeight] = {}
        self._home_gradients: dict[str, DTensor] = {}
        self._proxies: list[tuple[Site, Tensor]] = []
        self._home_sites: list[tuple[Site, str]] = []
        self._adds_up = False
        """Whether this step adds to gradients that were there before it."""
        alone = {u.unit.weights[0].name: u for u in self.units if u.unit.kind is UnitKind.WEIGHT}
        for rotating in self.units:
            self._hold(rotating, parameters=parameters, sites=sites)
            if rotating.unit.kind is UnitKind.MODULE:
                RotatedModule(
                    module.get_submodule(rotating.unit.name),
                    rotating,
                    sites=sites,
                    replicas=self.replicas,
                    alone=alone,
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
            self._home[weight.name] = HeldWeight(weight, local, pieces, at_rest)
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

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        try:
            self.replicas.lend()
            for name in self._added_once:
                self.replicas.withhold(name)
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
            self.replicas.take_back()
            for site, name in self._home_sites:
                site.put(self._home[name].parameter)

    def guests_came(self) -> None:
        barrier(mesh=self._mesh)  # in shared memory one rank reads what another has been lent

    def start(self) -> None:
        self.replicas.start()
        for rotating in self.units:
            if not rotating.trained:
                for weight in rotating.unit.weights:
                    refuse_unfrozen(self._home[weight.name])
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
        self.replicas.attach()
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


class RotatedModule:
    """Runs a module's own forward on the slices of its weights that pass by, in place of its forward.

    Its outputs sum; of a tuple, the first element does, and what else it holds (attention maps of one slice) becomes
    None. `nn.MultiheadAttention`, whose own forward cannot run on slices, has one of ours, and its maps sum too.
    """

    def __init__(
        self,
        module: nn.Module,
        rotating: RotatingUnit,
        *,
        sites: dict[str, tuple[Site, ...]],
        replicas: Replicas,
        alone: Mapping[str, RotatingUnit],
        proven: bool,
        compiled: bool,
    ) -> None:
        unit = rotating.unit
        self._proven = proven
        self._rotating = rotating
        self._dense_forward = compiled_forward(module) if compiled else module.forward
        self._num_sums = 1
        if isinstance(module, nn.MultiheadAttention) and _is_by_heads(unit, module):
            self._dense_forward = partial(_attend, module, rotating)
            self._num_sums = 2
            self._proven = True
        self._weight_sites = [sites[w.name][0] for w in unit.weights]
        self._buffers = WrittenBuffers(module)
        self._replicas = replicas
        self._whole = unit.replicated
        self._whole_sites = [sites[name] for name in unit.replicated]
        self._alone = alone
        self._added_once = unit.added_once
        self._visiting: list[Tensor] = []
        # A graph has products of its own: it gives the gradients of a slice's weights as autograd does.
        rotating.linear_weights = frozenset() if compiled else self._take_over_linears()
        module.forward = self.forward  # type: ignore[method-assign]

    def _take_over_linears(self) -> frozenset[int]:
        """Runs the unit's plain linear layers by `ops/slice_linear.py`; returns the numbers of their weights."""
        numbers = {(id(site.module), site.attribute): i for i, site in enumerate(self._weight_sites)}
        taken: set[int] = set()
        for site in self._weight_sites:
            weight, bias = (numbers.get((id(site.module), name)) for name in ("weight", "bias"))
            if type(site.module) is not nn.Linear or weight is None or site.attribute != "weight":
                continue
            taken |= {weight} if bias is None else {weight, bias}
            site.module.forward = partial(self._linear, weight, bias)  # type: ignore[method-assign]
        return frozenset(taken)

    def _linear(self, weight: int, bias: int | None, x: Tensor) -> Tensor:
        return slice_linear(self._rotating, weight, bias, x, weights=self._visiting)

    def _whole_weight(self, name: str) -> Tensor:
        """A weight that every slice needs: there, or, if it goes round alone, made whole once for all of them."""
        rotating = self._alone.get(name)
        return self._replicas.twins[name] if rotating is None else gather_weights(rotating)[0]

    def _lend_whole(self, tensors: Sequence[Tensor | None]) -> None:
        """Puts the weights that the unit needs whole wherever they are used."""
        for sites, tensor in zip(self._whole_sites, tensors, strict=True):
            for site in sites:
                site.put(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward over all slices."""
        self._refuse_cache((*args, *kwargs.values()))
        leaves, tree = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        lent = [sites[0].get() for sites in self._whole_sites]
        whole = [self._whole_weight(name) for name in self._whole]
        form = _Form()

        def run(weights: list[Tensor], inputs: Sequence[Tensor]) -> Tensor:
            self._visiting = weights
            for site, weight in zip(self._weight_sites, weights, strict=True):
                site.put(weight)
            self._lend_whole(inputs[len(where) :])
            given = list(leaves)
            for i, tensor in zip(where, inputs, strict=False):
                given[i] = tensor
            slice_args, slice_kwargs = tree_unflatten(given, tree)
            output = self._dense_forward(*slice_args, **slice_kwargs)
            self._lend_whole(lent)  # other modules may share them, and know nothing of this unit's graph
            form.length = len(output) if isinstance(output, tuple) else None
            first, *more = output[: self._num_sums] if isinstance(output, tuple) else (output,)
            if not isinstance(first, Tensor):
                raise ConfigError(
                    f"rtp: {self._rotating.unit.name!r} returns a {type(first).__name__}; what is cut into slices must "
                    "return a tensor, or a tuple that begins with one. Give its weights no role in the plan"
                )
            return form.pack([first, *(part for part in more if part is not None)])

        inputs = [*(leaves[i] for i in where), *whole]
        watched = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [leaf._version for leaf in watched]
        for i in where:
            leaves[i] = None  # `run` lives until backward, and may be all that keeps it
        self._buffers.start()
        total = rotate_module(self._rotating, run, inputs)
        if versions != [leaf._version for leaf in watched]:
            raise ConfigError(
                f"rtp: {self._rotating.unit.name!r} changes its input in place, which every slice would do again. "
                "Give its weights no role in the plan, or let it change a copy"
            )
        if self._buffers.written().any():
            raise ConfigError(
                f"rtp: {self._rotating.unit.name!r} writes its buffers in forward (running statistics), once per "
                "slice. Give its weights no role in the plan, or 'colwise_gather_output'"
            )
        if not self._proven:
            self._prove(run, inputs)
        first, *more = form.unpack(total)
        for name in self._added_once:
            first = first + self._replicas.twins[name]
        return first if form.length is None else (first, *more, *[None] * (form.length - 1 - len(more)))

    def _refuse_cache(self, given: Sequence[Any]) -> None:
        if any(hasattr(value, "get_seq_length") for value in given):  # a Hugging Face cache of keys and values
            raise ConfigError(
                f"rtp: {self._rotating.unit.name!r} is given a cache of keys and values, to which every slice would "
                "append. Leave use_cache and past_key_values out of the batch"
            )

    def _prove(self, run: RunSlice, inputs: Sequence[Tensor]) -> None:
        """Tries on this rank's slice whether outputs of slices add up; see [Note: sums]."""
        rotating, self._proven = self._rotating, True
        home = rotating.ring.home_weights(rotating.item)
        if not home.numel():
            return
        weights = [w.detach() for w in rotating.weights(Visit(rotating.ring.position, home, 0))]
        rows = [w.cut is not None and 0 < w.cut.dim == len(w.shape) - 1 for w in rotating.unit.weights]
        scaled = [-2.0 * weight if row else weight for weight, row in zip(weights, rows, strict=True)]
        devices = [home.device] if home.device.type == "cuda" else []
        outputs = []
        with torch.no_grad(), torch.random.fork_rng(devices):
            for given in (weights, scaled):
                torch.manual_seed(0)  # dropout drops the same
                outputs.append(run(given, inputs).float())
        once, again = outputs
        if (again + 2.0 * once).norm() > 1e-2 * again.norm():
            raise ConfigError(
                f"rtp: {rotating.unit.name!r} cannot be cut as the plan says: its forward does more with the row-wise "
                "product than return it (a residual, a norm, an activation), so outputs of slices do not add up. Put "
                "column- and row-wise weights into a module of their own, or write 'colwise_gather_output' for both"
            )


@dataclass
class _Form:
    """How a module's output is made of the one tensor that sums over slices.

    Attributes:
        length: of the tuple that it returns; None if it returns a tensor.
        parts: shape and dtype of each of the tensors that sum, if there are several.
    """

    length: int | None = None
    parts: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor that holds all of `tensors`."""
        if len(tensors) == 1:
            return tensors[0]
        self.parts = [(t.shape, t.dtype) for t in tensors]
        return torch.cat([t.reshape(-1) for t in tensors])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The tensors again."""
        if not self.parts:
            return [packed]
        split = packed.split([shape.numel() for shape, _ in self.parts])
        return [part.view(shape).to(dtype) for part, (shape, dtype) in zip(split, self.parts, strict=True)]


def _is_by_heads(unit: Unit, attention: nn.MultiheadAttention) -> bool:
    """Whether an attention is cut as our rules do it (`models/rules.py`)."""
    return all(w.cut is not None and w.cut.groups == attention.num_heads for w in unit.weights)


def _attend(attention: nn.MultiheadAttention, rotating: RotatingUnit, *args: Any, **kwargs: Any) -> Any:
    """The attention's forward on the visiting heads."""
    num_heads, num_slices = attention.num_heads, rotating.slices.num_slices
    (heads,) = Cut(0, num_heads).ranges(num_heads, num_slices=num_slices, index=rotating.visiting)
    return multihead_on_slice(attention, heads, *args, **kwargs)


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

"""How `atp` holds a model: one block of every matrix per rank, for good (see `plan.py` for the picture).

Activations are cut along their features over one axis from the embedding to the loss. Attentions and MLPs run their own
forward on their part of the interior (`ops/cut_module.py`); in them, and elsewhere, matrices are stand-ins that
multiply with this rank's block (`ops/plane_weight.py`); norms have their sums over features completed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.line import Line
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, GridCut, ModelSpec, Range, Unit, UnitKind, Weight
from rotorch.models.feature_sums import CompletedSums
from rotorch.ops.conjugates import Boundary
from rotorch.ops.cut_features import sum_over
from rotorch.ops.cut_module import CutModule
from rotorch.ops.plane_weight import Plane, PlaneWeight, Role
from rotorch.ops.random_state import drawn_alike
from rotorch.parallel_model import Holding
from rotorch.shard.held import Piece
from rotorch.shard.sites import find_sites
from rotorch.shard.twins import Part, Twins
from rotorch.strategies.atp.plan import ATP, AtpPlace, is_column


def apply(
    module: nn.Module,
    *,
    strategy: ATP,
    spec: ModelSpec,
    mesh: DeviceMesh,
    device: torch.device,
    compiled: bool = False,
) -> Holding:
    """Cuts `module` into blocks over the two axes of `mesh`."""
    if compiled:
        raise ConfigError(f"{strategy}: sums lie in the middle of modules, so none is compiled. Leave it out")
    return ATPHolding(module, strategy=strategy, spec=spec, mesh=mesh, device=device)


class ATPHolding(Holding):
    """One rank's blocks, and the weights that are whole on every rank."""

    def __init__(
        self, module: nn.Module, *, strategy: ATP, spec: ModelSpec, mesh: DeviceMesh, device: torch.device
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._strategy = strategy
        interior, features = (Line.along(mesh, axis) for axis in (strategy.interior_axis, strategy.feature_axis))
        self._place = AtpPlace(interior.position, interior.size, features.position, features.size)
        self.plane = Plane(interior, features, strategy.chunks)
        sites = find_sites(module)
        self._twins = Twins(
            [self._part(w) for w in spec.weights],
            parameters=dict(module.named_parameters()),
            sites=sites,
            mesh=mesh,
            device=device,
            gradients_stay=False,
        )
        self.weights = {w.name: self._twins.held[w.name] for w in spec.weights}
        self._partial = [w.name for w in spec.weights if w.beside_slices]
        self._added_once = [name for u in spec.units for name in u.added_once]
        self._stand_ins: list[tuple[str, Tensor]] = []
        for unit in spec.units:
            self._stand_ins += [(w.name, self._stand_in(w, unit)) for w in unit.weights if _is_block(w)]
            if unit.kind is UnitKind.MODULE:
                CutModule(
                    module.get_submodule(unit.name),
                    unit=unit,
                    boundary=Boundary(interior),
                    sites=sites,
                    twins=self._twins.twins,
                    once=self._twins.twins.__getitem__,
                    strategy=strategy.kind,
                    proven=True,
                    compiled=False,
                )
        for weight in spec.weights:
            if weight.grid is not None and weight.grid.sums and features.size > 1:
                for site in sites[weight.name]:
                    self._complete_sums(site.module, weight)

    def _part(self, weight: Weight) -> Part:
        cut, place = weight.grid or GridCut(), self._place
        placements: dict[str, Placement] = {axis: Replicate() for axis in self._strategy.axes}
        num_holders, holder = 1, 0
        for part, axis, n, k in (
            (cut.rows, self._strategy.interior_axis, place.num_interior, place.interior),
            (cut.columns, self._strategy.feature_axis, place.num_features, place.feature),
        ):
            if part is not None:
                placements[axis] = Shard(part.dim)
            else:
                holder, num_holders = holder * n + k, num_holders * n
        return Part(
            weight,
            _pieces(place.ranges(weight)),
            place.shape(weight),
            tuple(placements.values()),
            num_holders=num_holders,
            holder=holder,
        )

    def _stand_in(self, weight: Weight, unit: Unit) -> PlaneWeight:
        if unit.kind is UnitKind.MODULE:
            role, rows = Role.COLUMN if is_column(weight) else Role.ROW, ()
        else:
            rows = tuple(self._place.ranges(weight, interior=k)[0][0] for k in range(self._place.num_interior))
            if unit.combine is Combine.SUM or unit.logits or unit.kind is UnitKind.REPLICATED:
                role = Role.TABLE
            else:
                role = Role.SPREAD if is_column(weight) else Role.COLLECT
        block = self._twins.twins[weight.name]
        return PlaneWeight(weight, block, role=role, plane=self.plane, rows=rows, head=unit.logits)

    def _complete_sums(self, norm: nn.Module, weight: Weight) -> None:
        (mine,) = self._place.shape(weight)
        over = partial(sum_over, self.plane.features)
        norm.forward = partial(_with_sums, norm.forward, mine, weight.shape[0], over)  # type: ignore[method-assign]

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        first = self._place.interior == self._place.feature == 0
        seed = all_reduce_sum(torch.randint(2**62, ()) * first, mesh=self._mesh)
        with drawn_alike(int(seed)):
            try:
                self._twins.lend()
                for name in self._added_once:
                    self._twins.lend_instead(name, None)
                for name, stand_in in self._stand_ins:
                    self._twins.lend_instead(name, stand_in)
                yield self._module
            finally:
                self._twins.take_back()

    def start(self) -> None:
        self._twins.start()

    def finish(self) -> None:
        self._twins.reduce(self._partial, mesh=self._mesh[self._strategy.interior_axis])
        self._twins.unused_count_as_zero()
        self._twins.attach()


def _with_sums(forward: Any, mine: int, total: int, over: Any, /, *args: Any, **kwargs: Any) -> Any:
    with CompletedSums(mine=mine, total=total, sum_over=over):
        return forward(*args, **kwargs)


def _is_block(weight: Weight) -> bool:
    return len(weight.shape) == 2 and weight.grid is not None and weight.grid.columns is not None


def _pieces(boxes: tuple[tuple[Range, ...], ...]) -> tuple[Piece, ...]:
    """Where this rank's part sits in the whole: several boxes if one dim is cut in several blocks."""
    along = next((dim for dim, ranges in enumerate(boxes) if len(ranges) > 1), 0)
    pieces, local_start = [], 0
    for part in boxes[along] if boxes else ():
        ranges = [part if dim == along else other[0] for dim, other in enumerate(boxes)]
        if all(r.length for r in ranges):
            pieces.append(Piece(tuple(r.start for r in ranges), tuple(r.length for r in ranges), along, local_start))
        local_start += part.length
    return tuple(pieces) if boxes else (Piece((), ()),)

"""This rank's parts of weights: a plain twin for passes, a DTensor at rest, one memory.

A part may be any box of a weight, or several: a slice, a block of a grid, the whole. What strategies whose ranks keep
the same part throughout a pass have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.spec import Weight
from rotorch.shard.sharded_weight import (
    EarlierGradients,
    Piece,
    ShardedWeight,
    cut_pieces,
    dtensor_at_rest,
    dtensor_like,
    refuse_unfrozen,
)
from rotorch.shard.sites import Site


@dataclass(frozen=True)
class Part:
    """What one rank holds of a weight.

    Attributes:
        weight: which.
        pieces: where the parts of the local tensor sit in the whole.
        shape: of the local tensor.
        placements: of the DTensor at rest, one per axis of the mesh. Uneven and fused cuts are Shard in name only.
        num_holders: how many ranks of the mesh hold the same.
        holder: this rank's number among them.
    """

    weight: Weight
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    num_holders: int = 1
    holder: int = 0

    def of_whole(self, whole: Tensor, *, device: torch.device) -> Tensor:
        """Returns this part of a whole weight: a copy, or `whole` itself if that is all of it."""
        if self.shape == self.weight.shape and len(self.pieces) == 1:
            return whole.to(device)
        local = torch.empty(self.shape, dtype=whole.dtype, device=device)
        for piece in self.pieces:
            piece.of_local(local).copy_(piece.of_whole(whole))
        return local


def whole_part(weight: Weight, *, mesh: DeviceMesh) -> Part:
    """All of a weight, on every rank of a one-axis mesh."""
    pieces = cut_pieces(weight, num_slices=1, index=0)
    return Part(weight, pieces, weight.shape, (Replicate(),), num_holders=mesh.size(), holder=mesh.get_local_rank())


def slice_part(weight: Weight, *, mesh: DeviceMesh) -> Part:
    """This rank's slice of a weight that is cut over a one-axis mesh."""
    n, position = mesh.size(), mesh.get_local_rank()
    if weight.cut is None:
        raise AssertionError(f"{weight.name} is not cut")
    shape = weight.slice_shape(num_slices=n, index=position)
    return Part(weight, cut_pieces(weight, num_slices=n, index=position), shape, (Shard(weight.cut.dim),))


class Twins:
    """What one rank holds of some weights.

    Args:
        parts: which part of which weight.
        parameters: the module's own parameters by name; values are taken over from those that have any.
        sites: where each sits.
        mesh: the mesh of the DTensors at rest.
        device: where to hold them.
        gradients_stay: the twins' gradients lie in the same memory in every step (buckets, sums), so what refers to
            them may be kept from step to step.
        memory: by name, where to hold a part; the others get memory of their own.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        parameters: Mapping[str, nn.Parameter],
        sites: Mapping[str, tuple[Site, ...]],
        mesh: DeviceMesh,
        device: torch.device,
        gradients_stay: bool,
        memory: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._mesh = mesh
        self._gradients_stay = gradients_stay
        self._parts = {p.weight.name: p for p in parts}
        self._sites = {name: sites[name] for name in self._parts}
        self.twins: dict[str, nn.Parameter] = {}
        self.held: dict[str, ShardedWeight] = {}
        self._earlier = EarlierGradients()
        self._at_rest: dict[str, tuple[int, DTensor]] = {}
        self._sums: dict[tuple[torch.dtype, tuple[str, ...]], Tensor] = {}
        for name, part in self._parts.items():
            source = parameters[name]
            if memory is not None and name in memory:
                value = memory[name]
                if not source.is_meta:
                    value.copy_(part.of_whole(source.detach(), device=device))
            elif source.is_meta:
                value = torch.empty(part.shape, dtype=source.dtype, device=device)
            else:
                value = part.of_whole(source.detach(), device=device)
            twin = nn.Parameter(value, requires_grad=source.requires_grad)
            at_rest = nn.Parameter(
                dtensor_at_rest(twin.detach(), shape=part.weight.shape, mesh=mesh, placements=part.placements),
                requires_grad=source.requires_grad,
            )
            self.twins[name] = twin
            self.held[name] = ShardedWeight(
                part.weight,
                twin.detach(),
                part.pieces,
                at_rest,
                num_holders=part.num_holders,
                holder=part.holder,
            )
            self.take_back(name)

    def lend(self) -> None:
        """Puts the plain twins into the module."""
        for name, sites in self._sites.items():
            for site in sites:
                site.put(self.twins[name])

    def lend_instead(self, name: str, tensor: Tensor | None) -> None:
        """Lends something else for one weight: a proxy, or nothing (a bias that is added elsewhere)."""
        for site in self._sites[name]:
            site.put(tensor)

    def take_back(self, name: str | None = None) -> None:
        """Puts the DTensors back: all, or one. A step that broke off leaves the gradients that were there before it."""
        if name is None:
            self._earlier.put_back(self.held)
        for each in self._sites if name is None else (name,):
            for site in self._sites[each]:
                site.put(self.held[each].parameter)

    @contextmanager
    def lent(self, instead: Iterable[tuple[str, Tensor | None]]) -> Iterator[None]:
        """Within it the module has the plain twins, and for some weights something else (see `lend_instead`)."""
        try:
            self.lend()
            for name, tensor in instead:
                self.lend_instead(name, tensor)
            yield
        finally:
            self.take_back()

    def start(self) -> None:
        """Before a step: gradients that the user has not cleared are set aside, to be added at the end.

        Raises:
            ConfigError: a weight that was frozen requires a gradient now.
        """
        for name, twin in self.twins.items():
            if not twin.requires_grad:
                refuse_unfrozen(self.held[name])
        self._earlier.set_aside(self.held)
        for twin in self.twins.values():
            twin.grad = None
        if not self._gradients_stay:
            self._at_rest = {}

    def reduce(self, names: Iterable[str] | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """Sums the twins' gradients over an axis, all in one message. All ranks of the axis.

        A weight that this rank's passes did not use counts as zeros, since others may have used it; so if none has, its
        gradient is zero and not None, as under torch's DDP.

        Args:
            names: of which weights; None: of all.
            mesh: over which ranks; None: over those of the DTensors at rest.
        """
        mesh = self._mesh if mesh is None else mesh
        if mesh.size() == 1:
            return
        names = [n for n in (self.twins if names is None else names) if self.twins[n].requires_grad]
        for dtype in sorted({self.twins[n].dtype for n in names}, key=str):
            same = [self.twins[n] for n in names if self.twins[n].dtype == dtype]
            key = dtype, tuple(names)
            if key not in self._sums:  # kept, so that gradients stay in one place from step to step
                self._sums[key] = torch.empty(sum(t.numel() for t in same), dtype=dtype, device=same[0].device)
            flat = self._sums[key]
            parts = [p.view_as(t) for p, t in zip(flat.split([t.numel() for t in same]), same, strict=True)]
            for twin, part in zip(same, parts, strict=True):
                part.zero_() if twin.grad is None else part.copy_(twin.grad)
                twin.grad = part
            all_reduce_sum(flat, mesh=mesh)

    def unused_count_as_zero(self) -> None:
        """Gives weights that no pass of this step used a gradient of zeros: a sum over replicas counts on all of them.

        On all ranks alike, so that the same tensors are summed everywhere.
        """
        for twin in self.twins.values():
            if twin.requires_grad and twin.grad is None:
                twin.grad = torch.zeros_like(twin)

    def attach(self) -> None:
        """After a step: gives the DTensors the twins' gradients."""
        for name, twin in self.twins.items():
            if twin.grad is None or not self.held[name].parameter.requires_grad:  # frozen after parallelize, perhaps
                continue
            grad = twin.grad.detach()
            self._earlier.add_to(grad, name=name)
            pointer, known = self._at_rest.get(name, (None, None))
            if known is None or pointer != grad.data_ptr():  # mostly the same memory as in the step before
                known = dtensor_like(self.held[name].parameter, grad)
                self._at_rest[name] = (grad.data_ptr(), known)
            self.held[name].parameter.grad = known
        self._earlier.forget()

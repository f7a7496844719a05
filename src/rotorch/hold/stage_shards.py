"""Weights of pipeline stages, cut over the ranks of a stage and gathered whole for a run of micro-batches.

What `fsdp` inside of a pipeline and `zeropp` have in common. Torch's `fully_shard` gathers around every forward and
backward of a module; a pipeline has many of them in a row, and says itself when a stage's weights are whole (UNSHARD),
may go (RESHARD), and when their gradients are summed (REDUCE_GRAD): one message each, however many weights.

[Note: gathered memory]
    A whole weight is one parameter throughout, whose memory is freed and taken again, so that what autograd has saved
    of it in forward is there in backward. It is written through `.data`, which autograd takes for no change. Parts are
    gathered right into it, and gradients summed where autograd left them: no copy is made of either, but of weights
    whose rows the ranks do not divide, which are padded.

[Note: under way]
    UNSHARD and REDUCE_GRAD start what they say. Weights are waited for before the first computation that needs them.
    Sums of gradients are waited for before a stage of this rank makes new ones, so that whole gradients of one stage at
    a time are all that there is, and forwards in between hide the sums: where something else than the rank's own core
    sends them. On CPU nothing would be hidden, but whole gradients be kept beside what the forwards keep, so there a
    sum is waited for at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rotorch.comm.line import Line, Wait
from rotorch.core.spec import ModelSpec, Weight
from rotorch.parallel_model import Holding
from rotorch.shard.sharded_weight import (
    EarlierGradients,
    Piece,
    ShardedWeight,
    dtensor_at_rest,
    dtensor_like,
    refuse_unfrozen,
)
from rotorch.shard.sites import Site, find_sites


@dataclass(eq=False)
class _Shard:
    """One weight: `rows` of it per rank, the last ranks fewer; `whole` has no memory unless gathered."""

    held: ShardedWeight
    whole: nn.Parameter
    rows: int
    sites: tuple[Site, ...]

    @property
    def padded(self) -> int:
        """Elements per rank, on every rank the same."""
        return self.rows * math.prod(self.whole.shape[1:])

    def is_even(self, size: int) -> bool:
        """Whether every one of so many ranks has as many rows."""
        return self.rows * size == self.whole.shape[0]


@dataclass(eq=False)
class _Group:
    """Weights of one dtype that the same stages use: what one message gathers, and one sums the gradients of."""

    shards: list[_Shard] = field(default_factory=list)
    gathered_for: set[int] = field(default_factory=set)
    comes: Wait | None = None
    """Ends a gather that is under way."""
    sums: Tensor | None = None
    """Of this rank's part of the gradients of a step, flat."""

    @property
    def numel(self) -> int:
        return sum(shard.padded for shard in self.shards)


def hides_sums(device: torch.device) -> bool:
    """Whether sums of gradients are under way while a rank computes (see [Note: under way])."""
    return device.type != "cpu"


class StageShards(Holding):
    """This rank's part of the weights of its stages.

    Args:
        module: the model.
        spec: the units of this rank's stages.
        mesh: of the ranks that share them, one axis.
        device: of this rank.
        reshard: free gathered weights where a pipeline says so; False: they stay until the step ends.
    """

    weight_gradients_wait = True

    def __init__(
        self, module: nn.Module, *, spec: ModelSpec, mesh: DeviceMesh, device: torch.device, reshard: bool = True
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._reshard = reshard
        self._hides_sums = hides_sums(device)
        self._line = Line.along(mesh, (mesh.mesh_dim_names or ("",))[0])
        parameters, sites = dict(module.named_parameters()), find_sites(module)
        groups: dict[tuple[tuple[int, ...], torch.dtype], _Group] = {}
        self.weights = {}
        for unit in spec.units:
            for weight in unit.weights:
                source = parameters[weight.name]
                shard = self._shard(weight, source, sites=sites[weight.name], device=device)
                groups.setdefault((unit.stages, source.dtype), _Group()).shards.append(shard)
                self.weights[weight.name] = shard.held
        self._groups = groups
        self._earlier = EarlierGradients()
        self._sums_end: Wait | None = None
        """Ends the one sum of gradients that is under way."""
        self._left_behind: list[Wait] = []
        """Gathers that a step broke off: what comes late still needs the memory that it was sent for."""
        self._take_back()

    def _shard(self, weight: Weight, source: nn.Parameter, *, sites: tuple[Site, ...], device: torch.device) -> _Shard:
        position, each = self._line.position, -(-weight.shape[0] // self._line.size)
        mine = max(0, min(weight.shape[0], (position + 1) * each) - position * each)
        pieces: tuple[Piece, ...] = ()
        if mine:
            pieces = (Piece((position * each, *[0] * (len(weight.shape) - 1)), (mine, *weight.shape[1:])),)
        local = torch.empty((mine, *weight.shape[1:]), dtype=source.dtype, device=device)
        if not source.is_meta:
            for piece in pieces:
                piece.of_local(local).copy_(piece.of_whole(source.detach()))
        at_rest = dtensor_at_rest(local, shape=weight.shape, mesh=self._mesh, placements=(Shard(0),))
        parameter = nn.Parameter(at_rest, requires_grad=source.requires_grad)
        whole = nn.Parameter(
            torch.empty(weight.shape, dtype=source.dtype, device=device), requires_grad=source.requires_grad
        )
        whole.untyped_storage().resize_(0)
        return _Shard(ShardedWeight(weight, local, pieces, parameter), whole, each, sites)

    # ---------------------------------------------------------------- lending

    @contextmanager
    def lend(self) -> Iterator[nn.Module]:
        try:
            for group in self._groups.values():
                for shard in group.shards:
                    for site in shard.sites:
                        site.put(shard.whole)
            yield self._module
        finally:
            for group in self._groups.values():
                self._leave(group)
                self._free(group)
                group.sums = None
                for shard in group.shards:
                    shard.whole.grad = None
            self._sums_end = None
            self._take_back()

    def _take_back(self) -> None:
        for group in self._groups.values():
            for shard in group.shards:
                for site in shard.sites:
                    site.put(shard.held.parameter)

    def _of(self, stage: int) -> Sequence[_Group]:
        return [group for (stages, _), group in self._groups.items() if stage in stages]

    def unshard(self, stage: int) -> None:
        """Gathers a stage's weights. All ranks that share it."""
        for group in self._of(stage):
            if not group.gathered_for:
                self._gather(group)
            group.gathered_for.add(stage)

    def reshard(self, stage: int) -> None:
        for group in self._of(stage) if self._reshard else ():
            group.gathered_for.discard(stage)
            if not group.gathered_for:
                self._free(group)

    def computes(self, stage: int, *, backward: bool) -> None:
        for group in self._of(stage):
            if group.comes is not None:
                group.comes()
        if backward and self._sums_end is not None:
            self._sums_end()

    @torch.no_grad()
    def _gather(self, group: _Group) -> None:
        size, wholes, parts, padded = self._line.size, [], [], []
        for shard in group.shards:
            whole, mine = shard.whole, shard.held.local
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            if shard.is_even(size):
                wholes.append(whole.data.view(-1))  # see [Note: gathered memory]
                parts.append(mine.reshape(-1))
            else:
                part = mine.new_zeros(shard.padded)
                part[: mine.numel()] = mine.reshape(-1)
                all_parts = mine.new_empty(size * shard.padded)
                wholes.append(all_parts)
                parts.append(part)
                padded.append((whole, all_parts))
        came = self._line.gather_each(wholes, parts)

        def end() -> None:
            came()
            for whole, all_parts in padded:
                whole.data.copy_(all_parts[: whole.numel()].view(whole.shape))
            padded.clear()
            parts.clear()  # which had to stay until then
            group.comes = None

        group.comes = end

    def _free(self, group: _Group) -> None:
        if group.comes is not None:
            group.comes()
        group.gathered_for.clear()
        for shard in group.shards:
            shard.whole.untyped_storage().resize_(0)

    def _leave(self, group: _Group) -> None:
        """Leaves a gather that is under way, after an exception, to itself: others may never come to it."""
        if group.comes is not None:
            self._left_behind.append(group.comes)
            group.comes = None
            for shard in group.shards:  # the old memory is its, and may be written at any time
                shard.whole.data = torch.empty_like(shard.whole)

    def take_memory(self, name: str) -> None:
        self.weights[name].take_memory()

    def give_memory_back(self, name: str) -> None:
        self.weights[name].give_memory_back()

    # ---------------------------------------------------------------- gradients

    def start(self) -> None:
        self._earlier.set_aside(self.weights)
        for group in self._groups.values():
            for shard in group.shards:
                shard.whole.grad = None
                if not shard.whole.requires_grad:
                    refuse_unfrozen(shard.held)

    def sum_gradients(self, stage: int) -> None:
        """Sums a stage's gradients so far, adds this rank's part to those of the step. All ranks that share it."""
        for group in self._of(stage):
            self._sum(group)

    @torch.no_grad()
    def _sum(self, group: _Group) -> None:
        trained = [shard for shard in group.shards if shard.whole.requires_grad]
        if not trained:
            return
        if self._sums_end is not None:
            self._sums_end()
        size, like = self._line.size, trained[0].whole
        wholes = []
        for shard in trained:
            found, shard.whole.grad = shard.whole.grad, None
            if found is None or not shard.is_even(size):
                whole = like.new_zeros(size * shard.padded)
                if found is not None:
                    whole[: found.numel()] = found.reshape(-1)
            else:
                whole = found.reshape(-1)
            wholes.append(whole)
            del found
        mine = like.new_empty(sum(shard.padded for shard in trained))
        came = self._line.sum_each(list(mine.split([shard.padded for shard in trained])), wholes)

        def end() -> None:
            came()
            wholes.clear()
            group.sums = mine if group.sums is None else group.sums.add_(mine)
            self._sums_end = None

        self._sums_end = end
        if not self._hides_sums:
            end()

    def finish(self) -> None:
        if self._sums_end is not None:
            self._sums_end()
        self._left_behind.clear()  # behind which all of this step has come
        for group in self._groups.values():
            trained = [shard for shard in group.shards if shard.whole.requires_grad]
            if not trained:
                continue
            if group.sums is None or any(shard.whole.grad is not None for shard in trained):
                raise AssertionError("a pipeline sums the gradients of each of its stages")
            for shard, part in zip(trained, group.sums.split([s.padded for s in trained]), strict=True):
                held = shard.held
                gradient = part[: held.local.numel()].view(held.local.shape)
                self._earlier.add_to(gradient, name=held.name)
                held.parameter.grad = dtensor_like(held.parameter, gradient)

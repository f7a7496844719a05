"""Weights as one rank holds them: DTensors over its shards at rest, plain tensors for a pass, in memory passed in.

Every strategy holds its weights by `ShardedWeights`. The `Memory` that it passes in decides where shards, the tensors
of a pass and gradients lie, and does the gathering and freeing around a step.

[Note: param_dtype]
    Passes may compute with weights in another dtype than shards and gradients have: bfloat16 beside float32 masters.
    Then a leaf is a copy of its shard in that dtype, written once a step, and autograd converts its gradients to the
    shard's dtype before it adds them (`Tensor.grad_dtype`): sums over micro-batches and ranks lose nothing. Slices that
    visit are converted by their ring, which has no leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from rotorch._torch_private import as_parameter, copy_each
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.spec import Cut, Range, Unit, UnitKind, Weight
from rotorch.shard.in_chunks import fill_part
from rotorch.shard.sharded_weight import (
    Chunk,
    ShardedWeight,
    cut_chunks,
    dtensor_at_rest,
    is_cut_evenly,
    update_leaves,
)
from rotorch.shard.sites import Site


@dataclass(frozen=True)
class ShardPlacement:
    """The cut of a weight: the part of it that is this rank's shard.

    A part may be any box of a weight, or several: a slice, a block of a grid, some rows, the whole.

    Attributes:
        weight: the whole weight.
        chunks: positions of the shard's parts in the whole.
        shape: of the shard.
        placements: of the DTensor at rest, one per axis of the mesh. Uneven and fused cuts are Shard in name only.
        num_holders: number of ranks of the mesh that hold the same shard.
        holder: this rank's number among them.
        by_rows: rows as torch.chunk cuts them, so that the DTensor is what it says.
    """

    weight: Weight
    chunks: tuple[Chunk, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    num_holders: int = 1
    holder: int = 0
    by_rows: bool = False

    @staticmethod
    def whole(weight: Weight, *, mesh: DeviceMesh) -> ShardPlacement:
        """All of a weight, on every rank of a one-axis mesh."""
        chunks, holders = cut_chunks(weight, num_slices=1, index=0), mesh.size()
        return ShardPlacement(weight, chunks, weight.shape, (Replicate(),), holders, mesh.get_local_rank())

    @staticmethod
    def slice_of(weight: Weight, *, mesh: DeviceMesh) -> ShardPlacement:
        """This rank's slice of a weight that is cut over a one-axis mesh."""
        n, position = mesh.size(), mesh.get_local_rank()
        if weight.cut is None:
            raise AssertionError(f"{weight.name} is not cut")
        shape = weight.slice_shape(num_slices=n, index=position)
        chunks = cut_chunks(weight, num_slices=n, index=position)
        return ShardPlacement(weight, chunks, shape, (Shard(weight.cut.dim),))

    @staticmethod
    def rows_of(weight: Weight, *, mesh: DeviceMesh) -> ShardPlacement:
        """This rank's rows of a weight, on a one-axis mesh, as torch.chunk cuts them: the last ranks have fewer."""
        rows, inner = rows_of_chunk(weight.shape[0], size=mesh.size(), position=mesh.get_local_rank()), weight.shape[1:]
        shape = (rows.length, *inner)
        chunks = (Chunk((rows.start, *[0] * len(inner)), shape),) if rows.length else ()
        return ShardPlacement(weight, chunks, shape, (Shard(0),), by_rows=True)

    @staticmethod
    def of_units(units: Sequence[Unit], *, mesh: DeviceMesh) -> list[ShardPlacement]:
        """This rank's slice of each weight of some units; replicated weights whole."""
        return [
            (ShardPlacement.whole if unit.kind is UnitKind.REPLICATED else ShardPlacement.slice_of)(weight, mesh=mesh)
            for unit in units
            for weight in unit.weights
        ]

    @staticmethod
    def slices_of_slices(units: Sequence[Unit], *, parts: Sequence[Unit], mesh: DeviceMesh) -> list[ShardPlacement]:
        """This rank's slice of each part of some units, which the inner axis of a mesh of two has cut before the outer.

        Args:
            units: whole.
            parts: of these, at this rank's place on the inner axis; replicated weights are whole.
            mesh: of two axes.
        """
        (num_outer, num_inner), (outer, inner) = mesh.mesh.shape, mesh.get_coordinate() or (0, 0)
        found = []
        for unit, part in zip(units, parts, strict=True):
            for weight, held in zip(unit.weights, part.weights, strict=True):
                if unit.kind is UnitKind.REPLICATED or weight.cut is None:
                    alike, holder = (Replicate(), Replicate()), outer * num_inner + inner
                    chunks = cut_chunks(weight, num_slices=1, index=0)
                    found.append(ShardPlacement(weight, chunks, weight.shape, alike, mesh.size(), holder))
                    continue
                whole = cut_chunks(weight, num_slices=num_inner, index=inner)
                chunks = _within(whole, cut_chunks(held, num_slices=num_outer, index=outer) if held.numel else ())
                shape, shard = held.slice_shape(num_slices=num_outer, index=outer), Shard(weight.cut.dim)
                found.append(ShardPlacement(weight, chunks, shape, (shard, shard)))
        return found

    @staticmethod
    def on_axis_groups(
        weight: Weight,
        *,
        chunks: tuple[Chunk, ...],
        shape: tuple[int, ...],
        mesh: DeviceMesh,
        cuts: Sequence[tuple[AxisGroup, Cut | None]],
    ) -> ShardPlacement:
        """A block of a weight that is cut along several axes.

        Args:
            weight: the whole weight.
            chunks: positions of the block's parts in the whole.
            shape: of the block.
            mesh: of the DTensor at rest.
            cuts: this rank's axis groups, each with the weight's cut over it; None: its ranks hold the same.
        """
        num_holders, holder = 1, 0
        for axis_group, cut in cuts:
            if cut is None:
                holder, num_holders = holder * axis_group.size + axis_group.position, num_holders * axis_group.size
        return ShardPlacement(weight, chunks, shape, placed(cuts, mesh=mesh), num_holders, holder)

    def rows_of_it(self, rows: Range) -> ShardPlacement:
        """Some rows of this part, for one of several ranks that share it."""
        return replace(self, chunks=_chunks_of(self.chunks, rows), shape=(rows.length, *self.shape[1:]))

    def on_axis_around(self, placement: Placement) -> ShardPlacement:
        """The same on a mesh with one more axis around, along which ranks have other parts."""
        return replace(self, placements=(placement, *self.placements))

    @property
    def is_whole(self) -> bool:
        """True if the shard is all of the weight."""
        return self.shape == self.weight.shape and len(self.chunks) == 1


def placed(cuts: Sequence[tuple[AxisGroup, Cut | None]], *, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a weight on the axes of a mesh, over some of which it is cut (see `on_axis_groups`)."""
    dims = {axis_group.axis: cut.dim for axis_group, cut in cuts if cut is not None}
    return tuple(Shard(dims[axis]) if axis in dims else Replicate() for axis in mesh.mesh_dim_names or ())


def rows_of_chunk(rows: int, *, size: int, position: int) -> Range:
    """The rows that torch.chunk gives to the rank at `position` of `size`: the last ranks have fewer, or none."""
    each = -(-rows // size)
    first = min(position * each, rows)
    return Range(first, min(each, rows - first))


def _chunks_of(chunks: Sequence[Chunk], rows: Range) -> tuple[Chunk, ...]:
    """The chunks of a local tensor, restricted to `rows` of it."""
    found = []
    for chunk in chunks:
        first = chunk.local_start if chunk.dim == 0 else 0
        start, stop = max(rows.start, first), min(rows.stop, first + chunk.sizes[0])
        if start < stop:
            offsets = (chunk.offsets[0] + start - first, *chunk.offsets[1:])
            local_start = start - rows.start if chunk.dim == 0 else chunk.local_start
            found.append(Chunk(offsets, (stop - start, *chunk.sizes[1:]), chunk.dim, local_start))
    return tuple(found)


def _within(parts: Sequence[Chunk], chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The places in a whole weight of `chunks` of a local tensor, which has `parts` of it."""
    found = []
    for chunk in chunks:
        dim, start = chunk.dim, chunk.offsets[chunk.dim]
        # A chunk lies in one block of a cut, as a part does.
        part = next(p for p in parts if p.local_start <= start < p.local_start + p.sizes[dim])
        offsets = list(chunk.offsets)
        offsets[dim] = part.offsets[dim] + start - part.local_start
        found.append(replace(chunk, offsets=tuple(offsets)))
    return tuple(found)


class Memory:
    """Allocator of shards, tensors of a pass and gradients. This one: each by itself; a pass computes with shards.

    Args:
        gradients_stay: all gradients lie in the same memory in every step, not only those that `reduce` sums.
    """

    fills_leaves: ClassVar[bool] = False
    """True if it writes the values of leaves itself, in their dtype; else those of another dtype come once a step."""

    def __init__(self, *, gradients_stay: bool = False) -> None:
        self._gradients_stay = gradients_stay

    def shard(self, placement: ShardPlacement) -> Tensor | None:
        """Memory for a shard; None: it gets a tensor of its own."""
        return None

    def has_values(self, name: str) -> bool:
        """True if the memory of a shard has its values already; else they are copied from the module, if it has any."""
        return False

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter | None:
        """The plain parameter that a pass computes with; None: the strategy puts something else into the module."""
        return make_leaf(held.local, of=held)

    def gradient_stays(self, name: str) -> bool:
        """True if a gradient lies in the same memory in every step."""
        return self._gradients_stay

    def adds_in_place(self, name: str) -> bool:
        """True if a step adds to an earlier gradient in place, which is then not set aside."""
        return False

    def gradient_goes(self, name: str) -> bool:
        """True if a step that finds a gradient cleared gives its memory up, where it has stayed until then."""
        return False

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Prepares a step: leaves have values and no gradients."""
        for held in weights.values():
            if held.leaf is not None:
                held.leaf.grad = None

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        """Names of trained weights to which no backward of this rank's step has given a gradient; before `complete`."""
        return [
            name
            for name, held in weights.items()
            if held.leaf is not None and held.leaf.grad is None and held.parameter.requires_grad
        ]

    def gradient(self, held: ShardedWeight) -> Tensor | None:
        """The gradient of a shard that passes have left, behind the last backward; None if they have left none."""
        return None if held.leaf is None else held.leaf.grad

    def put_gradient(self, held: ShardedWeight, gradient: Tensor) -> None:
        """Puts another one in its place."""
        assert held.leaf is not None
        held.leaf.grad = gradient

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """Gradients of shards by name after the last backward, summed over the shard's holders; not of all weights.

        A weight that no pass has used has none, unless the subclass says that it counts as zeros.
        """
        leaves = ((name, held.leaf) for name, held in weights.items() if held.leaf is not None)
        return {name: leaf.grad.detach() for name, leaf in leaves if leaf.grad is not None}

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Frees, after a pass, memory that no rank needs at rest."""
        return None

    def break_off(self, weights: Mapping[str, ShardedWeight], error: BaseException) -> None:
        """Does the same after an exception in a pass; gradients become those before the step."""
        for held in weights.values():
            held.put_back()
        self.end(weights)

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        """All of this rank's gradients after a step, in as few tensors as possible."""
        return [grad for held in weights.values() if (grad := held.local_grad) is not None]


def make_leaf(values: Tensor, *, of: ShardedWeight) -> nn.Parameter:
    """A plain parameter over `values`, whose gradients have the dtype of the shard (see [Note: param_dtype])."""
    leaf = nn.Parameter(values, requires_grad=of.parameter.requires_grad)
    if leaf.requires_grad and leaf.dtype != of.local.dtype:
        leaf.grad_dtype = of.local.dtype
    return leaf


def dtype_of_leaf(held: ShardedWeight, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which passes compute with a weight: that of its shard, unless it has fractions to round."""
    return held.local.dtype if param_dtype is None or not held.local.is_floating_point() else param_dtype


class ShardedWeights:
    """One rank's shards of some weights.

    Args:
        placements: the part of each weight that is this rank's.
        sites: by name, where the module uses each weight; values are taken over from parameters that have any.
        mesh: of the DTensors at rest.
        device: where to hold them.
        memory: allocates shards; by default each has memory of its own.
        param_dtype: of the leaves, if it is another one than that of the shards (see [Note: param_dtype]).

    Attributes:
        held: by name.
        leaves: the plain parameters that passes compute with, by name.
        memory: where shards, tensors of a pass and gradients lie.
    """

    def __init__(
        self,
        placements: Sequence[ShardPlacement],
        *,
        sites: Mapping[str, tuple[Site, ...]],
        mesh: DeviceMesh,
        device: torch.device,
        memory: Memory | None = None,
        param_dtype: torch.dtype | None = None,
    ) -> None:
        self._mesh = mesh
        self.memory = Memory() if memory is None else memory
        self._sums: dict[tuple[torch.dtype, tuple[str, ...]], Tensor] = {}
        self.held: dict[str, ShardedWeight] = {}
        for placement in placements:
            found = sites[placement.weight.name]
            source = found[0].get()
            assert source is not None
            given, shape = self.memory.shard(placement), placement.weight.shape
            local = self._filled(placement, source, given=given, device=device)
            as_torch_cuts = placement.by_rows or (
                len(placement.chunks) <= 1
                and is_cut_evenly(local, shape=shape, mesh=mesh, placements=placement.placements)
            )
            at_rest = dtensor_at_rest(
                local,
                shape=shape,
                mesh=mesh,
                placements=placement.placements,
                chunks=None if as_torch_cuts else placement.chunks,
            )
            held = ShardedWeight(
                placement.weight,
                local,
                placement.chunks,
                as_parameter(at_rest, requires_grad=source.requires_grad),
                num_holders=placement.num_holders,
                holder=placement.holder,
                sites=found,
                owns_storage=local.untyped_storage().nbytes() == local.nbytes and given is None,
            )
            leaf, dtype = self.memory.leaf(placement, held), dtype_of_leaf(held, param_dtype)
            if leaf is not None and leaf.dtype != dtype:
                leaf, held.leaf_is_copy = make_leaf(torch.empty_like(leaf, dtype=dtype), of=held), True
            held.leaf = leaf
            held.in_pass = held.parameter if held.leaf is None else held.leaf
            held.gradient_stays = self.memory.gradient_stays(held.name)
            held.adds_in_place = self.memory.adds_in_place(held.name)
            held.gradient_goes = self.memory.gradient_goes(held.name)
            held.reshard()
            self.held[held.name] = held
        self.leaves = {name: held.leaf for name, held in self.held.items() if held.leaf is not None}
        self._frozen = [held for held in self.held.values() if not held.parameter.requires_grad]

    def _filled(
        self, placement: ShardPlacement, source: Tensor, *, given: Tensor | None, device: torch.device
    ) -> Tensor:
        """Makes a shard, in the given memory or its own, with the values of the module's parameter if it has any."""
        # The module's own tensor serves: a copy would take the model's memory twice for a moment.
        if given is None and not source.is_meta and placement.is_whole:
            return source.detach().to(device)
        local = torch.empty(placement.shape, dtype=source.dtype, device=device) if given is None else given
        if not source.is_meta and not self.memory.has_values(placement.weight.name):
            fill_part(local, placement.chunks, source.detach())
        return local

    def replace(self, name: str, tensor: Tensor | None) -> None:
        """Replaces a weight in all later passes: by a proxy, or by nothing."""
        self.held[name].in_pass = tensor

    def withhold(self, units: Iterable[Unit]) -> None:
        """Hides biases from all later passes that are added once, after the sum over a unit's slices."""
        for name in {name for unit in units for name in unit.added_once}:
            self.replace(name, None)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gives the module the tensors of a pass inside the block, and its DTensors after it, also after an exception.

        A step that broke off leaves the gradients that were there before it.
        """
        try:
            for held in self.held.values():
                held.unshard()
            yield
        except BaseException as error:
            self.memory.break_off(self.held, error)
            raise
        else:
            self.memory.end(self.held)
        finally:
            for held in self.held.values():
                held.reshard()

    def start(self) -> None:
        """Begins a step: sets gradients that the user has not cleared aside, to add them at the end.

        Raises:
            ConfigError: a weight that was frozen requires a gradient now.
        """
        for held in self._frozen:
            held.refuse_unfrozen()
        learns = torch.is_grad_enabled()
        for held in self.held.values():
            if learns or held.gradient_goes:
                held.protect_gradient()
            if not held.adds_in_place:
                held.set_aside()
        self.memory.start(self.held)
        if not self.memory.fills_leaves:
            update_leaves(self.held.values())

    def reduce(self, names: Iterable[str] | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """Sums the passes' gradients over an axis, one message per dtype. All ranks of the axis.

        A weight that this rank's passes did not use counts as zeros, since others may have used it. If none has, its
        gradient is zeros here, which the parallel model takes away (see `hold/unused_weights.py`).

        Args:
            names: of the weights; None: all.
            mesh: of the ranks; None: that of the DTensors at rest.
        """
        mesh = self._mesh if mesh is None else mesh
        if mesh.size() == 1:
            return
        for flat in self.side_by_side(self.leaves if names is None else names):
            all_reduce_sum(flat, mesh=mesh)

    def add_earlier(self, names: Iterable[str]) -> None:
        """Adds gradients of earlier steps to those of some weights now, before a sum that is to contain both."""
        for held in (self.held[name] for name in names):
            if held.earlier is None:
                continue
            gradient = self.memory.gradient(held)
            if gradient is None:
                self.memory.put_gradient(held, held.earlier)
            else:
                gradient.add_(held.earlier)
            held.earlier = None

    def side_by_side(self, names: Iterable[str], *, anew: bool = False) -> Iterator[Tensor]:
        """Puts the passes' gradients of some weights side by side; yields them, a tensor for each dtype.

        They are the weights' gradients from then on. One that no pass has used counts as zeros.

        Args:
            names: of the weights.
            anew: not where those of the step before are.
        """
        names = [n for n in names if self.leaves[n].requires_grad]
        # Sorted: a set's order differs between processes, and all ranks must sum the same dtype at once.
        for dtype in sorted({self.held[n].local.dtype for n in names}, key=str):
            alike = [self.held[n] for n in names if self.held[n].local.dtype == dtype]
            numels = [held.local.numel() for held in alike]
            key = dtype, tuple(names)
            if anew or key not in self._sums:  # kept, so that gradients stay in one place from step to step
                self._sums[key] = torch.empty(sum(numels), dtype=dtype, device=alike[0].local.device)
            flat = self._sums[key]
            parts = [part.view_as(held.local) for held, part in zip(alike, flat.split(numels), strict=True)]
            gradients = [self.memory.gradient(held) for held in alike]
            there = [(part, each) for part, each in zip(parts, gradients, strict=True) if each is not None]
            copy_each([part for part, _ in there], [each for _, each in there])
            for held, part, gradient in zip(alike, parts, gradients, strict=True):
                if gradient is None:
                    part.zero_()
                # The gradient itself lies there, so a sum needs no copy back.
                self.memory.put_gradient(held, part)
                held.gradient_stays = True
            yield flat

    def gradients_move(self) -> None:
        """Takes note that gradients lie elsewhere from now on, where they stay; frees what `side_by_side` keeps."""
        self._sums.clear()
        for held in self.held.values():
            held.gradient_moves()

    def unused(self) -> list[str]:
        """Names of trained weights that no backward of this rank's step has reached; before `reduce` and `finish`."""
        return self.memory.unused(self.held)

    def unused_count_as_zero(self, names: Iterable[str] | None = None) -> None:
        """Gives weights that no pass of this step used a gradient of zeros: a sum over replicas needs one of each.

        On all ranks alike, so that the same tensors are summed everywhere.

        Args:
            names: of the weights; None: all.
        """
        for name in self.leaves if names is None else names:
            held, leaf = self.held[name], self.leaves[name]
            if leaf.requires_grad and self.memory.gradient(held) is None:
                self.memory.put_gradient(held, torch.zeros_like(held.local))

    def finish(self) -> None:
        """Completes gradients after the last backward and attaches them to the DTensors."""
        for name, gradient in self.memory.complete(self.held).items():
            if self.held[name].parameter.requires_grad:  # not frozen after parallelize
                self.held[name].attach(gradient)
        for held in self.held.values():
            held.earlier = None

    def gradients(self) -> list[Tensor]:
        """This rank's gradients after `finish`, as few plain tensors as possible."""
        return self.memory.flat_gradients(self.held)

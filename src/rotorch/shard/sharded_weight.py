"""One rank's part of each weight: plain local tensors, their place in the whole weight, and the DTensor at rest.

Code that must work under any strategy reads this: optimizers and clipping (through the DTensor), checkpoints and
loading (through the chunks), verification (both).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rotorch._torch_private import copy_each, wrapper_tensor
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Range, Weight
from rotorch.shard.in_chunks import Box, CutInName, PartOfState, SavedInChunks, fill_part, own_copy
from rotorch.shard.sites import Site
from rotorch.shard.storages import allocate, free


@dataclass(frozen=True)
class Chunk:
    """A box of a whole weight.

    Its start and size in each dim, and the local position of its first element along the cut dim.

    Attributes:
        offsets: start in the whole weight, one per dim.
        sizes: lengths, one per dim.
        dim: the dim along which a rank's chunks lie side by side in its local tensor.
        local_start: start of this chunk along `dim` in the local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    local_start: int = 0

    def of_local(self, local: Tensor) -> Tensor:
        """Returns the view of `local` (this rank's part of the weight) that this chunk describes."""
        if not self.sizes:
            return local
        return local.narrow(self.dim, self.local_start, self.sizes[self.dim])

    def of_whole(self, whole: Tensor) -> Tensor:
        """Returns the view of the whole weight that this chunk describes."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


def cut_chunks(weight: Weight, *, num_slices: int, index: int, count: int = 1) -> tuple[Chunk, ...]:
    """Returns the chunks of `count` slices from `index` on: one per block of the weight's cut, none if empty."""
    if weight.cut is None:
        return (Chunk((0,) * len(weight.shape), weight.shape),)
    dim, chunks, local_start = weight.cut.dim, [], 0
    for part in weight.cut.ranges(weight.shape[dim], num_slices=num_slices, index=index, count=count):
        if part.length:
            offsets = tuple(part.start if d == dim else 0 for d in range(len(weight.shape)))
            sizes = tuple(part.length if d == dim else s for d, s in enumerate(weight.shape))
            chunks.append(Chunk(offsets, sizes, dim, local_start))
            local_start += part.length
    return tuple(chunks)


def box_chunks(boxes: Sequence[Sequence[Range]]) -> tuple[Chunk, ...]:
    """Returns the chunks of a part with `boxes[dim]` of a weight: one range per dim, of at most one dim several."""
    several = [dim for dim, ranges in enumerate(boxes) if len(ranges) > 1]
    if len(several) > 1:
        raise AssertionError(f"a weight is fused along the dims {several}")
    along = several[0] if several else 0
    chunks, local_start = [], 0
    for part in boxes[along] if boxes else ():
        ranges = [part if dim == along else other[0] for dim, other in enumerate(boxes)]
        if all(r.length for r in ranges):
            chunks.append(Chunk(tuple(r.start for r in ranges), tuple(r.length for r in ranges), along, local_start))
        local_start += part.length
    return tuple(chunks) if boxes else (Chunk((), ()),)


def dtensor_at_rest(
    local: Tensor,
    *,
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    chunks: Sequence[Box] | None = None,
) -> DTensor:
    """A DTensor of `shape` over `local`, this rank's part of it; sends nothing.

    Args:
        local: this rank's part.
        shape: of the whole.
        mesh: of the ranks.
        placements: one per axis of the mesh.
        chunks: positions of the part in the whole, if they are not torch.chunk's: then the DTensor is cut in name only,
            and says so where that matters.
    """
    if all(isinstance(placement, Replicate) for placement in placements):
        return DTensor.from_local(local, mesh, placements, run_check=False)
    whole = torch.Size(shape)
    stride = torch.empty(whole, device="meta").stride()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole, stride=stride)
    return made if chunks is None else CutInName.of(made, chunks)


def is_cut_evenly(local: Tensor, *, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """True if a part sits where torch.chunk would put it, as far as shapes say; all ranks come to the same.

    Dims that no equal parts make up count as uneven, and so do dims that several axes cut.
    """
    over = [
        (p.dim, mesh.size(axis)) for axis, p in enumerate(placements) if isinstance(p, Shard) and mesh.size(axis) > 1
    ]
    dims = [dim for dim, _ in over]
    if len(set(dims)) < len(dims):
        return False
    return all(shape[dim] == size * local.shape[dim] for dim, size in over)


def dtensor_like(parameter: nn.Parameter, local: Tensor) -> DTensor:
    """A DTensor over `local` with the shape, mesh and placements of a parameter at rest: its gradient."""
    like: Tensor = parameter  # not its `data`, which detaches: an operation of DTensor, for each weight in each step
    assert isinstance(like, DTensor)
    chunks = like.chunks if isinstance(like, CutInName) else None
    return dtensor_at_rest(local, shape=like.shape, mesh=like.device_mesh, placements=like.placements, chunks=chunks)


class LocalParameter(nn.Parameter):
    """This rank's part of a weight as a plain parameter, for optimizers whose update is local.

    It shares memory with the DTensor at rest, and its `grad` is the DTensor's: both are set and cleared together. A
    fused step on plain tensors takes a fraction of the time of one on DTensors, whose lists torch unpacks one by one.
    """

    _of: ShardedWeight

    @staticmethod
    def __new__(cls, held: ShardedWeight) -> LocalParameter:
        """Makes the plain parameter of `held`."""
        self: LocalParameter = super().__new__(cls, held.local, held.parameter.requires_grad)
        self._of = held
        return self

    def __init__(self, held: ShardedWeight) -> None:
        """See `__new__`."""

    @property  # type: ignore[override]
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, or None."""
        return self._of.local_grad

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise TypeError("the gradient of a LocalParameter is that of the DTensor: write into it, or set None")
        self._of.parameter.grad = None


def _always() -> bool:
    return True


_OWN_REFERENCES = 3
"""References to an attached gradient that nobody else keeps: the weight's, a variable's and `sys.getrefcount`'s own."""


@dataclass
class ShardedWeight:
    """One weight as this rank holds it, at rest and during a pass.

    Attributes:
        weight: its description: name, whole shape, aliases.
        local: this rank's part, a plain tensor sharing memory with `parameter` (may be empty).
        chunks: positions of the parts of `local` in the whole weight.
        parameter: the DTensor that the module holds at rest; `.grad` is complete after `forward_backward`.
        num_holders: number of ranks of the model's mesh that hold these same chunks (1: this one alone).
        holder: this rank's number among them, 0-based.
        sites: places in the module that use it; none if other code puts tensors there.
        in_pass: the tensor that the module has there during a pass; None: nothing (a bias that is added elsewhere).
        leaf: the plain parameter that a pass computes with and leaves a gradient in, if there is one.
        leaf_is_copy: it is a copy of the shard, in the dtype of passes, that stays from step to step.
        earlier: a copy of the gradient of earlier steps, which the user had not cleared. It is added to the step's own,
            or put back if the step breaks off.
        owns_storage: True if `local` alone lies in its storage.
        gradient_stays: True if a gradient lies in the same memory in every step, so that the DTensor over it is kept.
        adds_in_place: True if a step adds to an earlier gradient in place, which is then not set aside.
        gradient_goes: True if it does so only until a step finds it cleared, which then gives its memory up.
        mesh: of all ranks of the model; None until the model is complete.
        is_summed: says whether its gradient is that of all ranks, and not of this replica alone (`hold/put_off.py`).
        meet_for_state: called by all ranks of the model before each keeps its part of an optimizer's whole state.
    """

    weight: Weight
    local: Tensor
    chunks: tuple[Chunk, ...]
    parameter: nn.Parameter
    num_holders: int = 1
    holder: int = 0
    sites: tuple[Site, ...] = ()
    in_pass: Tensor | None = None
    leaf: nn.Parameter | None = None
    leaf_is_copy: bool = False
    earlier: Tensor | None = None
    owns_storage: bool = False
    gradient_stays: bool = False
    adds_in_place: bool = False
    gradient_goes: bool = False
    mesh: DeviceMesh | None = None
    is_summed: Callable[[], bool] = _always
    meet_for_state: Callable[[], object] = _always
    _attached: tuple[int, DTensor] | None = None
    """A gradient that stays where it is from step to step: its address, and the DTensor over it."""

    @property
    def name(self) -> str:
        return self.weight.name

    @cached_property
    def local_parameter(self) -> LocalParameter:
        """`parameter` for optimizers that work on plain tensors; the same object each time."""
        return LocalParameter(self)

    @property
    def local_grad(self) -> Tensor | None:
        """This rank's part of the gradient as a plain tensor, or None."""
        grad = self.parameter.grad
        if not isinstance(grad, DTensor):
            return grad
        if torch.is_grad_enabled():  # then torch makes it an operation of a graph, which takes several times as long
            with torch.no_grad():
                return grad.to_local()
        return grad.to_local()

    def part_of(self, whole: Tensor) -> DTensor:
        """This rank's part of another whole tensor, cut like the weight at rest, in that tensor's dtype."""
        local = torch.empty_like(self.local, dtype=whole.dtype)
        return dtensor_like(self.parameter, fill_part(local, self.chunks, whole))

    def belong_to(self, mesh: DeviceMesh, *, meet_for_state: Callable[[], object]) -> None:
        """Makes `weight_of` find this weight and its ranks by the parameter; called once the model is complete."""
        self.mesh, self.meet_for_state = mesh, meet_for_state
        way = WayBack(self)
        self.parameter.of_weight = way  # type: ignore[attr-defined]
        # torch copies the memory of a DTensor whose part begins within a larger tensor; it has none.
        self.parameter.__deepcopy__ = way.copy  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- tensors in the module

    @property
    def copies(self) -> list[Tensor]:
        """The copy of the shard that passes compute with, if there is one."""
        return [self.leaf] if self.leaf is not None and self.leaf_is_copy else []

    def unshard(self) -> None:
        """Puts the tensor of a pass into the module."""
        for site in self.sites:
            site.put(self.in_pass)

    def reshard(self) -> None:
        """Puts the DTensor back into the module."""
        for site in self.sites:
            site.put(self.parameter)

    # ---------------------------------------------------------------- gradients

    def refuse_unfrozen(self) -> None:
        """Raises `ConfigError` if the weight was frozen when the model was parallelized and requires a gradient now."""
        if self.parameter.requires_grad:
            raise ConfigError(
                f"{self.name!r} was frozen when the model was parallelized, and has requires_grad=True now: it would "
                "get no gradient. Unfreeze weights before parallelize"
            )

    def is_attached(self, gradient: Tensor | None) -> bool:
        """True if this is the DTensor over memory that steps write their gradients into."""
        return self._attached is not None and gradient is self._attached[1]

    def gradient_moves(self) -> None:
        """Takes note that steps write their gradients into other memory from now on, where they stay."""
        self._attached, self.gradient_stays = None, True

    def protect_gradient(self) -> None:
        """Copies, before a step, a gradient in the memory of steps which this step must not change; the tensor stays.

        It is that of a weight that has been frozen, or one that the user has cleared and refers to elsewhere: autograd
        gives the next backward new memory.
        """
        if self._attached is None:
            return
        gradient = self._attached[1]
        attached = self.is_attached(self.parameter.grad)
        keep = not self.parameter.requires_grad if attached else sys.getrefcount(gradient) > _OWN_REFERENCES
        if keep:
            gradient._local_tensor = gradient._local_tensor.clone()
            self._attached = None
        elif not attached and self.gradient_goes:
            self._attached = None

    def set_aside(self) -> bool:
        """Copies an earlier gradient before a step; returns True if there is one. Evaluations leave it alone."""
        there = torch.is_grad_enabled() and self.parameter.grad is not None
        self.earlier = self.local_grad.clone() if there else None  # type: ignore[union-attr]
        return there

    def attach(self, gradient: Tensor) -> None:
        """Makes a step's plain gradient of this rank's part, plus an earlier one, the DTensor's gradient."""
        if self.earlier is not None:
            gradient.add_(self.earlier)
            self.earlier = None
        if not self.gradient_stays:
            self.parameter.grad = dtensor_like(self.parameter, gradient)
            return
        if self._attached is None or self._attached[0] != gradient.data_ptr():
            self._attached = gradient.data_ptr(), dtensor_like(self.parameter, gradient)
        self.parameter.grad = self._attached[1]

    def attach_again(self, values: Tensor) -> None:
        """Makes the DTensor that was attached before the weight's gradient once more, with these values."""
        if self._attached is None:  # somebody else keeps it
            self.parameter.grad = dtensor_like(self.parameter, values)
            return
        self.parameter.grad = self._attached[1]
        self._attached[1]._local_tensor.copy_(values)

    def put_back(self) -> None:
        """After a step that broke off: writes the copy back where it came from, in which the step may have added."""
        if self.earlier is not None and (grad := self.local_grad) is not None:
            grad.copy_(self.earlier)
        self.earlier = None

    # ---------------------------------------------------------------- memory

    def allocate(self) -> None:
        """Gives `local` and its copy their memory back after `free`; not their values."""
        for tensor in self._own_tensors():
            allocate(tensor)

    def free(self) -> None:
        """Frees the memory of `local`, unless it has other tensors, and of its copy; their values are lost."""
        for tensor in self._own_tensors():
            free(tensor)

    def _own_tensors(self) -> list[Tensor]:
        return [self.local, *self.copies] if self.owns_storage else self.copies


def update_leaves(weights: Iterable[ShardedWeight]) -> None:
    """Writes the values of shards into those of their leaves that are copies in another dtype."""
    # .data: graphs of an earlier call may still refer to the same values.
    copies = [(w.leaf.data, w.local) for w in weights if w.leaf is not None and w.leaf.dtype != w.local.dtype]
    copy_each([leaf for leaf, _ in copies], [values for _, values in copies])


class EarlierGradient:
    """A weight's gradient of earlier steps, taken away while code around a whole step must see that step's alone.

    The step inside sets aside what it finds (`ShardedWeight.set_aside`), and several of these may enclose each other,
    so each has a copy of its own. Made before the step.
    """

    def __init__(self, held: ShardedWeight) -> None:
        gradient = held.local_grad
        assert gradient is not None, "made for a weight that has a gradient"
        self._held, self._values = held, gradient.clone()
        # Referred to once: one more reference would look like the user's (`protect_gradient`), or keep its memory.
        self._gradient = held.parameter.grad
        if held.gradient_goes or held.is_attached(self._gradient):
            self._gradient = None
        held.parameter.grad = None

    @torch.no_grad()
    def add_back(self) -> None:
        """Adds it to the step's own gradient; if the weight has none, it has the earlier one again."""
        own = self._held.local_grad
        if own is not None:
            own.add_(self._values)
            return
        # The same DTensor, in its old memory: flat buffers that clipping reads go on holding it.
        if self._gradient is None:
            self._held.attach_again(self._values)
            return
        self._held.parameter.grad = self._gradient
        self._held.local_grad.copy_(self._values)  # type: ignore[union-attr]


class WayBack:
    """The way from a parameter to its weight on this rank. Copies and pickles of a parameter have no such way."""

    def __init__(self, held: ShardedWeight | None = None) -> None:
        self.held = held

    def copy(self, memo: dict[int, Any]) -> Tensor:
        """The parameter's `__deepcopy__`: one of its own over a part of its own, without a way back."""
        assert self.held is not None
        return memo.setdefault(id(self.held.parameter), own_copy(self.held.parameter))

    def __reduce__(self) -> tuple[type[WayBack], tuple[()]]:
        return WayBack, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> WayBack:
        return WayBack()


def weight_of(parameter: Tensor) -> ShardedWeight | None:
    """The weight, as this rank holds it, of a parameter of a parallel model; None for other tensors."""
    if isinstance(parameter, LocalParameter):
        return parameter._of
    way = getattr(parameter, "of_weight", None)
    return way.held if isinstance(way, WayBack) else None


class ChunkedTensor(PartOfState, SavedInChunks):
    """A whole tensor of which this rank holds some chunks, in the form that `torch.distributed.checkpoint` knows.

    It is a tensor because torch asks only tensors; it has a shape and a dtype but takes part in no computation. Also
    wraps optimizer state shaped like its weight.

    Attributes:
        local: this rank's part, a plain tensor.
        chunks: positions of the parts of `local` in the whole.
    """

    local: Tensor
    chunks: tuple[Chunk, ...]

    @staticmethod
    def __new__(cls, local: Tensor, *, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> ChunkedTensor:
        """Makes the view of `local` as part of a tensor of `shape`."""
        self: ChunkedTensor = wrapper_tensor(cls, shape, like=local)
        self.local, self.chunks = local, chunks
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"A ChunkedTensor is for saving and loading; {func} needs the tensor itself: use .local")

    data_ptr = PartOfState.untyped_storage  # type: ignore[assignment]

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"ChunkedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, chunks={self.chunks})"

    def in_chunks(self) -> tuple[Tensor, Sequence[Chunk]]:
        return self.local, self.chunks

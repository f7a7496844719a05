"""Tensors of which a rank has some boxes of the whole: for torch's checkpoints, and as DTensors cut in name only.

[Note: cut in name only]
    A DTensor placement says where a rank's part sits only for cuts as torch.chunk makes them. Of uneven heads, fused
    halves and the stages of a pipeline torch would make a whole in the wrong order, or messages of lengths that do not
    fit, which end the process. Operations element by element are right all the same, and so are sums and norms over all
    elements: these pass. `full_tensor` and torch's checkpoints go by the chunks. The rest is refused by name, on every
    rank alike, before anything is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from rotorch._torch_private import as_dtensor_class, copies_its_own_cut, tree_flatten
from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError

_PASS = {
    "_to_copy",
    "alias",
    "all",
    "any",
    "clone",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "full_like",
    "linalg_vector_norm",
    "masked_fill",
    "masked_fill_",
    "max",
    "min",
    "norm",
    "normal_",
    "ones_like",
    "sum",
    "uniform_",
    "zero_",
    "zeros_like",
}
"""Operations that are right on parts of any cut, beside those element by element."""

_PASS_IN_LISTS = ("_amp_foreach_", "_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
_REDUCTIONS = {"all", "any", "linalg_vector_norm", "max", "min", "norm", "sum"}


class Box(Protocol):
    """A box of a whole tensor, and where it sits in a rank's own (`Chunk` in `shard/sharded_weight.py`)."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start in the whole, one per dim."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths, one per dim."""

    def of_local(self, local: Tensor) -> Tensor:
        """The view of a rank's tensor that it describes."""

    def of_whole(self, whole: Tensor) -> Tensor:
        """The view of the whole that it describes."""


class SavedInChunks(Tensor):
    """A tensor that implements torch's `_Checkpointable` protocol.

    So cuts which no DTensor placement describes (uneven heads, fused halves) are saved with their true offsets and
    load, in place, under any other layout.
    """

    def in_chunks(self) -> tuple[Tensor, Sequence[Box]]:
        """This rank's part, a plain tensor, and where its boxes sit in the whole."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        local, chunks = self.in_chunks()
        properties = TensorProperties.create_from_tensor(local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_stored(chunk), properties=properties, size=self.shape),
            )
            for number, chunk in enumerate(chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_stored(chunk) for chunk in self.in_chunks()[1]]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        local, chunks = self.in_chunks()
        for chunk in chunks:
            if index.offset is None or torch.Size(chunk.offsets) == index.offset:
                return chunk.of_local(local)
        raise KeyError(f"{index.fqn}: no chunk at offset {index.offset}")


def fill_part(local: Tensor, chunks: Sequence[Box], whole: Tensor) -> Tensor:
    """Writes this rank's boxes of a whole tensor into its part, in that one's dtype; returns the part."""
    for chunk in chunks:
        chunk.of_local(local).copy_(chunk.of_whole(whole))
    return local


def whole_of_parts(zeros: Tensor, chunks: Sequence[Box], local: Tensor, *, mesh: DeviceMesh) -> Tensor:
    """The whole, in place of `zeros`, on all ranks of the mesh, which call it; a rank without chunks adds nothing.

    Of ranks that have the same part one gives its chunks: so values are exact, not means of all.
    """
    for chunk in chunks:
        chunk.of_whole(zeros).copy_(chunk.of_local(local))
    return all_reduce_sum(zeros, mesh=mesh)


def _stored(chunk: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))


class CutInName(SavedInChunks, DTensor):
    """A DTensor over a part that torch's placements do not describe (see [Note: cut in name only]).

    Attributes:
        chunks: where this rank's boxes sit in the whole.
    """

    chunks: tuple[Box, ...]

    @classmethod
    def of(cls, dtensor: DTensor, chunks: Sequence[Box], *, local: Tensor | None = None) -> Self:
        """`dtensor` with its true places; over another part like its own if one is given."""
        made: Self = as_dtensor_class(cls, dtensor, local=local)
        made.chunks = tuple(chunks)
        return made

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """As of every tensor; but torch, before it copies its own cut of a whole tensor into this part, is told True.

        It then makes a DTensor of its own cut, which `load_state_dict` takes for what it is.
        """
        return copies_its_own_cut(sys._getframe(1)) or self.device.type == "meta"

    def in_chunks(self) -> tuple[Tensor, Sequence[Box]]:
        with torch.no_grad():
            return self.to_local(), self.chunks

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, on all ranks of the mesh, which call it.

        Args:
            grad_placements: of its gradient, one per axis of the mesh, as for torch's: by default it is taken to be the
                same on all ranks; over an axis with `Partial("sum")` or `Partial("avg")` it is the sum or the mean.

        Raises:
            ConfigError: a gradient that is cut, or another reduction.
        """
        wanted = [Replicate()] * self.device_mesh.ndim if grad_placements is None else list(grad_placements)
        if not all(each in (Replicate(), Partial("sum"), Partial("avg")) for each in wanted):
            raise ConfigError(
                f"full_tensor(grad_placements={wanted}) of a weight of shape {tuple(self.shape)}, which is cut "
                "unevenly: write Replicate(), Partial('sum') or Partial('avg') for each axis of the mesh"
            )
        whole: Tensor = _Whole.apply(self, wanted)
        return whole

    def _whole(self) -> Tensor:
        local, chunks = self.in_chunks()
        coordinate = self.device_mesh.get_coordinate() or []
        is_copy = any(at for at, placement in zip(coordinate, self.placements, strict=True) if placement.is_replicate())
        return whole_of_parts(local.new_zeros(self.shape), () if is_copy else chunks, local, mesh=self.device_mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor of its own over the same part, or a parameter; without a gradient."""
        return memo.setdefault(id(self), own_copy(self))

    def part_of(self, whole: Tensor) -> CutInName:
        """This rank's part of another whole tensor, cut alike, in this one's dtype; it has no gradient."""
        own, chunks = self.in_chunks()
        return CutInName.of(self, chunks, local=fill_part(torch.empty_like(own), chunks, whole))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_: Any,
    ) -> DTensor:
        """The whole tensor on all ranks of the mesh, which call it, if the whole is asked for; without gradients.

        Raises:
            ConfigError: other placements; torch would take the parts for those of torch.chunk.
        """
        mesh, wanted = device_mesh or self.device_mesh, list(placements or self.placements)
        if mesh != self.device_mesh or not all(isinstance(placement, Replicate) for placement in wanted):
            raise _refusal("redistribute", self)
        return _on_all_ranks(self._whole(), mesh)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.rpartition("::")[2], kwargs or {}
        if name == "new_empty" and tuple(args[1]) == tuple(args[0].shape):  # torch's asynchronous saves fill it
            own, chunks = args[0].in_chunks()
            return cls.of(args[0], chunks, local=torch.empty_like(own, device=kwargs.get("device")))
        if name in ("any", "all") and len(args) == 1 and not kwargs:  # torch gathers parts for them, as it cuts them
            return _any_or_all(name, args[0])
        args = _with_parts_of_wholes(args)
        groups = _computed_together(name, args, kwargs)
        for group in groups:
            cut = _first_cut(group)
            if cut is None:
                continue
            if not _is_local(func, name, args, kwargs):
                raise _refusal(name, cut)
            for tensor in group:
                if not _goes_with(tensor, cut):
                    raise _refusal(name, cut, other=tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            return args[0]
        if isinstance(result, list | tuple) and len(result) == len(groups):
            return type(result)(_as_cut(each, group) for each, group in zip(result, groups, strict=True))
        return _as_cut(result, groups[0])


class _Whole(torch.autograd.Function):
    """A whole tensor of its parts; backward each rank's part of the whole's gradient, as DTensor's `full_tensor`."""

    @staticmethod
    def forward(ctx: Any, cut: CutInName, grad_placements: Sequence[Placement]) -> Tensor:
        ctx.cut, ctx.grad_placements = cut.detach(), grad_placements
        return cut._whole()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[CutInName, None]:
        cut: CutInName = ctx.cut
        mesh, whole = cut.device_mesh, grads[0]
        for axis, placement in enumerate(ctx.grad_placements):
            if not isinstance(placement, Partial):
                continue
            along = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
            whole = all_reduce_sum(whole.clone(memory_format=torch.contiguous_format), mesh=along)
            if placement.reduce_op == "avg":
                whole.div_(along.size())
        return cut.part_of(whole), None


def own_copy(tensor: Tensor) -> Tensor:
    """A DTensor or a parameter of its own over the same part of a whole; without a gradient."""
    with torch.no_grad():
        made: Tensor = tensor.detach().clone()
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _any_or_all(name: str, cut: CutInName) -> DTensor:
    """One result for all ranks of the mesh, which call it: of `isfinite(gradient).all()` and the like."""
    own, _ = cut.in_chunks()
    found = own.any() if name == "any" else own.logical_not().any()
    anywhere = all_reduce_sum(found.to(torch.float32).reshape(1), mesh=cut.device_mesh)[0] > 0
    return _on_all_ranks(anywhere if name == "any" else ~anywhere, cut.device_mesh)


def _on_all_ranks(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of what all ranks of the mesh have alike; sends nothing."""
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def _with_parts_of_wholes(args: Any) -> Any:
    """Operands with this rank's part in place of a DTensor that all ranks have whole: gradients of a sum are such."""
    cut = _first_cut(args)
    if cut is None:
        return args

    def part(operand: Any) -> Any:
        is_alike = type(operand) is DTensor and (operand.shape, operand.dtype) == (cut.shape, cut.dtype)
        if is_alike and all(placement.is_replicate() for placement in operand.placements):
            return cut.part_of(operand.to_local())
        return operand

    return tuple(part(operand) for operand in args)


class PartOfState:
    """Refusals of a `state_dict()` entry that has a part of a tensor: it must not be taken for the whole."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConfigError(
            "state_dict() gives each rank's parts of weights, for torch.distributed.checkpoint. For torch.save "
            "write model.full_state_dict(), on all ranks: the first one gets whole tensors"
        )

    def untyped_storage(self) -> Any:
        """Raises: other libraries (safetensors) would take the memory of a part for that of the whole."""
        return self.__reduce_ex__(None)

    storage = untyped_storage

    def data_ptr(self) -> int:
        """0: a wrapper has no memory. Of a part that begins within a larger tensor torch would give its offset."""
        return 0


class StatePart(PartOfState, DTensor):
    """A weight in a `state_dict()` of which this rank has the part that torch would cut."""

    @classmethod
    def of(cls, dtensor: DTensor) -> Self:
        """The entry of a weight at rest."""
        made: Self = as_dtensor_class(cls, dtensor)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), own_copy(self))


class StatePartInName(PartOfState, CutInName):
    """A weight in a `state_dict()` of which this rank has another part."""


def _computed_together(name: str, args: Any, kwargs: Any) -> list[list[Tensor]]:
    """Tensors that an operation combines with each other: all, or those at the same place of its lists."""
    if not name.startswith(_PASS_IN_LISTS):
        return [[t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]]
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    return [list(group) for group in zip(*lists, strict=False)]


def _first_cut(tensors: Sequence[Tensor]) -> CutInName | None:
    return next((t for t in tensors if isinstance(t, CutInName)), None)


def _is_local(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """True if parts of results are results of parts."""
    if name in _REDUCTIONS:  # over all elements, not along dims
        num_tensors_and_orders = {"linalg_vector_norm": 2, "norm": 2}.get(name, 1)
        return len(args) <= num_tensors_and_orders and not kwargs.get("dim")
    return torch.Tag.pointwise in func.tags or name in _PASS or name.startswith(_PASS_IN_LISTS)


def _goes_with(tensor: Tensor, cut: CutInName) -> bool:
    """True if a tensor is cut alike, or has one element along the dims that are cut: each rank has its operand."""
    if isinstance(tensor, CutInName):
        return tensor.shape == cut.shape and tensor.chunks == cut.chunks
    if tensor.numel() == 1 and tensor.dim() <= 1:
        return True
    if not isinstance(tensor, DTensor):
        return False
    dims = {placement.dim - cut.dim() for placement in cut.placements if isinstance(placement, Shard)}
    return all(-dim > tensor.dim() or tensor.shape[dim] == 1 for dim in dims)


def _as_cut(result: Any, tensors: Sequence[Tensor]) -> Any:
    cut = _first_cut(tensors)
    if cut is None or not isinstance(result, DTensor):
        return result
    is_like = result.shape == cut.shape and result.placements == cut.placements
    return type(cut).of(result, cut.chunks) if is_like else result


def _refusal(name: str, tensor: CutInName, *, other: Tensor | None = None) -> ConfigError:
    what = "" if other is None else f" with a {type(other).__name__} of shape {list(other.shape)}"
    return ConfigError(
        f"{name} on a weight of shape {list(tensor.shape)}{what}: its parts are uneven or fused, and torch would put "
        "them together wrongly. Write rotorch.optim.Muon or Adafactor, rotorch.optim.WholeMatrices for another "
        "optimizer that needs whole matrices, or `.full_tensor()`"
    )

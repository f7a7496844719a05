"""Blocks of which every layer of a grid holds a part at rest: ZeRO over the depth of a grid (arXiv 1910.02054).

At rest a rank has some of the rows of each of its blocks; optimizers and checkpoints see only these. A step gathers
whole blocks once, computes with them, reduce-scatters gradients so that each rank gets its rows, and frees the blocks.
That sends as much as an all-reduce of whole gradients does.

[Note: messages]
    Several weights travel together (`messages_of`): side by side, one rank's rows after another's, each padded to the
    longest rank's. So the copies that are made for sending are small beside the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.grid import shard_of
from rotorch.core.grid_memory import messages_of
from rotorch.core.spec import Range
from rotorch.hold.sharded_weights import Memory, ShardPlacement, dtype_of_leaf, make_leaf
from rotorch.shard.sharded_weight import ShardedWeight, update_leaves
from rotorch.shard.storages import allocate, free


@dataclass(frozen=True)
class _Message:
    """Weights of one dtype that travel together.

    Attributes:
        names: of the weights.
        rows: per weight and layer of the grid, its rows of the block.
        width: elements of every layer's part, padded to the first one, which is longest.
        axis_groups: over which gradients are summed after the depth.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Range, ...], ...]
    width: int
    axis_groups: tuple[AxisGroup, ...]

    def parts(self, flat: Tensor, like: Mapping[str, Tensor], *, layer: int) -> dict[str, Tensor]:
        """The weights' rows in one layer's part, `flat [width]`."""
        found, start = {}, 0
        for name, rows in zip(self.names, self.rows, strict=True):
            shape = (rows[layer].length, *like[name].shape[1:])
            found[name] = flat[start : start + math.prod(shape)].view(shape)
            start += math.prod(shape)
        return found


class GatheredBlocks(Memory):
    """Memory for passes that compute with whole blocks, whose storage is freed between steps.

    Args:
        blocks: this rank's block of each weight, as all layers of the grid have it.
        depth: the ranks that share the same blocks.
        sums: by name, the axis groups over which a gradient is summed, the depth first.
        param_dtype: of gathered blocks, if it is not that of the shards, which gradients have.
    """

    fills_leaves: ClassVar[bool] = True

    def __init__(
        self,
        blocks: Sequence[ShardPlacement],
        *,
        depth: AxisGroup,
        sums: Mapping[str, tuple[AxisGroup, ...]],
        param_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._param_dtype = param_dtype
        self._blocks = {block.weight.name: block for block in blocks}
        self._depth = depth
        self._axis_groups = dict(sums)
        self._leaves: dict[str, nn.Parameter] = {}
        self._gathers: list[_Message] = []
        self._scatters: list[_Message] = []
        self._sums: list[Tensor] = []
        """The gradients of the last step, in few tensors."""

    def placements(self, *, mesh: DeviceMesh) -> list[ShardPlacement]:
        """This rank's rows of each block."""
        return [_rows_of(block, depth=self._depth, mesh=mesh) for block in self._blocks.values()]

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter:
        whole, dtype = held.local, dtype_of_leaf(held, self._param_dtype)
        if placement.shape:
            whole = whole.new_empty(self._blocks[held.name].shape, dtype=dtype)
            free(whole)
        else:  # a scalar has no rows: every layer holds it
            whole = whole.to(dtype)
        self._leaves[held.name] = make_leaf(whole, of=held)
        return self._leaves[held.name]

    def _messages(
        self, axis_groups: Mapping[str, tuple[AxisGroup, ...]], *, dtypes: Mapping[str, torch.dtype]
    ) -> list[_Message]:
        alike: dict[tuple[tuple[AxisGroup, ...], torch.dtype], list[str]] = {}
        for name, over in axis_groups.items():
            if self._leaves[name].shape:
                alike.setdefault((over, dtypes[name]), []).append(name)
        found = []
        for (over, dtype), names in alike.items():
            rows = [self._rows(name) for name in names]
            longest = [r[0].length * math.prod(self._leaves[n].shape[1:]) for n, r in zip(names, rows, strict=True)]
            for k in messages_of([numel * dtype.itemsize for numel in longest], depth=self._depth.size):
                together = slice(k.start, k.stop)
                after = tuple(axis_group for axis_group in over if axis_group is not self._depth)
                if width := sum(longest[together]):
                    found.append(_Message(tuple(names[together]), tuple(rows[together]), width, after))
        return found

    def _rows(self, name: str) -> tuple[Range, ...]:
        rows, size = self._leaves[name].shape[0], self._depth.size
        return tuple(shard_of(rows, layer=layer, depth=size) for layer in range(size))

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Gathers whole blocks. All ranks of the depth call it."""
        super().start(weights)
        if not self._gathers:  # not before the first step: until then the user may freeze weights
            dtypes = {name: leaf.dtype for name, leaf in self._leaves.items()}
            self._gathers = self._messages({name: () for name in self._leaves}, dtypes=dtypes)
            trained = [name for name, leaf in self._leaves.items() if leaf.requires_grad]
            dtypes = {name: weights[name].local.dtype for name in self._leaves}
            self._scatters = self._messages({name: self._axis_groups[name] for name in trained}, dtypes=dtypes)
        if torch.is_grad_enabled():  # freed now: last step's gradients would lie beside this step's whole blocks
            self._sums = []
        for leaf in self._leaves.values():
            if leaf.shape:
                allocate(leaf)
        update_leaves(weights[name] for name, leaf in self._leaves.items() if not leaf.shape)
        for message in self._gathers:
            self._gather(message, weights)

    def _gather(self, message: _Message, weights: Mapping[str, ShardedWeight]) -> None:
        like = {name: self._leaves[name].data for name in message.names}  # autograd does not take it for a change
        mine = next(iter(like.values())).new_zeros(message.width)  # zeros: the padding is sent too
        for name, part in message.parts(mine, like, layer=self._depth.position).items():
            part.copy_(weights[name].local)
        # Padded parts, equally long on all layers, so that one all-gather carries them.
        whole = self._depth.all_gather(mine)
        for layer, flat in enumerate(whole.split(message.width)):
            parts = message.parts(flat, like, layer=layer)
            for (name, part), rows in zip(parts.items(), message.rows, strict=True):
                like[name][rows[layer].start : rows[layer].stop].copy_(part)

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """This rank's rows of the summed gradients. A weight that no pass used counts as zeros."""
        self._free()  # no pass of this step reads whole blocks any more, and the sums need room
        found: dict[str, Tensor] = {}
        for message in self._scatters:
            found |= self._scatter(message, dtype=weights[message.names[0]].local.dtype)
        for name, leaf in self._leaves.items():
            # Scalars are whole on all layers: they travel in no message and are summed one by one.
            if not leaf.shape and leaf.requires_grad:
                found[name] = torch.zeros_like(weights[name].local) if leaf.grad is None else leaf.grad.detach()
                for axis_group in self._axis_groups[name]:
                    axis_group.all_reduce(found[name])
                self._sums.append(found[name])
        return found

    def _scatter(self, message: _Message, *, dtype: torch.dtype) -> dict[str, Tensor]:
        whole = self._leaves[message.names[0]].new_zeros(self._depth.size, message.width, dtype=dtype)
        for layer in range(self._depth.size):
            parts = message.parts(whole[layer], self._leaves, layer=layer)
            for (name, part), rows in zip(parts.items(), message.rows, strict=True):
                if (grad := self._leaves[name].grad) is not None:
                    part.copy_(grad[rows[layer].start : rows[layer].stop])
        grad = None  # the last reference: whole gradients are freed before their sum is made
        for name in message.names:
            self._leaves[name].grad = None
        mine = self._depth.reduce_scatter(whole.view(-1))
        parts = message.parts(mine, self._leaves, layer=self._depth.position)
        own = mine[: sum(part.numel() for part in parts.values())]
        for axis_group in message.axis_groups:
            axis_group.all_reduce(own)
        self._sums.append(mine)
        return parts

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Frees whole blocks and their gradients."""
        self._free()
        for leaf in self._leaves.values():
            if leaf.shape:
                leaf.grad = None

    def _free(self) -> None:
        for leaf in self._leaves.values():
            if leaf.shape:
                free(leaf)

    def flat_gradients(self, weights: Mapping[str, ShardedWeight]) -> list[Tensor]:
        return list(self._sums)


def _rows_of(block: ShardPlacement, *, depth: AxisGroup, mesh: DeviceMesh) -> ShardPlacement:
    """This rank's rows of a block, along the block's first dim."""
    if not block.shape:
        return block
    rows = shard_of(block.shape[0], layer=depth.position, depth=depth.size)
    names = mesh.mesh_dim_names or ()
    placements = tuple(Shard(0) if axis == depth.axis else p for axis, p in zip(names, block.placements, strict=True))
    # The depth is the outermost axis, and all its layers hold the same before they share it.
    num_holders = block.num_holders // depth.size
    return replace(
        block.rows_of_it(rows),
        placements=placements,
        num_holders=num_holders,
        holder=block.holder % num_holders,
    )

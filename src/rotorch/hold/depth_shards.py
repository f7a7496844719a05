"""Blocks of which every layer of a grid holds a part at rest: ZeRO over the depth of a grid (arXiv 1910.02054).

At rest a rank has a stretch of the rows of each of its blocks; optimizers and checkpoints see no more. A step gathers
whole blocks once, computes with them, sums the parts of gradients, of which each rank gets its stretch, and lets the
blocks go. That sends as much as summing whole gradients does.

[Note: messages]
    Several weights travel together (`messages_of`): side by side, one rank's stretches after another's, each as long as
    the longest rank's. So what is copied to be sent is small beside the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rotorch.comm.line import Line
from rotorch.core.grid import shard_of
from rotorch.core.grid_memory import messages_of
from rotorch.core.spec import Range
from rotorch.hold.twins import Part, Twins
from rotorch.shard.sharded_weight import Piece
from rotorch.shard.sites import Site


@dataclass(frozen=True)
class _Message:
    """Weights of one dtype that travel together.

    Attributes:
        names: which.
        rows: per weight and layer of the grid, its rows of the block.
        width: elements of every layer's part: those of the first one, which is longest.
        lines: over which gradients are summed after that over the depth.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[Range, ...], ...]
    width: int
    lines: tuple[Line, ...]

    def parts(self, flat: Tensor, like: Mapping[str, Tensor], *, layer: int) -> dict[str, Tensor]:
        """The weights' stretches in one layer's part, `flat [width]`."""
        found, start = {}, 0
        for name, rows in zip(self.names, self.rows, strict=True):
            shape = (rows[layer].length, *like[name].shape[1:])
            found[name] = flat[start : start + math.prod(shape)].view(shape)
            start += math.prod(shape)
        return found


class DepthShards(Twins):
    """The blocks of one rank, of which it holds a part at rest.

    Args:
        parts: this rank's block of each weight, as all layers of the grid have it.
        depth: the ranks that have the same blocks.
        sums: by name, the lines of ranks over which a gradient is summed, that over the depth first.
        parameters: the module's own parameters by name; values are taken over from those that have any.
        sites: where each sits.
        mesh: the mesh of the DTensors at rest.
        device: where to hold them.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        depth: Line,
        sums: Mapping[str, tuple[Line, ...]],
        parameters: Mapping[str, nn.Parameter],
        sites: Mapping[str, tuple[Site, ...]],
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self._depth = depth
        cut = [_stretch_of(part, depth=depth, mesh=mesh) for part in parts]
        super().__init__(
            cut, parameters=parameters, sites=sites, mesh=mesh, device=device, gradients_stay=True, memory={}
        )
        self._held_parts = self.twins
        """This rank's stretches, which lie in the memory of the DTensors at rest."""
        self.twins = {p.weight.name: self._whole(p) for p in parts}
        self._gathers = self._messages({name: () for name in self.twins})
        self._scatters = self._messages({name: sums[name] for name, twin in self.twins.items() if twin.requires_grad})
        self._summed: dict[int, Tensor] = {}
        self._lines = dict(sums)
        self._let_go()

    def _whole(self, part: Part) -> nn.Parameter:
        mine = self._held_parts[part.weight.name]
        if not part.shape:  # a scalar has no rows: every layer holds it
            return mine
        return nn.Parameter(mine.new_empty(part.shape), requires_grad=mine.requires_grad)

    def _messages(self, lines: Mapping[str, tuple[Line, ...]]) -> list[_Message]:
        alike: dict[tuple[tuple[Line, ...], torch.dtype], list[str]] = {}
        for name, over in lines.items():
            if self.twins[name].shape:
                alike.setdefault((over, self.twins[name].dtype), []).append(name)
        found = []
        for (over, dtype), names in alike.items():
            rows = [self._rows(name) for name in names]
            longest = [r[0].length * math.prod(self.twins[n].shape[1:]) for n, r in zip(names, rows, strict=True)]
            for k in messages_of([numel * dtype.itemsize for numel in longest], depth=self._depth.size):
                together = slice(k.start, k.stop)
                after = tuple(line for line in over if line is not self._depth)
                if width := sum(longest[together]):
                    found.append(_Message(tuple(names[together]), tuple(rows[together]), width, after))
        return found

    def _rows(self, name: str) -> tuple[Range, ...]:
        rows, size = self.twins[name].shape[0], self._depth.size
        return tuple(shard_of(rows, layer=layer, depth=size) for layer in range(size))

    def start(self) -> None:
        """Before a step, as `Twins.start`; gathers whole blocks. All ranks of the depth call it."""
        super().start()
        if torch.is_grad_enabled():  # the last step's would lie beside the whole ones of this step
            self._summed, self._at_rest = {}, {}
            for part in self._held_parts.values():
                part.grad = None
        for twin in self.twins.values():
            if twin.shape:
                twin.untyped_storage().resize_(twin.numel() * twin.itemsize)
        for message in self._gathers:
            self._gather(message)

    def _gather(self, message: _Message) -> None:
        like = {name: self.twins[name].data for name in message.names}  # autograd does not take it for a change
        mine = next(iter(like.values())).new_zeros(message.width)
        for name, part in message.parts(mine, like, layer=self._depth.position).items():
            part.copy_(self._held_parts[name].detach())
        whole = self._depth.all_gather(mine)
        for layer, flat in enumerate(whole.split(message.width)):
            parts = message.parts(flat, like, layer=layer)
            for (name, part), rows in zip(parts.items(), message.rows, strict=True):
                like[name][rows[layer].start : rows[layer].stop].copy_(part)

    def sum_gradients(self) -> None:
        """After the last backward: of the sum over its ranks, this rank's stretch of every gradient.

        A weight that no pass has used counts as zeros.
        """
        self._free()  # no pass comes that would read them
        for number, message in enumerate(self._scatters):
            self._summed[number] = self._scatter(message)
        for name, twin in self.twins.items():
            if not twin.shape and twin.requires_grad:
                twin.grad = torch.zeros_like(twin) if twin.grad is None else twin.grad
                for line in self._lines[name]:
                    line.all_reduce(twin.grad)

    def _scatter(self, message: _Message) -> Tensor:
        first = self.twins[message.names[0]]
        whole = first.new_zeros(self._depth.size, message.width)
        for layer in range(self._depth.size):
            parts = message.parts(whole[layer], self.twins, layer=layer)
            for (name, part), rows in zip(parts.items(), message.rows, strict=True):
                if (grad := self.twins[name].grad) is not None:
                    part.copy_(grad[rows[layer].start : rows[layer].stop])
        grad = None  # whole gradients go before their sum is there
        for name in message.names:
            self.twins[name].grad = None
        mine = self._depth.reduce_scatter(whole.view(-1))
        parts = message.parts(mine, self.twins, layer=self._depth.position)
        own = mine[: sum(part.numel() for part in parts.values())]
        for line in message.lines:
            line.all_reduce(own)
        for name, part in parts.items():
            self._held_parts[name].grad = part
        return mine

    def attach(self) -> None:
        """After a step: gives the DTensors this rank's stretches of the gradients."""
        whole, self.twins = self.twins, self._held_parts
        try:
            super().attach()
        finally:
            self.twins = whole

    def take_back(self, name: str | None = None) -> None:
        """As `Twins.take_back`; after a pass whole blocks are let go."""
        super().take_back(name)
        if name is None:
            self._let_go()

    def _let_go(self) -> None:
        self._free()
        for twin in self.twins.values():
            if twin.shape:
                twin.grad = None

    def _free(self) -> None:
        for twin in self.twins.values():
            if twin.shape:
                twin.untyped_storage().resize_(0)

    def flat_gradients(self) -> list[Tensor]:
        """All of this rank's gradients, in few tensors."""
        scalars = [twin.grad for twin in self._held_parts.values() if not twin.shape and twin.grad is not None]
        return [*self._summed.values(), *scalars]


def _stretch_of(part: Part, *, depth: Line, mesh: DeviceMesh) -> Part:
    """This rank's rows of a block, along the block's first dim."""
    if not part.shape:
        return part
    rows = shard_of(part.shape[0], layer=depth.position, depth=depth.size)
    names = mesh.mesh_dim_names or ()
    placements = tuple(Shard(0) if axis == depth.axis else p for axis, p in zip(names, part.placements, strict=True))
    # The depth is the outermost axis, and all its layers hold the same before they share it.
    num_holders = part.num_holders // depth.size
    return replace(
        part,
        pieces=_pieces_of(part.pieces, rows),
        shape=(rows.length, *part.shape[1:]),
        placements=placements,
        num_holders=num_holders,
        holder=part.holder % num_holders,
    )


def _pieces_of(pieces: Sequence[Piece], rows: Range) -> tuple[Piece, ...]:
    """What `rows` of a local tensor leave of its pieces."""
    found = []
    for piece in pieces:
        first = piece.local_start if piece.dim == 0 else 0
        start, stop = max(rows.start, first), min(rows.stop, first + piece.sizes[0])
        if start < stop:
            offsets = (piece.offsets[0] + start - first, *piece.offsets[1:])
            local_start = start - rows.start if piece.dim == 0 else piece.local_start
            found.append(Piece(offsets, (stop - start, *piece.sizes[1:]), piece.dim, local_start))
    return tuple(found)

"""Memory and traffic of a unit on d grids of q x q ranks: the formulas that `tesseract` and `summa` share.

See `ops/summa.py` for the products, `core/spec.py` (GridCut) for how weights are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rotorch.core.layout import Layout
from rotorch.core.spec import Cut, GridCut, Range, Unit, Weight
from rotorch.core.traffic import (
    Kind,
    MicroBatch,
    Phase,
    Transfer,
    all_gather,
    all_reduce,
    reduce_scatter,
    sent_by_broadcast,
    sent_by_reduce,
)

DEPTH, DOWN, ACROSS = "depth", "row", "col"
"""Mesh axes. Ranks along `DOWN` have different rows of a grid, along `ACROSS` different columns; `DEPTH`: grids."""

ID_ITEMSIZE = 8
"""Bytes of a token id."""


def shard_of(rows: int, *, layer: int, depth: int) -> Range:
    """The rows of a block that one layer of the grid holds, where the layers share them."""
    (shard,) = Cut(0, rows).ranges(rows, num_slices=depth, index=layer) if rows else (Range(0, 0),)
    return shard


@dataclass(frozen=True)
class GridCoordinate:
    """One rank's position on a grid: layer `layer` of `depth`, row and column of `size`.

    With `in_shards` each layer holds a shard of every block at rest, along its first dim.
    """

    size: int
    depth: int
    layer: int
    row: int
    column: int
    in_shards: bool = False

    @staticmethod
    def at(position: int, *, size: int, depth: int, in_shards: bool = False) -> GridCoordinate:
        """The coordinate of the rank at `position` of the axes depth, row, col."""
        layer, rest = divmod(position, size * size)
        return GridCoordinate(size, depth, layer, *divmod(rest, size), in_shards)

    def block_shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of this rank's block of a weight."""
        return weight.block_shape(size=self.size, row=self.row, column=self.column)

    def block_bytes(self, weight: Weight) -> int:
        """Bytes of this rank's block of a weight."""
        return math.prod(self.block_shape(weight)) * weight.itemsize

    def is_in_shards(self, weight: Weight) -> bool:
        """Returns True if each layer of the grid holds only a part of this rank's block of a weight."""
        return self.in_shards and self.depth > 1 and bool(weight.shape)

    def held_bytes(self, weight: Weight, *, layer: int | None = None) -> int:
        """Bytes of a weight that this rank holds at rest, or that the same row and column of layer `layer` holds."""
        if not self.is_in_shards(weight):
            return self.block_bytes(weight)
        rows, *rest = self.block_shape(weight)
        shard = shard_of(rows, layer=self.layer if layer is None else layer, depth=self.depth)
        return shard.length * math.prod(rest) * weight.itemsize

    @staticmethod
    def in_pass(weight: Weight, num_bytes: int) -> int:
        """Bytes of a part of a weight as passes compute with it, of its bytes at rest."""
        return num_bytes // weight.itemsize * weight.itemsize_in_pass

    def layout(self, unit: Unit) -> Layout:
        """Layout of a unit on this rank: bytes held, and the traffic of its weights in a step."""
        transfers: list[Transfer] = []
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            if weight.trained:
                transfers += self._gradient_sums(weight, cut)
            if self.is_in_shards(weight):
                part = self.in_pass(weight, self.held_bytes(weight, layer=0))
                transfers.append(all_gather(part, axis=DEPTH, size=self.depth, phase=Phase.STEP))
            if len(weight.shape) == 2 and cut.rows is not None:
                transfers += self._blocks_sent(unit, weight, cut)
        return Layout(
            resident_bytes=sum(map(self.held_bytes, unit.weights)),
            transfers=tuple(t for t in transfers if t.sent_bytes),
        )

    def largest_block_bytes(self, weight: Weight) -> int:
        """Bytes of the largest block of a weight among the ranks of this rank's column."""
        shapes = (weight.block_shape(size=self.size, row=k, column=self.column) for k in range(self.size))
        return max(map(math.prod, shapes)) * weight.itemsize

    def _gradient_sums(self, weight: Weight, cut: GridCut) -> Iterator[Transfer]:
        num_bytes = self.held_bytes(weight)
        if cut.columns is None:
            yield all_reduce(num_bytes, axis=ACROSS, size=self.size)
        if cut.rows is None:
            yield all_reduce(num_bytes, axis=DOWN, size=self.size)
        if self.is_in_shards(weight):  # as large as the largest shard, which is the first layer's
            whole = self.depth * self.held_bytes(weight, layer=0)
            yield reduce_scatter(whole, axis=DEPTH, size=self.depth, phase=Phase.BACKWARD)
        else:
            yield all_reduce(num_bytes, axis=DEPTH, size=self.depth)

    def _blocks_sent(self, unit: Unit, weight: Weight, cut: GridCut) -> Iterator[Transfer]:
        """Transfers of blocks of a weight along this rank's column, and of their gradients."""
        shapes = (weight.block_shape(size=self.size, row=k, column=self.column) for k in range(self.size))
        numels = list(map(math.prod, shapes))
        uses = unit.reads_in_backward if cut.is_table else unit.uses
        sizes = [numel * weight.itemsize_in_pass for numel in numels]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            yield self._broadcasts(sizes, axis=DOWN, position=self.row, phase=phase, times=uses)
        if weight.trained:
            sizes = [numel * weight.itemsize for numel in numels]
            yield self._reductions(sizes, axis=DOWN, position=self.row, phase=Phase.BACKWARD, times=uses)

    def activation_transfers(self, unit: Unit, batch: MicroBatch) -> Iterator[Transfer]:
        """Transfers of one micro-batch of this rank for a unit, beyond its weights."""
        num_tokens = batch.num_rows * batch.num_tokens
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                sums = all_reduce(num_tokens * batch.loss_itemsize, axis=ACROSS, size=self.size, phase=phase)
                yield from [sums] * cut.sums
            if len(weight.shape) == 2 and cut.is_linear:
                yield from self._inputs_sent(unit, weight, num_tokens * batch.itemsize)
            elif len(weight.shape) == 2 and cut.is_table:
                yield from self._look_ups(unit, weight, num_tokens)
                yield from self._logits_sent(unit, weight, num_tokens * batch.itemsize)
            elif cut.whole_output:  # of every token; a model that pools before it sends less
                payload = num_tokens * weight.shape[0] * batch.itemsize
                yield from [all_reduce(payload, axis=ACROSS, size=self.size, phase=Phase.FORWARD)] * unit.uses
        if unit.logits:
            for numbers in (1, 2):  # the largest; the sum of exponentials and the target's
                payload = numbers * num_tokens * batch.loss_itemsize
                yield all_reduce(payload, axis=ACROSS, size=self.size, phase=Phase.FORWARD)

    def _inputs_sent(self, unit: Unit, weight: Weight, column_bytes: int) -> Iterator[Transfer]:
        sizes = [width * column_bytes for width in self.widths(weight, weight.grid.rows if weight.grid else None)]
        where = {"axis": ACROSS, "position": self.column, "times": unit.uses}
        yield self._broadcasts(sizes, phase=Phase.FORWARD, **where)  # type: ignore[arg-type]
        yield self._reductions(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]
        if weight.trained:
            yield self._broadcasts(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]

    def _look_ups(self, unit: Unit, weight: Weight, num_tokens: int) -> Iterator[Transfer]:
        width = self.widths(weight, weight.grid.columns if weight.grid else None)[self.column]
        mine = num_tokens * width * weight.itemsize_in_pass  # in the precision of the weights
        for _ in range(unit.uses - unit.reads_in_backward):
            yield all_gather(num_tokens * ID_ITEMSIZE, axis=DOWN, size=self.size, phase=Phase.FORWARD)
            yield reduce_scatter(mine * self.size, axis=DOWN, size=self.size, phase=Phase.FORWARD)
            if weight.trained:
                yield all_gather(mine, axis=DOWN, size=self.size, phase=Phase.BACKWARD)

    def _logits_sent(self, unit: Unit, weight: Weight, column_bytes: int) -> Iterator[Transfer]:
        """Transfers of a head that uses a table: its logits are sums over columns."""
        sizes = [rows * column_bytes for rows in self.widths(weight, weight.grid.rows if weight.grid else None)]
        where = {"axis": ACROSS, "position": self.column, "times": unit.reads_in_backward}
        yield self._reductions(sizes, phase=Phase.FORWARD, **where)  # type: ignore[arg-type]
        yield self._broadcasts(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]

    def widths(self, weight: Weight, cut: Cut | None) -> list[int]:
        """Length of each position's part, along an axis, of the dim that `cut` cuts."""
        if cut is None:
            raise AssertionError(f"{weight.name} is not cut")
        each = (cut.ranges(weight.shape[cut.dim], num_slices=self.size, index=k) for k in range(self.size))
        return [sum(r.length for r in ranges) for ranges in each]

    def _broadcasts(self, sizes: Sequence[int], *, axis: str, position: int, phase: Phase, times: int) -> Transfer:
        sent = [sent_by_broadcast(s, position=position, source=k, size=self.size) for k, s in enumerate(sizes)]
        return Transfer(Kind.BROADCAST, axis, phase, times * sum(sizes), times * sum(sent), times * len(sizes))

    def _reductions(self, sizes: Sequence[int], *, axis: str, position: int, phase: Phase, times: int) -> Transfer:
        sent = [sent_by_reduce(s, position=position, target=k) for k, s in enumerate(sizes)]
        return Transfer(Kind.REDUCE, axis, phase, times * sum(sizes), times * sum(sent), times * len(sizes))

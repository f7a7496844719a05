"""What a unit takes on d grids of q x q ranks: the formulas that `tesseract` and `summa` share.

See `ops/summa.py` for the products, `core/spec.py` (GridCut) for how weights are cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import Cut, GridCut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.strategy import Strategy
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
"""Mesh axes. Along `DOWN` ranks have other rows of a grid, along `ACROSS` other columns; `DEPTH`: other grids."""

_ID_ITEMSIZE = 8


@dataclass(frozen=True)
class GridPlace:
    """One rank's place on a grid: layer `layer` of `depth`, row and column of `size`."""

    size: int
    depth: int
    layer: int
    row: int
    column: int

    @staticmethod
    def at(position: int, *, size: int, depth: int) -> GridPlace:
        """The place of the rank at `position` of the axes depth, row, col."""
        layer, rest = divmod(position, size * size)
        return GridPlace(size, depth, layer, *divmod(rest, size))

    def block_bytes(self, weight: Weight) -> int:
        """Bytes of this rank's block of a weight."""
        shape = weight.block_shape(size=self.size, row=self.row, column=self.column)
        return math.prod(shape) * weight.itemsize

    def layout(self, unit: Unit) -> Layout:
        """What this rank holds of a unit, and what a step sends of its weights."""
        transfers: list[Transfer] = []
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            if weight.trained:
                transfers += self._gradient_sums(weight, cut)
            if len(weight.shape) == 2 and cut.rows is not None:
                transfers += self._blocks_sent(unit, weight, cut)
        return Layout(
            resident_bytes=sum(map(self.block_bytes, unit.weights)),
            transient_bytes=self._transient_bytes(unit),
            transfers=tuple(t for t in transfers if t.sent_bytes),
        )

    def _transient_bytes(self, unit: Unit) -> int:
        """Of other ranks, the block in use and the next one; of gradients, this rank's, one made and one under way."""
        matrices = [w for w in unit.weights if w.grid is not None and w.grid.rows is not None]
        if self.size == 1 or not matrices:
            return 0
        largest = max(self._largest_block_bytes(w) for w in matrices)
        return (min(2, self.size - 1) + min(3, self.size)) * largest

    def _largest_block_bytes(self, weight: Weight) -> int:
        shapes = (weight.block_shape(size=self.size, row=k, column=self.column) for k in range(self.size))
        return max(map(math.prod, shapes)) * weight.itemsize

    def _gradient_sums(self, weight: Weight, cut: GridCut) -> Iterator[Transfer]:
        num_bytes = self.block_bytes(weight)
        if cut.columns is None:
            yield all_reduce(num_bytes, axis=ACROSS, size=self.size)
        if cut.rows is None:
            yield all_reduce(num_bytes, axis=DOWN, size=self.size)
        yield all_reduce(num_bytes, axis=DEPTH, size=self.depth)

    def _blocks_sent(self, unit: Unit, weight: Weight, cut: GridCut) -> Iterator[Transfer]:
        """Blocks of a weight along this rank's column, and their gradients."""
        sizes = [
            math.prod(weight.block_shape(size=self.size, row=k, column=self.column)) * weight.itemsize
            for k in range(self.size)
        ]
        uses = unit.reads_in_backward if cut.is_table else unit.uses
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            yield self._broadcasts(sizes, axis=DOWN, position=self.row, phase=phase, times=uses)
        if weight.trained:
            yield self._reductions(sizes, axis=DOWN, position=self.row, phase=Phase.BACKWARD, times=uses)

    def activation_transfers(self, unit: Unit, batch: MicroBatch) -> Iterator[Transfer]:
        """What one micro-batch of this rank sends for a unit beyond its weights."""
        num_tokens = batch.num_rows * batch.num_tokens
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                sums = all_reduce(num_tokens * batch.loss_itemsize, axis=ACROSS, size=self.size, phase=phase)
                yield from [sums] * cut.sums
            if len(weight.shape) == 2 and cut.is_linear:
                yield from self._inputs_sent(unit, weight, num_tokens * batch.itemsize)
            elif len(weight.shape) == 2 and cut.is_table:
                yield from self._look_ups(unit, weight, num_tokens, batch)
                yield from self._logits_sent(unit, weight, num_tokens * batch.itemsize)
            elif cut.whole_output:  # of every token; a model that pools before it sends less
                payload = num_tokens * weight.shape[0] * batch.itemsize
                yield from [all_reduce(payload, axis=ACROSS, size=self.size, phase=Phase.FORWARD)] * unit.uses
        if unit.logits:
            for numbers in (1, 2):  # the largest; the sum of exponentials and the target's
                payload = numbers * num_tokens * batch.loss_itemsize
                yield all_reduce(payload, axis=ACROSS, size=self.size, phase=Phase.FORWARD)

    def _inputs_sent(self, unit: Unit, weight: Weight, column_bytes: int) -> Iterator[Transfer]:
        sizes = [width * column_bytes for width in self._widths(weight, weight.grid.rows if weight.grid else None)]
        where = {"axis": ACROSS, "position": self.column, "times": unit.uses}
        yield self._broadcasts(sizes, phase=Phase.FORWARD, **where)  # type: ignore[arg-type]
        yield self._reductions(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]
        if weight.trained:
            yield self._broadcasts(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]

    def _look_ups(self, unit: Unit, weight: Weight, num_tokens: int, batch: MicroBatch) -> Iterator[Transfer]:
        width = self._widths(weight, weight.grid.columns if weight.grid else None)[self.column]
        mine = num_tokens * width * batch.itemsize
        for _ in range(unit.uses - unit.reads_in_backward):
            yield all_gather(num_tokens * _ID_ITEMSIZE, axis=DOWN, size=self.size, phase=Phase.FORWARD)
            yield reduce_scatter(mine * self.size, axis=DOWN, size=self.size, phase=Phase.FORWARD)
            if weight.trained:
                yield all_gather(mine, axis=DOWN, size=self.size, phase=Phase.BACKWARD)

    def _logits_sent(self, unit: Unit, weight: Weight, column_bytes: int) -> Iterator[Transfer]:
        """Of a head that uses a table: its logits are sums over columns."""
        sizes = [rows * column_bytes for rows in self._widths(weight, weight.grid.rows if weight.grid else None)]
        where = {"axis": ACROSS, "position": self.column, "times": unit.reads_in_backward}
        yield self._reductions(sizes, phase=Phase.FORWARD, **where)  # type: ignore[arg-type]
        yield self._broadcasts(sizes, phase=Phase.BACKWARD, **where)  # type: ignore[arg-type]

    def _widths(self, weight: Weight, cut: Cut | None) -> list[int]:
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


class GridStrategy(Strategy):
    """Blocks on grids of `rows` x `columns` ranks: what `summa` and `tesseract` have in common.

    Attributes:
        rows: of a grid.
        columns: of a grid, as many.
        transport: how blocks travel. "auto" takes shared memory between CPU ranks of one host, where ranks read blocks
            and add up parts in place, else messages.
    """

    cuts_weights: ClassVar[bool] = True
    size_fields: ClassVar[tuple[str, ...]] = ("rows", "columns")
    rows: PositiveInt
    columns: PositiveInt
    transport: Literal["auto", "shared_memory", "messages"] = "auto"

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if self.rows != self.columns:
            rest = [getattr(self, field) for field in self.size_fields[2:]]
            squares = ("x".join(map(str, [side, side, *rest])) for side in (self.rows, self.columns))
            raise ConfigError(
                f"{self.kind}: a grid of {self.rows} x {self.columns} is not square. "
                f"Write {self.kind}={' or '.join(squares)}"
            )
        return self

    @property
    def num_layers(self) -> int:
        """How many grids hold the same weights, one behind another."""
        return 1

    @property
    def axes(self) -> dict[str, int]:
        return {DOWN: self.rows, ACROSS: self.columns}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (DOWN,)

    @property
    def feature_axes(self) -> tuple[str, ...]:
        return (ACROSS,)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        layout = self._place(position).layout(unit)
        return replace(layout, transfers=()) if self.transport == "shared_memory" else layout

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        if self.transport == "shared_memory":
            return ()
        return tuple(self._place(position).activation_transfers(unit, batch))

    def _place(self, position: int) -> GridPlace:
        return GridPlace.at(position, size=self.rows, depth=self.num_layers)

    def check(self, spec: ModelSpec) -> None:
        _check_grid(spec, strategy=str(self), size=self.rows)

    def check_device(self, device_type: str) -> None:
        if self.transport == "shared_memory" and device_type != "cpu":
            raise ConfigError(
                f"{self.kind}: transport=shared_memory works between CPU ranks, not on {device_type}. "
                "Write transport=auto"
            )

    def __str__(self) -> str:
        sizes = "x".join(str(getattr(self, field)) for field in self.size_fields)
        return f"{self.kind}={sizes}{self._options_text()}"


def _check_grid(spec: ModelSpec, *, strategy: str, size: int) -> None:
    """Raises `ConfigError` if a model cannot lie in `size` x `size` blocks; says why, and what to write instead."""
    if spec.features_stay_whole:
        raise ConfigError(
            f"{strategy}: activations of {spec.name} cannot be cut along their features: {spec.features_stay_whole}. "
            "Write rtp or fsdp"
        )
    for unit in spec.units:
        for weight in unit.weights:
            cut = weight.grid
            if cut is None:
                raise AssertionError(f"{weight.name} was described without its cut on a grid")
            for each in (cut.rows, cut.columns):
                # Rows of a vocabulary may be uneven: nothing but the loss goes on with them.
                of_vocabulary = unit.kind is UnitKind.WEIGHT and each is not None and _is_vocabulary(unit, cut, each)
                if each is not None and each.groups % size and not of_vocabulary:
                    what = "heads" if each.groups < weight.shape[each.dim] else "features"
                    raise ConfigError(
                        f"{strategy}: a grid of {size} x {size} over {weight.name!r} {list(weight.shape)}: its "
                        f"{each.groups} {what} are not a multiple of {size}. Write a grid whose sides divide "
                        f"{each.groups}, or rtp"
                    )
                if each is not None and each.groups < size:
                    raise ConfigError(
                        f"{strategy}: a grid of {size} x {size} over {weight.name!r} {list(weight.shape)}, which has "
                        f"{each.groups} rows to cut. Write a smaller grid"
                    )


def _is_vocabulary(unit: Unit, cut: GridCut, part: Cut) -> bool:
    return part is cut.rows if cut.is_table else unit.logits and part is cut.columns

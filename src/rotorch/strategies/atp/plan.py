"""atp: adaptive tensor parallelism on two axes. Weights stay in blocks, activations are summed on both axes.

Idea
    Megatron's two products in a row, each matrix cut once more along its other dim: so activations are cut along their
    features as well, and sums run over two smaller groups of ranks, of which one may have the faster links. Source: ATP
    (arXiv 2301.08658).

Picture (2 x 2 ranks i,j; one MLP; a digit pair is a block's interior and hidden part; S = sum over an axis)
               holds        forward                            backward
    rank 0,0 | 00 of both | x0 W1 S2 y0 . W2 S1 z0 | dz0 W2' S2 dy0 . W1' S1 dx0 |   S1: over ranks with other i
    rank 0,1 | 01         | x1 W1 S2 y0 . W2 S1 z1 | dz1 W2' S2 dy0 . W1' S1 dx1 |   S2: over ranks with other j
    rank 1,0 | 10         | x0 W1 S2 y1 . W2 S1 z0 | dz0 W2' S2 dy1 . W1' S1 dx0 |
    rank 1,1 | 11         | x1 W1 S2 y1 . W2 S1 z1 | dz1 W2' S2 dy1 . W1' S1 dx1 |

Layout
    `order=column_first`: the interior (heads, MLP columns, the vocabulary) is cut over the first axis, features of the
    residual stream over the second: `W1[F_1, D_2]`, `W2[D_2, F_1]`, embedding and head `[V_1, D_2]`, norms and biases
    of row-wise layers `[D_2]`. `row_first` is the transpose: interior over the second axis, features over the first.
    Norms of single heads are whole. All ranks share a batch.

Cost (unit of P bytes, d1 x d2 ranks, T tokens, D features, F columns in the interior, column first)
    resident   P/(d1 d2)
    sent       2 (d1-1)/d1 of T D/d2 over the first axis, in forward and in backward; over the second 2 (d2-1)/d2 of
               T F/d1 for each column-wise matrix in forward and each row-wise one in backward. A norm sums one number
               per token over the second (layer norms two), forward and backward; the loss three over the first.
    hides      With `chunks=c`, a sum over the second axis of one c-th of the tokens behind the product of the next.

Deviations
    A strategy chooses nothing: with `atp=auto`, `rotorch train` and `rotorch plan` try all grids in both orders on the
    links of a cluster, and take the fastest that fits. The paper measures a matrix of bandwidths instead.
    d2 = 1 is `megatron`, to the bit.
    Attentions that normalise over all their heads (OLMo-2) are gathered and computed whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import Combine, Cut, GridCut, ModelSpec, Range, Unit, UnitKind, Weight
from rotorch.core.stages import with_features_cut
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Phase, Transfer, all_gather, all_reduce

FIRST, SECOND = "atp_1", "atp_2"


@dataclass(frozen=True)
class AtpCoordinate:
    """One rank's position: its part of interiors, and of the residual stream's features.

    Of a weight, `grid.rows` is cut over the interior's axis and `grid.columns` over the features'; where both cut the
    same dim, the interior's axis cuts each part once more.

    Attributes:
        interior: this rank's number on the interior's axis.
        num_interior: number of ranks on it.
        feature: this rank's number on the features' axis.
        num_features: number of ranks on it.
    """

    interior: int
    num_interior: int
    feature: int
    num_features: int

    def ranges(self, weight: Weight, *, interior: int | None = None) -> tuple[tuple[Range, ...], ...]:
        """The indices that this rank holds, per dim; or those of the rank at `interior` of the interior's axis."""
        number = self.interior if interior is None else interior
        cut = weight.grid or GridCut()
        found: list[tuple[Range, ...]] = [(Range(0, length),) for length in weight.shape]
        for part, n, k in ((cut.columns, self.num_features, self.feature), (cut.rows, self.num_interior, number)):
            if part is None:
                continue
            ((start, length),) = {(r.start, r.length) for r in found[part.dim]}
            if length == weight.shape[part.dim]:
                found[part.dim] = part.ranges(length, num_slices=n, index=k)
            else:
                (inner,) = Cut(part.dim, length).ranges(length, num_slices=n, index=k)
                found[part.dim] = (Range(start + inner.start, inner.length),)
        return tuple(found)

    def shape(self, weight: Weight, *, interior: int | None = None) -> tuple[int, ...]:
        """Shape of this rank's part of a weight."""
        return tuple(sum(r.length for r in ranges) for ranges in self.ranges(weight, interior=interior))

    def num_bytes(self, weight: Weight) -> int:
        """Bytes of this rank's part of a weight."""
        return math.prod(self.shape(weight)) * weight.itemsize


class ATP(Strategy):
    """Blocks on `d1` x `d2` ranks that share a batch. Written `atp=2x4`, or `atp=2x4[order=row_first,chunks=2]`.

    Attributes:
        d1: ranks of the first axis.
        d2: ranks of the second.
        order: over which axis interiors are cut: "column_first" over the first, "row_first" over the second.
        chunks: number of parts of the tokens in a product whose sum over the features' axis follows.
    """

    kind: ClassVar[str] = "atp"
    not_compiled: ClassVar[str] = "sums lie in the middle of modules, which cannot be compiled"
    cuts_weights: ClassVar[bool] = True
    size_fields: ClassVar[tuple[str, ...]] = ("d1", "d2")
    d1: PositiveInt
    d2: PositiveInt
    order: Literal["column_first", "row_first"] = "column_first"
    chunks: PositiveInt = 1

    @property
    def axes(self) -> dict[str, int]:
        return {FIRST: self.d1, SECOND: self.d2}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def interior_axis(self) -> str:
        """The axis over which heads, MLP columns and the vocabulary are cut."""
        return FIRST if self.order == "column_first" else SECOND

    @property
    def feature_axis(self) -> str:
        """The axis over which features of the residual stream are cut."""
        return SECOND if self.order == "column_first" else FIRST

    @property
    def feature_axes(self) -> tuple[str, ...]:
        return (self.feature_axis,)

    def coordinate(self, position: int) -> AtpCoordinate:
        """The coordinate of the rank at `position` of the two axes."""
        at = dict(zip((FIRST, SECOND), divmod(position, self.d2), strict=True))
        sizes, inner, outer = self.axes, self.interior_axis, self.feature_axis
        return AtpCoordinate(at[inner], sizes[inner], at[outer], sizes[outer])

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        """With `Weight.grid` as `AtpCoordinate` reads it."""
        alone = {
            w.name.rpartition(".")[0].rpartition(".")[0] + "."
            for u in spec.cut_units
            if u.kind is UnitKind.WEIGHT and u.combine is Combine.CONCAT and not u.logits
            for w in u.weights
        }
        units = []
        for unit in spec.units:
            weights = (replace(w, grid=_cut(unit, w, whole=w.name.startswith(tuple(alone)))) for w in unit.weights)
            units.append(replace(unit, weights=tuple(weights)))
        return with_features_cut(replace(spec, units=tuple(units)), ranks=self.axes[self.feature_axis])

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        coordinate = self.coordinate(position)
        held = sum(map(coordinate.num_bytes, unit.weights))
        parts = sum(coordinate.num_bytes(w) for w in unit.weights if w.trained and w.beside_slices)
        summed = all_reduce(parts, axis=self.interior_axis, size=coordinate.num_interior, phase=Phase.STEP)
        return Layout(resident_bytes=held, transfers=(summed,) if summed.sent_bytes else ())

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        """Transfers of one micro-batch for `unit`: hidden states, interiors, sums of norms, numbers of the loss."""
        coordinate = self.coordinate(position)
        tokens = batch.num_rows * batch.num_tokens
        transfers = list(self._norms(unit, tokens * batch.loss_itemsize))
        if unit.kind is UnitKind.MODULE:
            transfers += list(self._module(unit, coordinate, tokens * batch.itemsize)) * unit.uses
        elif unit.kind is UnitKind.WEIGHT:
            transfers += self._single(unit, coordinate, tokens, batch)
        return tuple(t for t in transfers if t.sent_bytes)

    def _norms(self, unit: Unit, column_bytes: int) -> Iterator[Transfer]:
        for weight in unit.weights:
            sums = weight.grid.sums if weight.grid is not None else 0
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                yield from [self._over_features(column_bytes, phase)] * sums

    def _module(self, unit: Unit, coordinate: AtpCoordinate, column_bytes: int) -> Iterator[Transfer]:
        matrices = [w for w in unit.weights if len(w.shape) == 2]
        width = next(coordinate.shape(w)[1] for w in matrices if is_column(w))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            yield self._over_interior(width * column_bytes, phase)
        for weight in matrices:
            columns = coordinate.shape(weight)[0 if is_column(weight) else 1]
            yield self._over_features(columns * column_bytes, Phase.FORWARD if is_column(weight) else Phase.BACKWARD)

    def _single(self, unit: Unit, coordinate: AtpCoordinate, tokens: int, batch: MicroBatch) -> Iterator[Transfer]:
        weight, column_bytes = unit.weights[0], tokens * batch.itemsize
        outputs, inputs = coordinate.shape(weight)
        num_products = unit.uses if unit.combine is Combine.CONCAT else unit.reads_in_backward
        for _ in range(unit.uses - num_products):
            yield self._over_interior(inputs * column_bytes, Phase.FORWARD)
        for _ in range(num_products):
            if is_column(weight):
                yield self._over_features(outputs * column_bytes, Phase.FORWARD)
            else:
                yield self._over_features(inputs * column_bytes, Phase.BACKWARD)
            if unit.logits:
                for numbers in (1, 2):  # the largest; the sum of exponentials and the target's
                    yield self._over_interior(numbers * tokens * batch.loss_itemsize, Phase.FORWARD)
            else:
                most = max(coordinate.shape(weight, interior=k)[0] for k in range(coordinate.num_interior))
                axis, size = self.interior_axis, coordinate.num_interior
                yield all_gather(most * column_bytes, axis=axis, size=size, phase=Phase.FORWARD)
            yield self._over_interior(inputs * column_bytes, Phase.BACKWARD)

    def _over_interior(self, payload_bytes: int, phase: Phase) -> Transfer:
        return all_reduce(payload_bytes, axis=self.interior_axis, size=self.axes[self.interior_axis], phase=phase)

    def _over_features(self, payload_bytes: int, phase: Phase) -> Transfer:
        return all_reduce(payload_bytes, axis=self.feature_axis, size=self.axes[self.feature_axis], phase=phase)

    def check(self, spec: ModelSpec) -> None:
        if spec.features_stay_whole:
            raise ConfigError(
                f"{self}: activations of {spec.name} cannot be cut along their features: {spec.features_stay_whole}. "
                "Write megatron, rtp or fsdp"
            )
        whole = [w.name for w in spec.weights if w.grid is not None and _without_interior(w)]
        if whole or not any(u.kind is UnitKind.MODULE for u in spec.units):
            raise ConfigError(
                f"{self}: {whole[0] if whole else spec.name!r} has no role in a plan that says where interiors begin. "
                "Write tesseract, summa, rtp or fsdp"
            )
        if spec.by_plan:
            raise ConfigError(f"{self}: a plan of your own has no cuts of features. Write megatron, rtp or fsdp")
        coordinate = self.coordinate(0)
        for unit in self.units_of(spec).units:
            for weight in unit.weights:
                cut = weight.grid or GridCut()
                if cut.columns is not None and weight.shape[cut.columns.dim] % coordinate.num_features:
                    raise ConfigError(
                        f"{self}: {weight.shape[cut.columns.dim]} features of {weight.name!r} do not divide over "
                        f"{coordinate.num_features} ranks. Write a size of that axis that divides them"
                    )
                if cut.rows is not None and cut.rows.groups < coordinate.num_interior:
                    raise ConfigError(
                        f"{self}: {weight.name!r} has {cut.rows.groups} groups (heads, columns) for "
                        f"{coordinate.num_interior} ranks. Write {cut.rows.groups} or less for that axis"
                    )
                if weight.beside_slices and cut.columns is not None:
                    raise ConfigError(
                        f"{self}: {weight.name!r} is a norm over all features inside of a module that is cut. "
                        "Write megatron, rtp or fsdp"
                    )

    def __str__(self) -> str:
        return f"atp={self.d1}x{self.d2}{self._options_text()}"


def is_column(weight: Weight) -> bool:
    """Returns True if a matrix maps features to interiors, as those of columns, heads and tables do."""
    return weight.grid is not None and weight.grid.columns is not None and weight.grid.columns.dim == 1


def _without_interior(weight: Weight) -> bool:
    """Returns True if a weight is more than a vector, and cut along features only."""
    cut = weight.grid or GridCut()
    return len(weight.shape) > 1 and cut.rows is None and cut.columns is not None


def _cut(unit: Unit, weight: Weight, *, whole: bool) -> GridCut:
    """The axes' cuts of a weight, derived from its cut on a square grid, where one axis cuts all features.

    Args:
        unit: the unit that owns it.
        weight: the weight.
        whole: it is inside an attention that is gathered.
    """
    cut = weight.grid or GridCut()
    first = unit.weights[0]
    if unit.kind is UnitKind.MODULE:
        return _matrix(cut, column=weight.cut is not None and weight.cut.dim == 0) if cut.rows else _vector(cut)
    if cut.is_table:
        return cut
    if unit.kind is UnitKind.WEIGHT:
        outer = first.grid or GridCut()
        if outer.is_table:  # the bias of a tied head
            return _vector(cut)
        if outer.rows is None or outer.columns is None:
            raise AssertionError(f"{first.name} is not cut")
        # The finer cut is that of features: heads are groups of them.
        if unit.logits or outer.rows.groups >= outer.columns.groups:
            return _matrix(cut, column=True) if cut.rows else _vector(cut)
        return GridCut(rows=outer.columns, columns=outer.columns)
    return GridCut() if whole else cut


def _matrix(cut: GridCut, *, column: bool) -> GridCut:
    return GridCut(rows=cut.columns, columns=cut.rows) if column else cut


def _vector(cut: GridCut) -> GridCut:
    return GridCut(rows=cut.columns)

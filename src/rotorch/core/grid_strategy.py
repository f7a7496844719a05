"""Base of `summa` and `tesseract`: blocks on square grids of ranks, one or several layers deep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.grid import ACROSS, DOWN, GridCoordinate
from rotorch.core.grid_memory import in_flight_bytes, slots_bytes, with_gathered_bytes
from rotorch.core.layout import Layout
from rotorch.core.spec import Cut, GridCut, ModelSpec, Unit, UnitKind
from rotorch.core.stages import with_features_cut
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Transfer


class GridStrategy(Strategy):
    """Blocks on grids of `rows` x `columns` ranks. Subclasses give the number of grids.

    Attributes:
        rows: of a grid.
        columns: of a grid, as many.
        transport: of blocks. "auto" takes shared memory between CPU ranks of one host, where ranks read blocks
            and add up parts in place, else messages.
    """

    held_by: ClassVar[str] = "rotorch.hold.grid"
    not_compiled: ClassVar[str] = "blocks are sent in the middle of layers, which cannot be compiled"
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
    def gradients_stay(self) -> bool:
        return True

    @property
    def num_layers(self) -> int:
        """Number of grids, one behind another, that hold the same weights."""
        return 1

    @property
    def in_shards(self) -> bool:
        """True if grids that hold the same weights share them at rest."""
        return False

    @property
    def axes(self) -> dict[str, int]:
        return {DOWN: self.rows, ACROSS: self.columns}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (DOWN,)

    @property
    def feature_axes(self) -> tuple[str, ...]:
        return (ACROSS,)

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        return with_features_cut(spec, ranks=self.columns)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        return self._with_buffers(self._coordinate(position).layout(unit), [unit], batch=None, position=position)

    def layout_of(self, spec: ModelSpec, *, batch: MicroBatch | None = None, position: int = 0) -> Layout:
        layout = super().layout_of(spec, batch=batch, position=position)
        return self._with_buffers(layout, spec.units, batch=batch, position=position)

    def _with_buffers(
        self, layout: Layout, units: Sequence[Unit], *, batch: MicroBatch | None, position: int
    ) -> Layout:
        coordinate, shared = self._coordinate(position), self.transport == "shared_memory"
        slots = slots_bytes(coordinate, units, batch=batch) if shared else 0
        in_flight = in_flight_bytes(coordinate, units, batch=batch, shared=shared)
        transient = slots + with_gathered_bytes(coordinate, units, in_flight=in_flight, shared=shared)
        transfers = () if shared else layout.transfers
        return replace(layout, transient_bytes=transient, slots_bytes=slots, transfers=transfers)

    def keeps_copies(self, unit: Unit) -> bool:
        return not (self.in_shards and self.num_layers > 1)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        if self.transport == "shared_memory":
            return ()
        return tuple(self._coordinate(position).activation_transfers(unit, batch))

    def _coordinate(self, position: int) -> GridCoordinate:
        return GridCoordinate.at(position, size=self.rows, depth=self.num_layers, in_shards=self.in_shards)

    def check(self, spec: ModelSpec) -> None:
        _check_grid(spec, strategy=str(self), size=self.rows)

    def on_device(self, device_type: str) -> Self:
        if self.transport == "shared_memory" and device_type != "cpu":
            raise ConfigError(
                f"{self.kind}: transport=shared_memory works between CPU ranks, not on {device_type}. "
                "Write transport=auto"
            )
        return self

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

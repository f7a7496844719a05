"""summa: 2-D tensor parallelism. Every matrix in blocks on one square grid of ranks.

Idea
    `tesseract` with a single layer, by the same code: each matrix product goes block by block, blocks of activations
    broadcast along rows of the grid and blocks of weights along columns. Source: Optimus (Xu et al., arXiv 2104.05343);
    SUMMA (van de Geijn and Watts, 1997).

Picture (q = 2; y = x W; a digit pair is a block's row and column)
               holds    t = 0: x . W       t = 1: x . W
    rank 0,0 | 00 00 |  00 . 00 <- own  |  01 . 10 <- x from its row, W from its column |  y 00
    rank 0,1 | 01 01 |  00 . 01         |  01 . 11                                     |  y 01
    rank 1,0 | 10 10 |  10 . 00         |  11 . 10                                     |  y 10
    rank 1,1 | 11 11 |  10 . 01         |  11 . 11                                     |  y 11

Layout
    `W[D_row, F_col]`, `E[V_row, D_col]`, norms and biases `[D_col]`, activations `[b/q, s, D_col]`.

Cost (a layer of P bytes of weights; x, w what this rank has of its inputs and weights)
    Resident P/q^2. Transient one or two blocks of other ranks and two parts of gradients. Sent (q-1) (x + w) in
    forward, twice that in backward; numbers per token for norms and the loss.

Deviations
    Attention is local: heads lie in columns, whole sequences in rows. Vocabularies need not divide by q.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.grid import ACROSS, DOWN, GridPlace, check_grid
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Transfer


class SUMMA(Strategy):
    """Blocks on a grid of `rows` x `columns` ranks. Written `summa=2x2`.

    Attributes:
        rows: of the grid.
        columns: of the grid, as many.
        transport: how blocks travel. "auto" takes shared memory between CPU ranks of one host, where ranks read blocks
            and add up parts in place, else messages.
    """

    kind: ClassVar[str] = "summa"
    cuts_weights: ClassVar[bool] = True
    size_fields: ClassVar[tuple[str, ...]] = ("rows", "columns")
    rows: PositiveInt
    columns: PositiveInt
    transport: Literal["auto", "shared_memory", "messages"] = "auto"

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if self.rows != self.columns:
            raise ConfigError(
                f"summa: a grid of {self.rows} x {self.columns} is not square. Write "
                f"summa={self.rows}x{self.rows} or summa={self.columns}x{self.columns}"
            )
        return self

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
        return GridPlace.at(position, size=self.rows, depth=1)

    def check(self, spec: ModelSpec) -> None:
        check_grid(spec, strategy=str(self), size=self.rows)

    def check_device(self, device_type: str) -> None:
        if self.transport == "shared_memory" and device_type != "cpu":
            raise ConfigError(
                f"{self.kind}: transport=shared_memory works between CPU ranks, not on {device_type}. "
                "Write transport=auto"
            )

    def __str__(self) -> str:
        return f"summa={self.rows}x{self.columns}{self._options_text()}"

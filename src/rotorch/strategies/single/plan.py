"""single: one process, nothing moves.

Idea
    The model as it is. The same code path as every other strategy with one rank, and the reference for all of them.

Picture
    rank 0 | F F F F B B B B step |

Layout
    Every weight whole: `W[F, D]`.

Cost
    Resident P, sent nothing.

Deviations
    None.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rotorch.core.layout import Layout
from rotorch.core.spec import Unit
from rotorch.core.strategy import Strategy


class Single(Strategy):
    """One process holds everything. Written `single`, or `single[recompute=block]`.

    Attributes:
        recompute: computed again in backward: nothing, or every repeated block from its inputs (activation
            checkpointing).
    """

    kind: ClassVar[str] = "single"
    not_compiled: ClassVar[str] = ""
    size_fields: ClassVar[tuple[str, ...]] = ()
    recompute: Literal["none", "block"] = "none"

    @property
    def axes(self) -> dict[str, int]:
        return {"single": 1}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        return Layout(resident_bytes=unit.num_bytes)

    def __str__(self) -> str:
        return f"single{self._options_text()}"

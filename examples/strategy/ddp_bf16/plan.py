"""ddp_bf16: data parallelism that sums gradients once a step, in bfloat16 if asked to.

Idea
    As `ddp`, but all gradients are summed after the last backward, and may be rounded to bfloat16 before they travel.

Picture (2 ranks over time; R = all-reduce of all gradients)
    rank 0 | F0 F0 F0 B0 B0 B0 R step |
    rank 1 | F1 F1 F1 B1 B1 B1 R step |

Layout
    Every weight whole on every rank.

Cost
    Resident P. Sent 2 (n-1)/n G per rank and step, G / 2 in place of G for float32 gradients that travel in bfloat16.

Deviations
    With `bfloat16=true` gradients lose 16 of their 24 digits (binary), so training differs from one process's.
"""

from __future__ import annotations

from typing import ClassVar

from rotorch.core.layout import Layout
from rotorch.core.spec import Unit
from rotorch.core.strategy import OneAxis
from rotorch.core.traffic import all_reduce


class DDPBF16(OneAxis):
    """`size` replicas of the model. Written `ddp_bf16=2[bfloat16=true]`.

    Attributes:
        size: number of replicas.
        bfloat16: round gradients before they are summed.
    """

    kind: ClassVar[str] = "ddp_bf16"
    held_by: ClassVar[str] = "ddp_bf16.apply"
    not_compiled: ClassVar[str] = ""
    bfloat16: bool = False

    @property
    def changes_the_model(self) -> str:
        return "gradients are summed in bfloat16" if self.bfloat16 else ""

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        sent = sum(w.numel * (2 if self.bfloat16 else w.itemsize) for w in unit.weights if w.trained)
        return Layout(resident_bytes=unit.num_bytes, transfers=(all_reduce(sent, axis=self.kind, size=self.size),))

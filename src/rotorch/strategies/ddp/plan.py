"""ddp: distributed data parallel. Every rank holds the whole model and its own micro-batch.

Idea
    Each rank computes the gradient of its own data; one all-reduce per step makes the sum known to all. Source: torch
    `DistributedDataParallel` (Li et al., VLDB 2020, arXiv 2006.15704), which does the work here.

Picture (4 ranks over time; R = all-reduce of a bucket, under the rest of backward)
    rank 0 | F0 F0 F0 B0 B0R B0R R step |
    rank 1 | F1 F1 F1 B1 B1R B1R R step |
    rank 2 | F2 F2 F2 B2 B2R B2R R step |
    rank 3 | F3 F3 F3 B3 B3R B3R R step |

Layout
    Every weight whole on every rank: `W[F, D]`. Over another strategy (`ddp=2,rtp=4`): that strategy's layout.

Cost
    Resident P. Sent 2 (n-1)/n G per rank and step, hidden under backward: by DDP's buckets, or in parts of what another
    strategy holds, where that says when gradients are complete (rtp, fsdp and megatron, in `forward_backward`).

Deviations
    Gradients are summed, not averaged: the loss is already divided by the global number of target tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import Unit
from rotorch.core.strategy import OneAxis, Strategy
from rotorch.core.traffic import all_reduce


class DDP(OneAxis):
    """`size` replicas of the model, or of the inner strategy's model. Written `ddp=2`.

    Attributes:
        size: number of replicas.
        recompute: computed again in backward: nothing, or every repeated block from its inputs (activation
            checkpointing). Over another strategy that one decides.
    """

    kind: ClassVar[str] = "ddp"
    ranks_alike: ClassVar[bool] = True
    not_compiled: ClassVar[str] = ""
    not_recorded: ClassVar[str] = ""
    recompute: Literal["none", "block"] = "none"

    @property
    def gradients_stay(self) -> bool:
        return True

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        return Layout(
            resident_bytes=unit.num_bytes,
            transfers=(all_reduce(unit.trained_bytes, axis="ddp", size=self.size),),
        )

    def check_around(self, inner: Strategy) -> None:
        if self.recompute != "none":
            raise ConfigError(
                f"ddp: recompute={self.recompute} around '{inner}': the strategy inside runs the model, so it decides "
                f"what is computed again. Write ddp={self.size} and the option inside the brackets of {inner.kind}"
            )

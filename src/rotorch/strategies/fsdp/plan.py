"""fsdp: fully sharded data parallel, by torch's `fully_shard` (FSDP2).

Idea
    Every rank keeps 1/n of each weight and gathers one block whole just before it is used; gradients are
    reduce-scattered.
    Source: ZeRO stage 3 (Rajbhandari et al., arXiv 1910.02054), torch `fully_shard`.

Picture (4 ranks over time; G = all-gather of a block, S = reduce-scatter of its gradients)
    rank 0 | G F0 G F0 G F0 | G B0 S G B0 S G B0 S | step |
    rank 1 | G F1 G F1 G F1 | G B1 S G B1 S G B1 S | step |
    (ranks 2 and 3 likewise: all gather the same block at the same time)

Layout
    `W[F/n, D]`: cut along the first dimension, whatever it means.

Cost
    Resident P/n. Transient: whole blocks, about 3 in forward and 4 to 5 in backward. Sent (n-1)/n (P + P + G).

Deviations
    Gradients are summed, not averaged. One group per decoder block; embedding, head and final norm form the root group.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.gathered import gathered_layout
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import Phase


class FSDP(Strategy):
    """Weights cut over `size` ranks, gathered block by block. Written `fsdp=4`, or `fsdp=4[reshard=false]`.

    Attributes:
        size: number of ranks.
        reshard: free a block's gathered weights after its forward (and gather them again for backward).
        recompute: computed again in backward: nothing, or every repeated block from its inputs (activation
            checkpointing); gathers nothing more.
    """

    kind: ClassVar[str] = "fsdp"
    has_param_dtype: ClassVar[bool] = True
    cuts_weights: ClassVar[bool] = True
    gathers_weights: ClassVar[bool] = True
    size: PositiveInt
    reshard: bool = True
    recompute: Literal["none", "block"] = "none"

    @property
    def axes(self) -> dict[str, int]:
        return {"fsdp": self.size}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ("fsdp",)

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute == "block"

    def check(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` for a weight without a first dimension."""
        scalars = [weight.name for weight in spec.weights if not weight.shape]
        if scalars:
            raise ConfigError(
                f"fsdp: {scalars[0]!r} is a scalar, and weights are cut along their first dim. Give it the shape [1], "
                "or write rtp or ddp"
            )

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        gathers = [Phase.FORWARD, Phase.BACKWARD] if self.reshard else [Phase.FORWARD]
        return gathered_layout(
            unit,
            size=self.size,
            position=position,
            axis="fsdp",
            gathers=gathers,
            transient_bytes=4 * unit.num_bytes,
        )

    def __str__(self) -> str:
        return f"fsdp={self.size}{self._options_text()}"

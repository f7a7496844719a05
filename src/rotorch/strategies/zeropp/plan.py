"""zeropp: pipeline stages whose weights are sharded, and gathered once for many micro-batches. No tensor parallelism.

Idea
    The ranks of a stage each hold a part of its weights. Micro-batches go in units of U: a stage is gathered once for
    the forwards of a unit and once for its backwards, and its gradients are summed once. Backward is split in two, and
    weight gradients fill the bubbles. Source: ZeroPP (Tang et al., arXiv 2402.03791).

Picture (2 stages, a unit of 3 micro-batches; G = all-gather, S = reduce-scatter, I and W = the halves of backward)
    rank 0 | G F0 F1 F2 -- G I0 W0 I1 W1 I2 W2 S | step |
    rank 1 | -- G F0 F1 F2 I0 I1 I2 W0 W1 W2 S -- | step |
    (the other ranks of each stage likewise, with micro-batches of their own; `schedule.py` has the rule)

Layout
    `W[F/n, D]` of the layers of a rank's stages: cut along the first dimension, of any meaning. With V `chunks` a
    rank holds V stages, every P-th.

Cost (P stages on as many ranks, n shards, a stage of B bytes, hidden states of A bytes)
    resident   1/(P n) of the weights.
    transient  One stage whole (two while the next is under way) and its gradient, and activations of up to 1 or 2 units
               (schedule.py).
    sent       per unit and stage (n-1)/n (2 B + G), or B + G where a stage's forwards and backwards mix (fsdp sends as
               much per micro-batch); A per micro-batch and boundary in forward, A in backward.
    hides      Bubbles of P-1 chunk slots in a whole step, if U >= 2P-1 or, with chunks, U >= P. A gather runs beside
               the computation before its first use, if that is another stage's; a sum until new gradients are made.

Deviations
    Weight gradients of linear layers are put off, those of other layers are not. `zeropp=2x4[inner=rtp]`, short for
    `zeropp=2x1,rtp=4`, has rtp inside the stages: the same table, no gathers for a unit to share, and nothing that is
    ever whole; there weight gradients are computed with those of inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.gathered import gathered_layout
from rotorch.core.layout import Layout
from rotorch.core.spec import Unit
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import Phase, Transfer
from rotorch.pipelining.actions import Schedule
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule, smallest_unit

STAGES, SHARDS = "zeropp_stages", "zeropp_shards"


class ZeroPP(StageStrategy):
    """Stages over `stages` ranks, each sharded over `shards`. Written `zeropp=2x4`, or `zeropp=2x4[chunks=2,unit=4]`.

    Attributes:
        shards: number of ranks that share a stage, each with micro-batches of its own.
        inner: how these ranks share it: they gather its shards ("fsdp"), or rotate them ("rtp").

    The others are those of `StageStrategy`; `chunks`, left out, is 1, and `unit` the fewest micro-batches that leave no
    bubble but that of filling the pipeline, or all of a step.
    """

    kind: ClassVar[str] = "zeropp"
    not_compiled: ClassVar[str] = ""
    gathers_weights: ClassVar[bool] = True
    stage_axis: ClassVar[str] = STAGES
    size_fields: ClassVar[tuple[str, ...]] = ("stages", "shards")
    shards: PositiveInt
    inner: Literal["fsdp", "rtp"] = "fsdp"

    @property
    def axes(self) -> dict[str, int]:
        return {STAGES: self.stages, SHARDS: self.shards}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (SHARDS,)

    @property
    def ranks_per_stage(self) -> int:
        return self.shards

    @property
    def splits_backward(self) -> bool:
        return True

    @property
    def short_for(self) -> str:
        if self.inner == "fsdp":
            return ""
        return f"{self.model_copy(update={'shards': 1, 'inner': 'fsdp'})},{self.inner}={self.shards}"

    def unit_of(self, num_micro_batches: int) -> int:
        usual = smallest_unit(num_ranks=self.stages, num_chunks=self.num_chunks)
        return min(self.unit or usual, num_micro_batches)

    def table(self, num_micro_batches: int) -> Schedule:
        return make_zeropp_schedule(
            num_ranks=self.stages, num_chunks=self.num_chunks, num_micro_batches=num_micro_batches, unit=self.unit
        )

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        shard = position % self.shards
        held = super().layout(unit, position=position)
        if not held.resident_bytes and not held.transient_bytes:
            return held
        shards = gathered_layout(
            unit,
            size=self.shards,
            position=shard,
            axis=SHARDS,
            gathers=[Phase.FORWARD, Phase.BACKWARD],
            transient_bytes=unit.bytes_in_pass + unit.num_bytes,
        )
        # A weight that another stage borrows, and its gradient, travels from shard to shard.
        scaled = [_scaled(t, by=shards.resident_bytes, of=unit.num_bytes) for t in held.transfers]
        resident = shards.resident_bytes if held.resident_bytes else 0
        return replace(shards, resident_bytes=resident, transfers=(*shards.transfers, *scaled))

    def keeps_copies(self, unit: Unit) -> bool:
        return False

    def check_around(self, inner: Strategy) -> None:
        if self.shards > 1:
            raise ConfigError(
                f"{self} around {inner}: {inner.kind} distributes a stage over its ranks, without further shards. "
                f"Write {self.kind}={self.stages}x1,{inner}"
            )
        super().check_around(inner)


def _scaled(transfer: Transfer, *, by: int, of: int) -> Transfer:
    num_bytes = transfer.sent_bytes * by // max(of, 1)
    return replace(transfer, payload_bytes=num_bytes, sent_bytes=num_bytes)

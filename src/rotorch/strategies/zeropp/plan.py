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
    `W[F/n, D]` of the layers of a rank's stages: cut along the first dimension, whatever it means. With V `chunks` a
    rank holds V stages, every P-th.

Cost (P stages on as many ranks, n shards, a stage of B bytes, hidden states of A bytes)
    resident   1/(P n) of the weights.
    transient  One stage whole and its gradient, and activations of up to 1 or 2 units (schedule.py).
    sent       per unit and stage (n-1)/n (2 B + G), or B + G where a stage's forwards and backwards mix (fsdp sends as
               much per micro-batch); A per micro-batch and boundary in forward, A in backward.
    hides      Bubbles of P-1 chunk slots in a whole step, if U >= 2P-1 or, with chunks, U >= P.

Deviations
    Gathers are not started ahead of their use. Weight gradients of linear layers are put off, those of other layers are
    not. For `rtp` inside the stages, where nothing is gathered, write `pp=P,rtp=n`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.gathered import gathered_layout
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.stages import check_stage_device, check_stages, of_stages, stage_layout, stage_transfers, with_stages
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Phase, Transfer
from rotorch.pipelining.actions import Placement, Schedule
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule

STAGES, SHARDS = "zeropp_stages", "zeropp_shards"


class ZeroPP(Strategy):
    """Stages over `stages` ranks, each sharded over `shards`. Written `zeropp=2x4`, or `zeropp=2x4[chunks=2,unit=4]`.

    Attributes:
        stages: number of ranks that a micro-batch passes.
        shards: number of ranks that share a stage, each with micro-batches of its own.
        chunks: stages that each rank holds.
        unit: micro-batches per gather of weights and sum of gradients; left out: the fewest that leave no bubble but
            that of filling the pipeline, or all of a step.
        recompute: what backward computes again: nothing, or every layer from its inputs (activation checkpointing).
    """

    kind: ClassVar[str] = "zeropp"
    cuts_weights: ClassVar[bool] = True
    size_fields: ClassVar[tuple[str, ...]] = ("stages", "shards")
    stages: PositiveInt
    shards: PositiveInt
    chunks: PositiveInt = 1
    unit: PositiveInt | None = None
    recompute: Literal["none", "block"] = "none"

    @property
    def axes(self) -> dict[str, int]:
        return {STAGES: self.stages, SHARDS: self.shards}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (SHARDS,)

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.stages * self.chunks

    @property
    def placement(self) -> Placement:
        """Which rank has which stage."""
        return Placement.LOOP

    def rank_of(self, stage: int) -> int:
        """Which of the ranks that a micro-batch passes holds a stage."""
        return self.placement.rank_of(stage, num_ranks=self.stages)

    def table(self, num_micro_batches: int) -> Schedule:
        """Who computes what when, in a step of so many micro-batches."""
        return make_zeropp_schedule(
            num_ranks=self.stages, num_chunks=self.chunks, num_micro_batches=num_micro_batches, unit=self.unit
        )

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        self.check(spec)
        return with_stages(spec, num_stages=self.num_stages)

    def part_of(self, spec: ModelSpec, *, position: int) -> ModelSpec:
        return of_stages(spec, mine=lambda stage: self.rank_of(stage) == position // self.shards)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        stage, shard = divmod(position, self.shards)
        held = stage_layout(unit, position=stage, rank_of=self.rank_of, axis=STAGES)
        if not held.resident_bytes and not held.transient_bytes:
            return held
        shards = gathered_layout(
            unit,
            size=self.shards,
            position=shard,
            axis=SHARDS,
            gathers=[Phase.FORWARD, Phase.BACKWARD],
            transient_bytes=2 * unit.num_bytes,
        )
        # What is lent to another stage, and its gradient, travels from shard to shard.
        scaled = [_scaled(t, by=shards.resident_bytes, of=unit.num_bytes) for t in held.transfers]
        resident = shards.resident_bytes if held.resident_bytes else 0
        return replace(shards, resident_bytes=resident, transfers=(*shards.transfers, *scaled))

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        return stage_transfers(
            unit,
            batch=batch,
            position=position // self.shards,
            num_stages=self.num_stages,
            rank_of=self.rank_of,
            axis=STAGES,
        )

    def check_device(self, device_type: str) -> None:
        check_stage_device(device_type, strategy=str(self))

    def check_micro_batches(self, number: int) -> None:
        self.table(number)

    def check(self, spec: ModelSpec) -> None:
        check_stages(spec, num_stages=self.num_stages, strategy=str(self))

    def __str__(self) -> str:
        return f"zeropp={self.stages}x{self.shards}{self._options_text()}"


def _scaled(transfer: Transfer, *, by: int, of: int) -> Transfer:
    num_bytes = transfer.sent_bytes * by // max(of, 1)
    return replace(transfer, payload_bytes=num_bytes, sent_bytes=num_bytes)

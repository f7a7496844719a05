"""pp: pipeline parallelism. Every rank holds some layers, and micro-batches pass from rank to rank.

Idea
    A model is cut between layers into stages; a rank computes its stage for one micro-batch after another and hands
    the hidden states on. Sources: GPipe (Huang et al., arXiv 1811.06965) and 1F1B (PipeDream, Narayanan et al., arXiv
    1806.03377); ZB-H1 (Qi et al., arXiv 2401.10241) fills bubbles with weight gradients. `pipelining/` has the tables.

Picture (2 ranks, 4 micro-batches over time, 1F1B; - = bubble)
    rank 0 | F0 F1 -- B0 -- F2 B1 -- F3 B2 -- -- B3 | step |
    rank 1 | -- F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- | step |

Layout
    Whole layers: a weight is on the rank of its stage, and nowhere else. Over another strategy (`pp=2,rtp=4`) the ranks
    of a stage hold that strategy's parts of it.

Cost (P ranks, M micro-batches, hidden states of A bytes)
    resident   P-th part of the weights, as even as whole layers allow; embedding and head count (core/stages.py).
    sent       A per micro-batch and boundary in forward, A in backward.
    hides      Little: a tensor travels when it is asked for. Ranks wait (P-1)/(M+P-1) of the time in both schedules;
               1F1B keeps the activations of at most P micro-batches, ZB-H1 waits a third as long.

Deviations
    Stages run the model's own forward (models/stages.py). An embedding tied to a head is held by the first stage; the
    last borrows it for a step. What all ranks of a stage gather (`pp=2,fsdp=2`) is gathered once per `unit` of
    micro-batches and direction, not per micro-batch. Under ZB-H1 weight gradients of linear layers are put off, those
    of others are not; inside of `rtp` and `megatron`, which run layers their own way, none are.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.stages import check_stage_device, check_stages, of_stages, stage_layout, stage_transfers, with_stages
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Transfer
from rotorch.pipelining.actions import Placement, Schedule
from rotorch.pipelining.baselines import make_schedule

_AXIS = "pp"


class PP(Strategy):
    """A model's layers over `stages` ranks. Written `pp=4`, or `pp=4[schedule=gpipe]`.

    Attributes:
        stages: number of ranks.
        schedule: in which order a rank does its forwards and backwards.
        unit: micro-batches that share a gather of weights and a sum of gradients, where these are gathered at all;
            left out: all of a step.
        recompute: what backward computes again: nothing, or every layer from its inputs (activation checkpointing).
    """

    kind: ClassVar[str] = "pp"
    cuts_weights: ClassVar[bool] = True
    size_fields: ClassVar[tuple[str, ...]] = ("stages",)
    stages: PositiveInt
    schedule: Literal["1f1b", "gpipe", "zb_h1"] = "1f1b"
    unit: PositiveInt | None = None
    recompute: Literal["none", "block"] = "none"

    @property
    def axes(self) -> dict[str, int]:
        return {_AXIS: self.stages}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.stages

    @property
    def placement(self) -> Placement:
        """Which rank has which stage."""
        return Placement.LOOP

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.placement.rank_of(stage, num_ranks=self.stages)

    def table(self, num_micro_batches: int) -> Schedule:
        """Who computes what when, in a step of so many micro-batches."""
        return make_schedule(self.schedule, num_ranks=self.stages, num_micro_batches=num_micro_batches, unit=self.unit)

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        self.check(spec)
        return with_stages(spec, num_stages=self.num_stages)

    def part_of(self, spec: ModelSpec, *, position: int) -> ModelSpec:
        return of_stages(spec, mine=lambda stage: self.rank_of(stage) == position)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        return stage_layout(unit, position=position, rank_of=self.rank_of, axis=_AXIS)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        return stage_transfers(
            unit, batch=batch, position=position, num_stages=self.num_stages, rank_of=self.rank_of, axis=_AXIS
        )

    def check_device(self, device_type: str) -> None:
        check_stage_device(device_type, strategy=str(self))

    def check_micro_batches(self, number: int) -> None:
        self.table(number)

    def check(self, spec: ModelSpec) -> None:
        check_stages(spec, num_stages=self.num_stages, strategy=str(self))

    def check_around(self, inner: Strategy) -> None:
        if self.recompute != "none":
            raise ConfigError(
                f"{self} around {inner}: what is computed again is up to the strategy that holds the stages. "
                f"Write pp={self.stages},{inner.kind}=..[recompute=...]"
            )

    def __str__(self) -> str:
        return f"pp={self.stages}{self._options_text()}"

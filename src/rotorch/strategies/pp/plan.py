"""pp: pipeline parallelism. Every rank holds some layers, and micro-batches pass from rank to rank.

Idea
    A model is cut between layers into stages; a rank computes its stage for one micro-batch after another and hands
    the hidden states on. Sources: GPipe (Huang et al., arXiv 1811.06965) and 1F1B (PipeDream, Narayanan et al., arXiv
    1806.03377); interleaved (arXiv 2104.04473) and looped breadth-first (arXiv 2211.05953), which give a rank several
    stages; ZB-H1 and ZBV (Qi et al., arXiv 2401.10241), which fill bubbles with weight gradients. `pipelining/` has the
    tables.

Picture (2 ranks, 4 micro-batches over time, 1F1B; - = bubble)
    rank 0 | F0 F1 -- B0 -- F2 B1 -- F3 B2 -- -- B3 | step |
    rank 1 | -- F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- | step |

Layout
    Whole layers: a weight is on the rank of its stage, and nowhere else. Over another strategy (`pp=2,rtp=4`), or two
    (`pp=2,fsdp=4,megatron=4`), the ranks of a stage hold that strategy's parts of it; on grids, where activations are
    cut along their features, each passes its part of them on. With V `chunks` a rank holds V stages: every P-th, or,
    under zbv, one on the way there and one on the way back.

Cost (P ranks, M micro-batches, hidden states of A bytes)
    resident   P-th part of the weights, more or less: stages are balanced by their time, head included
               (core/stage_balance.py), within `rank_memory=2GiB` where that is written; or write `layers=3-5`.
    sent       A per micro-batch and boundary in forward, A in backward.
    hides      Tensors: receives are posted ahead. Ranks wait (P-1)/(M+P-1) of the time in both schedules; 1F1B keeps
               the activations of at most P micro-batches, ZB-H1 waits a third as long. Interleaved 1F1B waits a V-th of
               that, and sends V times as much; ZBV not at all once the pipeline is full.

Deviations
    Stages run the model's own forward (models/stages.py). An embedding tied to a head is held by the first stage; the
    last borrows it for a step. Stages in shards (`pp=2,fsdp=2`) are gathered once per `unit` of
    micro-batches and direction, not per micro-batch. Under ZB-H1 and ZBV weight gradients of linear layers are put off,
    those of others are not; inside of `rtp` and `megatron`, which run layers their own way, none are.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rotorch.pipelining.actions import Placement, Schedule
from rotorch.pipelining.baselines import BASELINES, check_chunks, make_schedule
from rotorch.pipelining.stage_strategy import StageStrategy


class PP(StageStrategy):
    """A model's layers over `stages` ranks. Written `pp=4`, or `pp=4[schedule=interleaved_1f1b,chunks=2]`.

    Attributes:
        schedule: order of a rank's forwards and backwards. Only interleaved_1f1b, looped_bfs and zbv give
            a rank several stages: two, if `chunks` is left out, and to zbv always.

    The others are those of `StageStrategy`; `unit`, left out, is all micro-batches of a step.
    """

    kind: ClassVar[str] = "pp"
    not_compiled: ClassVar[str] = ""
    stage_axis: ClassVar[str] = "pp"
    size_fields: ClassVar[tuple[str, ...]] = ("stages",)
    schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zb_h1", "zbv"] = "1f1b"

    @model_validator(mode="after")
    def _has_such_chunks(self) -> Self:
        check_chunks(self.schedule, num_chunks=self.num_chunks)
        return self

    @property
    def axes(self) -> dict[str, int]:
        return {self.stage_axis: self.stages}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ()

    @property
    def num_chunks(self) -> int:
        return self.chunks or BASELINES[self.schedule].usual_chunks

    @property
    def placement(self) -> Placement:
        return BASELINES[self.schedule].placement

    @property
    def splits_backward(self) -> bool:
        return self.schedule in ("zb_h1", "zbv")

    def table(self, num_micro_batches: int) -> Schedule:
        return make_schedule(
            self.schedule,
            num_ranks=self.stages,
            num_chunks=self.num_chunks,
            num_micro_batches=num_micro_batches,
            unit=self.unit,
        )

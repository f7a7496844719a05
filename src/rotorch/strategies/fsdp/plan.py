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
    `W[F/n, D]`: cut along the first dimension, of any meaning.

Cost
    Resident P/n. Transient: whole blocks, about 3 in forward and 4 to 5 in backward. Sent (n-1)/n (P + P + G), of what
    is outside of blocks (n-1)/n (P + G).
    With `context=c` each rank has T/c of a sequence's T tokens and gets keys and values that these attend to, K
    features per token and layer: sent 3/4 (c-1)/c T K in forward on average, at most 2 w K with a window of w tokens
    (again where blocks are recomputed), as much for their gradients. With `exchange=heads` it gets all tokens of some
    heads, and sends outputs back: (c-1)/c^2 T (2 D + K) in forward, with D features of queries, as much in backward.

Mixtures of experts (`experts=whole`; `ep=n` is `fsdp=n[experts=whole]`)
    Every rank keeps E/n whole experts of each layer (of uneven numbers the first ranks have one more), which are never
    gathered: a pair of a token and an expert goes to the expert's rank, and its row of the output comes back. All else
    is as without. Of T tokens per rank with D features of b bytes, k experts each, a layer sends 4 k (n-1)/n T D b if
    routing is even, in place of 3 (n-1)/n times the bytes of its experts: less up to T = 3 E bytes / (4 k D b) tokens.
    What moves is the counterpart of `rtp=n[experts=whole]`, where experts travel and tokens stay.

Around another strategy (`fsdp=a,megatron=b`)
    The a ranks with the same slices of weights share them: each has 1/a of each slice's rows, P/(a b) in all, and
    gathers the slices of one block, P_block/b, just before they are used, and those of the next under that. Outside of
    the blocks (embedding, head, last norm) slices are gathered once a step, in a loop of one's own once for each of its
    passes. Sent (a-1)/a (P + P + G)/b, beside what the inner strategy sends. In stages around both
    (`pp=p,fsdp=a,megatron=b`) all slices of a stage come at once, for a unit of micro-batches and a direction.

Deviations
    Gradients are summed, not averaged. One group per decoder block; embedding, head and final norm form the root group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.gathered import blocks_layout, slices_layout, with_blocks_noted, with_rows
from rotorch.core.layout import Layout
from rotorch.core.shared_context import SequenceRanks, check_divides, check_shares, key_value_transfers
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.strategy import OneAxis, Strategy
from rotorch.core.traffic import MicroBatch, Transfer
from rotorch.core.whole_experts import (
    WholeExperts,
    check_every_rank_has_some,
    check_whole_experts,
    token_transfers,
    with_whole_experts,
)
from rotorch.core.whole_units import check_memory, is_whole, whole_layout, with_whole_units


class FSDP(OneAxis):
    """Weights cut over `size` ranks, gathered block by block. Written `fsdp=4`, or `fsdp=4[reshard=false]`.

    Attributes:
        size: number of ranks.
        reshard: free a block's gathered weights after its forward (and gather them again for backward).
        recompute: computed again in backward: nothing, or every repeated block from its inputs (activation
            checkpointing); gathers no more weights.
        context: number of neighbours that share a batch, each with its part of the tokens: keys and values are
            exchanged among them. It divides `size`.
        exchange: among neighbours that share a batch. "gather": each gets the keys and values that its own tokens
            attend to, and keeps them for backward. "heads": each gets all tokens of some heads, and gives their outputs
            back; it keeps 1/context of them, and sends less the more ranks share (docs/long_context.md).
        memory: budget of a rank for weights, gradients and AdamW's moments, written `2GiB`: units that are worth most
            are whole on every rank within it (`osdp=4[memory=2GiB,inner=fsdp]`, core/whole_units.py).
        experts: "cut": experts are gathered with their block. "whole": each rank keeps a set of whole experts, and
            tokens travel to these and back. `ep=4` is short for `fsdp=4[experts=whole]`.
    """

    kind: ClassVar[str] = "fsdp"
    not_compiled: ClassVar[str] = ""
    cuts_weights: ClassVar[bool] = True
    gathers_weights: ClassVar[bool] = True
    shares_inside: ClassVar[bool] = True
    reshard: bool = True
    recompute: Literal["none", "block"] = "none"
    context: PositiveInt = 1
    exchange: Literal["gather", "heads"] = "gather"
    memory: str | None = None
    experts: Literal["cut", "whole"] = "cut"

    @model_validator(mode="after")
    def _context_divides(self) -> Self:
        check_divides(size=self.size, context=self.context, kind=self.kind)
        check_memory(self.memory, kind=self.kind, context=self.context)
        return self

    @property
    def context_axes(self) -> dict[str, int]:
        return {"fsdp": self.context} if self.context > 1 else {}

    @property
    def sequence_ranks(self) -> SequenceRanks:
        return SequenceRanks(self.context, by_heads=self.exchange == "heads")

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        forwards = 2 if self.recompute == "block" else 1
        return (
            *key_value_transfers(
                unit,
                batch=batch,
                shared_by=self.sequence_ranks,
                axis="fsdp",
                position=position,
                num_forwards=forwards,
            ),
            *(
                token_transfers(
                    unit, batch=batch, size=self.size, axis="fsdp", context=self.context, num_forwards=forwards
                )
                if not is_whole(unit)
                else ()
            ),
        )

    def check(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` for a weight without a first dimension, or sequences that cannot be shared."""
        check_shares(spec, context=self.context, exchange=self.exchange, kind=self.kind)
        scalars = [weight.name for weight in spec.weights if not weight.shape]
        if scalars:
            raise ConfigError(
                f"fsdp: {scalars[0]!r} is a scalar, and weights are cut along their first dim. Give it the shape [1], "
                "or write rtp or ddp"
            )
        if self.experts == "whole":
            check_whole_experts(spec, kind=self.kind)
            check_every_rank_has_some(with_whole_experts(spec), size=self.size, kind=self.kind)
        if self.memory is not None:
            self.units_of(spec)  # finds units that fit into it, or says that none do

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        spec = with_blocks_noted(spec)
        if self.experts == "whole":
            spec = with_whole_experts(spec)
        if self.memory is None:
            return spec
        in_parts = self.model_copy(update={"memory": None})
        return with_whole_units(spec, strategy=in_parts, axis="fsdp", memory=self.memory)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        if is_whole(unit):
            return whole_layout(unit, axis="fsdp", size=self.size)
        if unit.note(WholeExperts) is not None:
            return Layout(resident_bytes=unit.slice_bytes(num_slices=self.size, index=position))
        if unit.stages:  # gathered at once, outside of blocks, too
            unit = replace(unit, notes=())
        return blocks_layout(unit, size=self.size, position=position, axis="fsdp", again=self.reshard)

    def keeps_copies(self, unit: Unit) -> bool:
        return is_whole(unit) or unit.note(WholeExperts) is not None

    def held(self, unit: Unit, *, layout: Layout, position: int = 0) -> Unit:
        if is_whole(unit) or unit.note(WholeExperts) is not None:
            return super().held(unit, layout=layout, position=position)
        return with_rows(unit, size=self.size, position=position)

    def layout_around(self, unit: Unit, *, position: int = 0) -> Layout:
        if unit.stages:
            return self.layout(unit, position=position)
        return slices_layout(unit, size=self.size, position=position, axis="fsdp", again=self.reshard)

    def without_idle_options(self) -> Self:
        return self if self.context > 1 else self.model_copy(update={"exchange": "gather"})

    def check_around(self, inner: Strategy) -> None:
        without = self.model_copy(update={"context": 1, "exchange": "gather", "memory": None, "experts": "cut"})
        if self != without:
            raise ConfigError(
                f"parallel: '{self},{inner}': fsdp around {inner.kind} shares slices of weights, and has no context, "
                f"memory or experts of its own. Write {without},{inner}"
            )

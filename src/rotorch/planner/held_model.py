"""A folded model as a layout's strategies hold it, and the peaks of its ranks for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy, sharing, with_visits
from rotorch.core.traffic import MicroBatch
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.memory import Memory, peaks
from rotorch.planner.memory_at_rest import FixedMemory, at_rest
from rotorch.planner.traced import Traced
from rotorch.planner.workload import FoldedModel, fold


@dataclass(frozen=True)
class HeldModel:
    """A layout that can hold a model, with all that does not depend on the batch.

    Attributes:
        folded: the model.
        strategies: outermost first, as they run: without options that are still to be chosen.
        model: with its units as the strategies hold them, one layer per class.
        parts: layers of each stage; none without a pipeline.
        ranks: memory of the ranks that may hold most, at rest.
    """

    folded: FoldedModel
    strategies: tuple[Strategy, ...]
    model: FoldedModel
    parts: tuple[range, ...]
    ranks: tuple[FixedMemory, ...]

    @staticmethod
    def of(spec: ModelSpec, *, folded: FoldedModel, short: FoldedModel, strategies: Sequence[Strategy]) -> HeldModel:
        """Returns a model as strategies hold it.

        Args:
            spec: the model.
            folded: the same, folded.
            short: the same, with one layer per class.
            strategies: outermost first.
        """
        stages = next((s for s in strategies if isinstance(s, StageStrategy)), None)
        inner = strategies[-1]
        if getattr(inner, "memory", None) is not None:  # chosen over all layers, which are then no longer equal
            model = fold(inner.units_of(spec)).short()
        else:
            model = short if inner is stages else short.under(*sharing(strategies), inner)
        parts = stages.parts_of(spec) if stages is not None else ()
        return HeldModel(folded, tuple(strategies), model, parts, at_rest(model, strategies=strategies, parts=parts))

    def peaks(self, traced: Traced, *, batch: MicroBatch, accumulation: int, device: str) -> tuple[Memory, ...]:
        """Returns the peak of each of `ranks`, by traced passes.

        Args:
            traced: the passes.
            batch: one micro-batch.
            accumulation: micro-batches of a step.
            device: of ranks, "cpu" or "cuda".
        """
        in_shared_memory = getattr(self.strategies[-1], "transport", "") == "shared_memory"
        return peaks(
            self.folded,
            traced,
            ranks=self.ranks,
            strategies=self.strategies,
            batch=batch,
            accumulation=accumulation,
            parts=self.parts,
            cut=self.model if with_visits(self.strategies) is not None else None,
            held=self.model if in_shared_memory else None,
            device=device,
        )


def with_transports(strategies: Sequence[Strategy], *, device: str, per_host: int) -> tuple[Strategy, ...]:
    """The same strategies with the transports that `auto` comes to.

    Args:
        strategies: outermost first, as they are on the device.
        device: of ranks, "cpu" or "cuda".
        per_host: ranks of a host.
    """

    def resolved(number: int, strategy: Strategy) -> Strategy:
        if getattr(strategy, "transport", None) != "auto":
            return strategy
        if device == "cpu":
            return strategy.model_copy(update={"transport": "shared_memory"})
        reach = prod(each.num_ranks for each in strategies[number:])  # ranks side by side, of it and inside of it
        if strategy.slices_visit and strategy.num_ranks > 1 and reach <= per_host:
            return strategy.model_copy(update={"transport": "symmetric_memory"})
        return strategy

    return tuple(resolved(number, strategy) for number, strategy in enumerate(strategies))

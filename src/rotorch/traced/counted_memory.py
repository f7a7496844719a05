"""Memory of ranks under a layout, activations included: passes of a model are counted on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision
from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.models.hf import causal_lm
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.planner.held_model import HeldModel, with_transports
from rotorch.planner.memory import Memory
from rotorch.planner.shared_tokens import own_tokens
from rotorch.planner.stage_costs import counted_costs
from rotorch.planner.traced import Traced
from rotorch.planner.workload import fold
from rotorch.shard.materialize import on_meta
from rotorch.strategies import context_ranks
from rotorch.traced.passes import trace_memory


@dataclass(frozen=True)
class CountedPasses:
    """Passes of a causal language model, counted when a layout first asks for them.

    Attributes:
        model_config: the Hugging Face configuration.
        spec: the model.
        tokens: of a sequence.
        precision: of passes.
        make: makes the module of a configuration.
    """

    model_config: Any
    spec: ModelSpec
    tokens: int
    precision: Precision
    make: Callable[[Any], nn.Module] = causal_lm
    _traced: dict[int, Traced] = field(default_factory=dict, init=False)
    """By the number of ranks that share a sequence."""

    def memory(
        self, strategies: Sequence[Strategy], *, batch: MicroBatch, accumulation: int, device: str, per_host: int
    ) -> list[Memory]:
        """Returns the memory of each rank at the highest moment of a step.

        Args:
            strategies: outermost first, as they are in passes.
            batch: one micro-batch of one rank, or of those that share its sequences.
            accumulation: micro-batches of a step.
            device: of ranks, "cpu" or "cuda".
            per_host: ranks of a host.

        Raises:
            ConfigError: the passes cannot be counted, since they look at values of tensors.
        """
        strategies = with_transports(strategies, device=device, per_host=per_host)
        folded = fold(self.spec)
        held = HeldModel.of(self.spec, folded=folded, short=folded.short(), strategies=strategies)
        found = held.peaks(self._traced_under(strategies), batch=batch, accumulation=accumulation, device=device)
        # Ranks of a stage are alike, and so are replicas around a pipeline.
        firsts, replicas = [fixed.rank for fixed in held.ranks], 1
        for strategy in strategies[:-1]:
            replicas *= strategy.num_ranks if strategy.kind == "ddp" else 1
        own = prod(strategy.num_ranks for strategy in strategies) // replicas
        places = [max(place for place, first in enumerate(firsts) if first <= rank) for rank in range(own)]
        return [found[place] for place in places] * replicas

    def layer_costs(self, strategies: Sequence[Strategy], *, batch: MicroBatch) -> Sequence[LayerCost] | None:
        """Returns the costs of layers, to cut them into stages; None if they are to be estimated."""
        if strategies[-1].kind not in ("pp", "zeropp"):
            return None  # what holds the stages cuts their activations in its own way
        try:
            traced = self._traced_under(strategies)
        except ConfigError:
            return None
        halves = bool(getattr(strategies[-1], "halves", False))
        return counted_costs(self.spec, traced, strategies=strategies, batch=batch, halves=halves)

    def _traced_under(self, strategies: Sequence[Strategy]) -> Traced:
        if (num_ranks := context_ranks(strategies)) not in self._traced:
            shared = None
            if num_ranks > 1:
                with on_meta():
                    shared = try_shared(self.make(self.model_config)).attentions
            own = own_tokens(MicroBatch(1, self.tokens), num_ranks=num_ranks).num_tokens
            self._traced[num_ranks] = trace_memory(
                self.model_config, fold(self.spec), tokens=own, precision=self.precision, shared=shared, make=self.make
            )
        return self._traced[num_ranks]


def by_category(memory: Memory) -> dict[str, int]:
    """Whole bytes, of the categories that have any."""
    return {name: round(num_bytes) for name, num_bytes in memory.by_category.items() if round(num_bytes)}

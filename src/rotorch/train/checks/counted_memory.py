"""Memory of a run's ranks, activations included: passes of its model are counted on fake tensors before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision
from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.models.trial.shared_sequence import try_shared
from rotorch.planner.held_model import HeldModel, with_transports
from rotorch.planner.memory import Memory
from rotorch.planner.shared_tokens import own_tokens
from rotorch.planner.stage_costs import counted_costs
from rotorch.planner.traced import Traced
from rotorch.planner.workload import fold
from rotorch.run_config import LoraSection
from rotorch.shard.materialize import on_meta
from rotorch.strategies import context_ranks
from rotorch.traced.passes import trace_memory
from rotorch.train.module import make_module


@dataclass(frozen=True)
class Counted:
    """Passes of a causal language model under a layout, to be counted.

    Attributes:
        model_config: the Hugging Face configuration.
        spec: the model.
        strategies: outermost first.
        batch: one micro-batch of one rank, or of those that share its sequences.
        precision: of passes.
        lora: adapters.
    """

    model_config: Any
    spec: ModelSpec
    strategies: tuple[Strategy, ...]
    batch: MicroBatch
    precision: Precision
    lora: LoraSection | None

    def memory(self, *, accumulation: int, device: str, per_host: int) -> list[Memory]:
        """Returns the memory of each rank at the highest moment of a step.

        Args:
            accumulation: micro-batches of a step.
            device: of ranks, "cpu" or "cuda".
            per_host: ranks of a host.

        Raises:
            ConfigError: the passes cannot be counted, since they look at values of tensors.
        """
        strategies = with_transports(self.strategies, device=device, per_host=per_host)
        folded = fold(self.spec)
        held = HeldModel.of(self.spec, folded=folded, short=folded.short(), strategies=strategies)
        found = held.peaks(self._traced(), batch=self.batch, accumulation=accumulation)
        # Ranks of a stage are alike, and so are replicas around a pipeline.
        firsts, replicas = [fixed.rank for fixed in held.ranks], 1
        for strategy in strategies[:-1]:
            replicas *= strategy.num_ranks if strategy.kind == "ddp" else 1
        own = prod(strategy.num_ranks for strategy in strategies) // replicas
        places = [max(place for place, first in enumerate(firsts) if first <= rank) for rank in range(own)]
        return [found[place] for place in places] * replicas

    def layer_costs(self) -> Sequence[LayerCost] | None:
        """Returns the costs of layers, to cut them into stages; None if they are to be estimated."""
        if self.strategies[-1].kind not in ("pp", "zeropp"):
            return None  # what holds the stages cuts their activations in its own way
        try:
            traced = self._traced()
        except ConfigError:
            return None
        halves = bool(getattr(self.strategies[-1], "halves", False))
        return counted_costs(self.spec, traced, strategies=self.strategies, batch=self.batch, halves=halves)

    def _traced(self) -> Traced:
        make, shared = partial(make_module, lora=self.lora), None
        if (num_ranks := context_ranks(self.strategies)) > 1:
            with on_meta():
                shared = try_shared(make(self.model_config)).attentions
        tokens = own_tokens(self.batch, num_ranks=num_ranks).num_tokens
        return trace_memory(
            self.model_config, fold(self.spec), tokens=tokens, precision=self.precision, shared=shared, make=make
        )

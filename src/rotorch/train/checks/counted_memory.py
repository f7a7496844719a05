"""Memory of a run's ranks at the highest moment of a step, where its passes can be counted (`traced/`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.mesh import device_type
from rotorch.planner.memory import Memory
from rotorch.planner.prediction import Prediction, predict_ranks
from rotorch.run_config import BatchSizes
from rotorch.strategies import num_ranks
from rotorch.traced.counted_memory import CountedPasses
from rotorch.train.checks.capacity import rows_per_sample
from rotorch.train.checks.preflight import CheckedRun, in_passes, micro_batch_of
from rotorch.train.module import make_module


class CountedRun:
    """Counted passes of a run, under its own layout and batch and under others: its model is traced when first asked.

    Args:
        run: the checked run.
    """

    def __init__(self, run: CheckedRun) -> None:
        self._run, config = run, run.config
        make = partial(make_module, lora=config.lora)
        tokens, precision = config.data.sequence_length, config.train.precision
        self._passes = CountedPasses(run.model_config, run.spec, tokens, precision, make)

    def memory(self, strategies: Sequence[Strategy], sizes: BatchSizes) -> list[Memory]:
        """Returns the memory of each rank at the highest moment of a step.

        Args:
            strategies: as they are written, outermost first.
            sizes: of the batch under them.

        Raises:
            ConfigError: passes of such a run cannot be counted.
        """
        run, config = self._run, self._run.config
        if config.train.compile:
            raise ConfigError("compiled passes keep other tensors")
        if config.data.kind == "preferences":
            raise ConfigError("the loss of preferences keeps other tensors")
        if not run.spec.order.layers:
            raise ConfigError(f"{run.spec.name} does not say what its layers are")
        strategies, batch = in_passes(config, strategies), micro_batch_of(config)
        ranks, local = num_ranks(strategies), int(os.environ.get("LOCAL_WORLD_SIZE", run.num_ranks))
        found = self._passes.memory(
            strategies,
            batch=replace(batch, num_rows=rows_per_sample(config.data) * sizes.micro_batch),
            accumulation=sizes.accumulation,
            device=device_type(config.train.device),
            per_host=ranks if local == run.num_ranks else local,  # one host has as many as there are
        )
        if config.optimizer.name == "adamw":  # which plans are made with
            return found
        states = [optimizer_bytes(run, each) for each in predict_ranks(run.spec, strategies=strategies)]
        return [
            replace(memory, by_category={**memory.by_category, "optimizer": state})
            for memory, state in zip(found, states, strict=True)
        ]

    def peaks(self, strategies: Sequence[Strategy], sizes: BatchSizes) -> list[float]:
        """Returns the bytes of each rank at the highest moment of a step; as `memory`."""
        return [memory.total_bytes for memory in self.memory(strategies, sizes)]


def counted_ranks(run: CheckedRun) -> tuple[Sequence[Memory | None], str]:
    """Returns the memory of each rank of a run at its highest moment; or of each None, and why not."""
    try:
        return CountedRun(run).memory(run.strategies, run.sizes), ""
    except ConfigError as error:
        return [None] * run.num_ranks, str(error)


def optimizer_bytes(run: CheckedRun, predicted: Prediction) -> int:
    """Bytes of the state of a rank's optimizer, or the least that they can be: plans are made with AdamW's."""
    settings = run.config.optimizer
    if settings.name == "adamw":
        return predicted.ledger["optimizer"] or 0
    return settings.least_moments * predicted.trained_bytes

"""Memory of a run's ranks at the highest moment of a step, where its passes can be counted (`traced/`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rotorch.core.errors import ConfigError
from rotorch.mesh import device_type
from rotorch.planner.memory import Memory
from rotorch.planner.prediction import Prediction
from rotorch.traced.counted_memory import CountedPasses
from rotorch.train.checks.preflight import CheckedRun, micro_batch_of
from rotorch.train.module import make_module


def counted_ranks(
    run: CheckedRun, *, predictions: Sequence[Prediction], per_host: int
) -> tuple[Sequence[Memory | None], str]:
    """Returns the memory of each rank at its highest moment; or nothing, and why not.

    Args:
        run: the checked run.
        predictions: of its ranks, in passes.
        per_host: ranks of a host.
    """
    config, nothing = run.config, [None] * run.num_ranks
    if config.train.compile:
        return nothing, "compiled passes keep other tensors"
    if config.data.kind == "preferences":
        return nothing, "the loss of preferences keeps other tensors"
    if not run.spec.order.layers:
        return nothing, f"{run.spec.name} does not say what its layers are"
    make = partial(make_module, lora=config.lora)
    passes = CountedPasses(run.model_config, run.spec, config.data.sequence_length, config.train.precision, make)
    try:
        found = passes.memory(
            run.strategies_in_passes,
            batch=micro_batch_of(config),
            accumulation=run.sizes.accumulation,
            device=device_type(config.train.device),
            per_host=per_host,
        )
    except ConfigError as error:
        return nothing, str(error)
    states = [optimizer_bytes(run, each) for each in predictions]
    return [
        replace(memory, by_category={**memory.by_category, "optimizer": state})
        for memory, state in zip(found, states, strict=True)
    ], ""


def optimizer_bytes(run: CheckedRun, predicted: Prediction) -> int:
    """Bytes of the state of a rank's optimizer, or the least that they can be: plans are made with AdamW's."""
    settings = run.config.optimizer
    if settings.name == "adamw":
        return predicted.ledger["optimizer"] or 0
    return settings.least_moments * predicted.trained_bytes

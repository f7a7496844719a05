"""`prepare`: what `Accelerator.prepare` does, with a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from rotorch.accelerate.accelerator import ParallelAccelerator
from rotorch.accelerate.shares import of_shares
from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.drop_in.optimizers import PlainParameters
from rotorch.drop_in.plain_loops import check_plain_loop, layout_of_all
from rotorch.parallelize import parallelize
from rotorch.strategies import batch_ranks, format_parallel, num_ranks, parse_parallel

_OURS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *objects: Any, layout: str | Sequence[Strategy] | None = None) -> Any:
    """Spreads a model over all ranks, and prepares the other arguments as Accelerate does. All ranks.

    The accelerator is the user's own, and goes on as such: `accumulate`, `backward`, `clip_grad_norm_`,
    `gather_for_metrics`, `save_state` and the rest. Further loaders and schedulers go to its own `prepare`.

    Args:
        accelerator: which.
        objects: a model, optimizers over its parameters, loaders, schedulers, in any order. The model comes back
            parallel, in place; optimizers that were made over the plain one get its new parameters, in place; loaders
            give each share of a batch its rows.
        layout: `"rtp=8"`; left out if `rotorch.parallelize` has returned the model.

    Returns:
        The objects, prepared, in the same order; one alone not as a tuple.

    Raises:
        ConfigError: what cannot be right together, before anything is changed.
    """
    models = [given for given in objects if isinstance(given, nn.Module)]
    optimizers = [given for given in objects if isinstance(given, torch.optim.Optimizer)]
    if len(models) != 1:
        raise ConfigError(f"rotorch.accelerate.prepare: {len(models)} models given. Give one, and call it for each")
    model, is_parallel = models[0], hasattr(models[0], "parallel")
    if (layout is None) is not is_parallel:
        raise ConfigError(
            "rotorch.accelerate.prepare: the model is parallel already, and layout= would spread it again. Leave it out"
            if is_parallel
            else f"rotorch.accelerate.prepare: write layout={layout_of_all()!r}, or give what rotorch.parallelize has "
            "returned"
        )
    strategies: Sequence[Strategy] = (
        models[0].parallel.strategies
        if layout is None
        else parse_parallel(layout)
        if isinstance(layout, str)
        else layout
    )
    check_plain_loop(strategies, model, who="rotorch.accelerate.prepare")
    _check(accelerator, strategies)
    plain = PlainParameters(model, who="rotorch.accelerate.prepare")
    plain.check(optimizers)
    if not is_parallel:
        parallelize(model, strategies, device=accelerator.device.type)
        plain.give_new_ones(optimizers)
    parallel = model.parallel
    if not isinstance(accelerator, ParallelAccelerator):
        of_shares(accelerator, parallel, spread=_refuse, kind=ParallelAccelerator)
        assert isinstance(accelerator, ParallelAccelerator)
        accelerator._model_of = {}
    elif (accelerator.process_index, accelerator.num_processes) != (parallel.batch_rank, parallel.num_batch_ranks):
        raise ConfigError(
            "rotorch.accelerate.prepare: this accelerator has a model whose ranks share batches differently. Give "
            "both the same layout, or an Accelerator each"
        )
    accelerator._model_of |= {id(optimizer): model for optimizer in optimizers}
    return accelerator.prepare(*objects)


def _refuse(model: nn.Module) -> None:
    if not hasattr(model, "parallel"):
        raise ConfigError(
            f"Accelerator.prepare: {type(model).__name__} is whole on every rank. Give it to "
            "rotorch.accelerate.prepare with layout='ddp=8', say"
        )


def _check(accelerator: Accelerator, strategies: Sequence[Strategy]) -> None:
    """Raises `ConfigError` for settings of an accelerator that cannot be right on a parallel model."""
    kind, who = accelerator.distributed_type, "rotorch.accelerate.prepare: Accelerator"
    if kind not in _OURS:
        raise ConfigError(f"{who} with {kind.value} would spread the model in its own way. Leave its plugin out")
    if accelerator.state.num_processes != num_ranks(strategies):
        raise ConfigError(
            f"{who} counts {accelerator.state.num_processes} processes, and {format_parallel(strategies)!r} has "
            f"{num_ranks(strategies)} ranks. Start that many, and on CPU write Accelerator(cpu=True)"
        )
    if accelerator.parallelism_config is not None:
        raise ConfigError(f"{who}(parallelism_config=...) would spread the model in its own way. Leave it out")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ConfigError(f"{who}(dynamo_backend=...) would trace through what goes between ranks. Leave it out")
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"{who}(mixed_precision={accelerator.mixed_precision!r}) is not tried under a layout. Write 'bf16' or 'no'"
        )
    if accelerator.dispatch_batches and batch_ranks(strategies) != accelerator.state.num_processes:
        raise ConfigError(
            f"{who}(dispatch_batches=True) gives each rank a batch of its own, and ranks of this layout share them. "
            "Leave it out"
        )

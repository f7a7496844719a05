"""Refusal of runs that this machine cannot hold in any case: by lower bounds, without a trial.

Closer limits are checked by `--dry-run`, which knows each rank's bytes, and by the report of a rank that
runs out of memory. Ranks that another launcher started may run on other machines, and GPUs have memory of their own:
these are not checked here.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.precision import itemsize_of_passes
from rotorch.core.quantities import format_bytes
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy
from rotorch.process.host_memory import most_bytes
from rotorch.run_config import BatchSizes, OptimizerSection, RunConfig
from rotorch.run_data import DataSection
from rotorch.strategies import batch_ranks, num_ranks
from rotorch.train.checkpoint.directories import checkpoints_of
from rotorch.train.checkpoint.store import AnyPath, StorePath
from rotorch.train.data.batches import CheckedSource

_RANK_BYTES = 8 << 20  # of a forked rank that shares all it can: page tables, its heap, buffers of messages
_TOKEN_BYTES = 2 * 8  # its id and its label, int64
_MOST_READINGS = 10


def check_number_of_ranks(strategies: Sequence[Strategy]) -> None:
    """Checks that this machine has room for so many processes."""
    asked, has = num_ranks(strategies), most_bytes()
    if asked * _RANK_BYTES > has:
        raise ConfigError(
            f"parallel: {asked} ranks on one machine would take {format_bytes(asked * _RANK_BYTES)} or more, and it "
            f"has {format_bytes(has)}. Write a smaller layout, or start ranks on several machines with torchrun"
        )


def check_weights_fit(spec: ModelSpec, *, optimizer: OptimizerSection) -> None:
    """Checks that all ranks together can hold weights, gradients and the optimizer's state at least once."""
    needed, has = spec.num_bytes + (1 + optimizer.least_moments) * spec.trained_bytes, most_bytes()
    if needed > has:
        name = "AdamW" if optimizer.name == "adamw" else optimizer.name
        raise ConfigError(
            f"model: weights, gradients and {name}'s state of its {spec.num_parameters} parameters take "
            f"{format_bytes(needed)}, and this machine has {format_bytes(has)}. Write a smaller model, or start ranks "
            "on several machines with torchrun"
        )


def check_batch_fits(
    config: RunConfig, *, strategies: Sequence[Strategy], sizes: BatchSizes, model_config: Any
) -> None:
    """Tokens of a micro-batch, and the input of every layer that backward needs, have room: once per batch rank."""
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    width, layers = (getattr(text_config, name, None) or 1 for name in ("hidden_size", "num_hidden_layers"))
    itemsize = itemsize_of_passes(config.train.precision)
    per_token = _TOKEN_BYTES + width * layers * itemsize
    per_sample = per_token * rows_per_sample(config.data) * config.data.sequence_length * batch_ranks(strategies)
    has = most_bytes()
    if sizes.micro_batch * per_sample <= has:
        return
    fits = has // per_sample
    write = f"train.micro_batch={fits} or less" if fits else "a smaller data.sequence_length"
    raise ConfigError(
        f"train.micro_batch = {sizes.micro_batch} samples of data.sequence_length = {config.data.sequence_length} "
        f"tokens take {format_bytes(sizes.micro_batch * per_sample)} or more in a pass, and this machine has "
        f"{format_bytes(has)}. Write {write}"
    )


def check_measured_rows(num_rows: int, *, length: int, model_config: Any, strategies: Sequence[Strategy]) -> None:
    """Tokens of `eval`'s passes have room, and the input of one layer in float16: nothing is kept for a backward."""
    text_config = model_config.get_text_config()
    per_row = (_TOKEN_BYTES + 2 * (getattr(text_config, "hidden_size", None) or 1)) * length * batch_ranks(strategies)
    if num_rows * per_row <= (has := most_bytes()):
        return
    fits = max(1, has // per_row)
    raise ConfigError(
        f"eval --micro-batch {num_rows}: so many windows of {length} tokens take {format_bytes(num_rows * per_row)} or "
        f"more in a pass, and this machine has {format_bytes(has)}. Write --micro-batch {fits} or less"
    )


def rows_per_sample(data: DataSection) -> int:
    """Returns the number of sequences of `sequence_length` in a sample: a preference pair has two."""
    return 2 if data.kind == "preferences" else 1


def check_text_lasts(sizes: BatchSizes, *, config: RunConfig, source: CheckedSource) -> None:
    """Checks that one step does not read the text several times. Known before tokenising for bytes only."""
    if (
        config.data.tokenizer != "bytes"
        or source.parts
        or source.stream is not None
        or source.instructions is not None
        or not source.corpus.is_exact
    ):
        return
    windows = max(1, source.corpus.text_bytes // (config.data.sequence_length + 1))
    if sizes.global_batch > _MOST_READINGS * windows:
        raise ConfigError(
            f"train.global_batch = {sizes.global_batch} (micro_batch {sizes.micro_batch} x accumulation "
            f"{sizes.accumulation} x {sizes.batch_ranks} batch ranks) reads the {windows} samples of "
            f"{config.data.source} {sizes.global_batch // windows} times in one step. Write a smaller batch, or a "
            "longer data.source"
        )


def check_room(out: AnyPath, *, spec: ModelSpec, keep: int, optimizer: OptimizerSection) -> None:
    """The disk has room for the checkpoints that are kept, and for one more while it is written. Stores do not tell."""
    if isinstance(out, StorePath):
        return
    each = spec.num_bytes + optimizer.least_moments * spec.trained_bytes
    existing = len(list(checkpoints_of(out).glob("step-*")))
    needed = each * max(1, keep + 1 - existing)
    place = next(parent for parent in (out, *out.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"train.out: {out}: {keep} checkpoints of {format_bytes(each)} and one more while it is written need "
            f"{format_bytes(needed)}, {format_bytes(free)} are free. Free some, write a smaller train.keep=..., "
            "or train.out=... on another disk"
        )
